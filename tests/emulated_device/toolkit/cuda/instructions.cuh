// The instructions of src/cuda/instructions.cuh on the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "emulated_device/tensor_core.h"

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
  emulated::together("mma", &own, [](const emulated::Operands& lanes) EMULATED_BESIDE {
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
    for (unsigned row = 0; row < 16; ++row) {
      float sums[8];
      const auto place = [&](unsigned column) -> float& {
        const Lane& lane = *static_cast<const Lane*>(lanes[row % 8 * 4 + column / 2]);
        return lane.d[row / 8 * 2 + column % 2];
      };
      for (unsigned column = 0; column < 8; ++column) sums[column] = place(column);
      emulated::add_products(sums, a[row], b);
      for (unsigned column = 0; column < 8; ++column) place(column) = sums[column];
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
    emulated::Thread* thread;
  } own{emulated::at_address(address), x, emulated::current};
  emulated::together(
      kTransposed ? "ldmatrix.trans" : "ldmatrix", &own,
      [](const emulated::Operands& lanes) EMULATED_BESIDE {
        for (void* const each : lanes) {
          const Lane& lane = *static_cast<const Lane*>(each);
          emulated::touch_as(*lane.thread, lane.row, 16, {emulated::Actor::lanes});
        }
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

inline void copy_async(std::uint32_t to, const void* from, bool valid) {
  emulated::begin_copy(to, from, 16, valid);
}
inline void copy_word_async(std::uint32_t to, const void* from, bool valid) {
  emulated::begin_copy(to, from, 4, valid);
}
inline void copy_commit() { emulated::commit_copies(); }
template <int kPending>
void copy_wait() {
  emulated::wait_copies(kPending);
}

// Kernels run one after the other; what they touch is checked as if they did not.
inline void wait_for_previous() { emulated::wait_for_previous_kernel(); }
inline void let_next_start() { emulated::let_next_kernel_start(); }
inline void prefetch_l2(const void*, unsigned) {}
EMULATED_BESIDE inline void raise_flag(std::uint32_t& flag) { flag = 1; }

inline void meet(int barrier, int threads) {
  emulated::meet(static_cast<unsigned>(barrier), static_cast<unsigned>(threads));
}

}  // namespace lln::cuda
