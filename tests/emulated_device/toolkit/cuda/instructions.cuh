// The instructions of src/cuda/instructions.cuh on the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#define LLN_DYNAMIC_SHARED(name) unsigned char* const name = ::emulated::dynamic_memory()

namespace lln::cuda {

using Bf16 = __nv_bfloat16;
using F16 = __half;

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126F ? 0 : y;  // keeps NaN
}

inline float min_keep_nan(float x, float y) { return isnan(x) || isnan(y) ? NAN : fminf(x, y); }
inline float max_keep_nan(float x, float y) { return isnan(x) || isnan(y) ? NAN : fmaxf(x, y); }

template <class T>
std::uint16_t bits_of(float x) {
  return std::is_same_v<T, Bf16> ? bf16_from_f32(x) : f16_from_f32(x);
}
template <class T>
float number_of(std::uint32_t bits) {
  const auto half = static_cast<std::uint16_t>(bits);
  return std::is_same_v<T, Bf16> ? f32_from_bf16(half) : f32_from_f16(half);
}

template <class T>
std::uint32_t pack(float x, float y) {
  return bits_of<T>(x) | std::uint32_t{bits_of<T>(y)} << 16;
}

inline std::uint32_t larger_magnitudes(std::uint32_t x, std::uint32_t y) {
  const auto larger = [](std::uint32_t a, std::uint32_t b) {
    return bits_of<Bf16>(max_keep_nan(number_of<Bf16>(a), fabsf(number_of<Bf16>(b))));
  };
  return larger(x, y) | std::uint32_t{larger(x >> 16, y >> 16)} << 16;
}

template <class T>
void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
         std::uint32_t b0, std::uint32_t b1) {
  struct Lane {
    std::uint32_t a[4], b[2];
    float* d;
  } own{{a0, a1, a2, a3}, {b0, b1}, d};
  emulated::together("mma", &own, [](const emulated::Operands& lanes) {
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < emulated::kLanes; ++lane) {
      const Lane& from = *static_cast<const Lane*>(lanes[lane]);
      const unsigned g = lane / 4, t = lane % 4 * 2;
      for (unsigned half = 0; half < 2; ++half) {
        for (unsigned i = 0; i < 4; ++i) {
          a[g + i % 2 * 8][t + i / 2 * 8 + half] = number_of<T>(from.a[i] >> 16 * half);
        }
        for (unsigned i = 0; i < 2; ++i) {
          b[t + i * 8 + half][g] = number_of<T>(from.b[i] >> 16 * half);
        }
      }
    }
    for (unsigned lane = 0; lane < emulated::kLanes; ++lane) {
      float* const to = static_cast<const Lane*>(lanes[lane])->d;
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (unsigned k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        to[i] += sum;
      }
    }
  });
}

using emulated::shared_address;

inline uint4 load_shared(const void* p) { return *static_cast<const uint4*>(p); }

template <bool kTransposed>
void load_four(std::uint32_t (&x)[4], std::uint32_t address) {
  if (address % 16 != 0) emulated::fault("ldmatrix from an address that is no multiple of 16");
  struct Lane {
    const unsigned char* row;
    std::uint32_t* x;
  } own{emulated::at_address(address), x};
  emulated::together(
      kTransposed ? "ldmatrix.trans" : "ldmatrix", &own, [](const emulated::Operands& lanes) {
        for (unsigned lane = 0; lane < emulated::kLanes; ++lane) {
          for (unsigned matrix = 0; matrix < 4; ++matrix) {
            std::uint16_t pair[2];
            for (unsigned half = 0; half < 2; ++half) {
              const unsigned outer = lane / 4, inner = lane % 4 * 2 + half;
              const unsigned row = kTransposed ? inner : outer,
                             column = kTransposed ? outer : inner;
              std::memcpy(&pair[half],
                          static_cast<const Lane*>(lanes[8 * matrix + row])->row + 2 * column, 2);
            }
            static_cast<const Lane*>(lanes[lane])->x[matrix] = pair[0] | std::uint32_t{pair[1]}
                                                                             << 16;
          }
        }
      });
}
inline void load_matrices(std::uint32_t (&x)[4], std::uint32_t address) {
  load_four<false>(x, address);
}
inline void load_transposed(std::uint32_t (&x)[4], std::uint32_t address) {
  load_four<true>(x, address);
}

inline void begin_copy(std::uint32_t to, const void* from, std::size_t bytes, bool valid) {
  if (to % bytes != 0 || reinterpret_cast<std::uintptr_t>(from) % bytes != 0) {
    emulated::fault("copies " + std::to_string(bytes) + " bytes at addresses that are no multiple");
  }
  emulated::Groups& copies = emulated::current->copies;
  copies.begin_one();
  unsigned char* const at = emulated::at_address(to);
  emulated::begin({{}, [=, ended = copies.end_one()] {
                     if (valid) {
                       std::memcpy(at, from, bytes);
                     } else {
                       std::memset(at, 0, bytes);
                     }
                     ended();
                   }});
}
inline void copy_async(std::uint32_t to, const void* from, bool valid) {
  begin_copy(to, from, 16, valid);
}
inline void copy_word_async(std::uint32_t to, const void* from, bool valid) {
  begin_copy(to, from, 4, valid);
}
inline void copy_commit() { emulated::current->copies.commit(); }
template <int kPending>
void copy_wait() {
  emulated::wait_until("copies into shared memory",
                       [] { return emulated::current->copies.ended_but(kPending); });
}

// Kernels run one after the other.
inline void wait_for_previous() {}
inline void let_next_start() {}
inline void prefetch_l2(const void*, unsigned) {}

inline void meet(int barrier, int threads) {
  emulated::meet(static_cast<unsigned>(barrier), static_cast<unsigned>(threads));
}

}  // namespace lln::cuda
