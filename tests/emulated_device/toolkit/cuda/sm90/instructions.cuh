// The instructions of src/cuda/sm90/instructions.cuh on the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/instructions.cuh"
#include "emulated_device/engines.h"

namespace lln::cuda::sm90 {

inline void show_products() { emulated::show_writes(*emulated::current); }
inline void begin_products() {}
inline void commit_products() { emulated::commit_products(); }
template <int kPending>
void wait_products() {
  emulated::wait_products(kPending);
}

inline void arrive_at(int barrier, int threads) {
  emulated::arrive(static_cast<unsigned>(barrier), static_cast<unsigned>(threads));
}

template <class Results>
void settle(Results&) {}

template <int kTransA, int kTransB, class Results>
void wgmma(Results& d, std::uint64_t a, std::uint64_t b, bool accumulate) {
  emulated::begin_product(reinterpret_cast<float*>(&d), sizeof d / 16 * 8, a, nullptr, kTransA != 0,
                          b, kTransB != 0, accumulate);
}
template <int kTransB, class Results>
void wgmma(Results& d, const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) {
  emulated::begin_product(reinterpret_cast<float*>(&d), sizeof d / 16 * 8, 0, a, false, b,
                          kTransB != 0, accumulate);
}

using Barrier = emulated::ByteBarrier;

inline void barrier_init(Barrier& barrier, int arrivals) {
  emulated::barrier_init(barrier, static_cast<unsigned>(arrivals));
}
inline void barriers_ready() {}
template <int kTimes = 1>
void arrive(Barrier& barrier) {
  emulated::barrier_arrive(barrier, kTimes, 0);
}
inline void arrive_expecting(Barrier& barrier, int bytes) {
  emulated::barrier_arrive(barrier, 1, bytes);
}
inline void wait(Barrier& barrier, std::uint32_t parity) {
  emulated::barrier_wait(barrier, parity);
}

inline bool meet_all(bool good, int barrier, int threads) {
  return emulated::meet(static_cast<unsigned>(barrier), static_cast<unsigned>(threads), good).all;
}

inline void load_box(void* to, const CUtensorMap& map, int channel, int token, int head, int batch,
                     Barrier& barrier) {
  emulated::load_box(to, map, {channel, token, head, batch}, barrier);
}
inline void store_box(const CUtensorMap& map, const void* from, int channel, int token, int head,
                      int batch) {
  emulated::store_box(map, from, {channel, token, head, batch});
}
inline void stores_commit() { emulated::commit_stores(); }
template <int kPending>
void stores_wait_read() {
  emulated::wait_stores_read(kPending);
}

inline void store_matrices(std::uint32_t address, std::uint32_t x0, std::uint32_t x1,
                           std::uint32_t x2, std::uint32_t x3) {
  if (address % 16 != 0) emulated::fault("stmatrix to an address that is no multiple of 16");
  struct Lane {
    unsigned char* row;
    std::uint32_t x[4];
  } own{emulated::at_address(address), {x0, x1, x2, x3}};
  emulated::touch(own.row, 16, {.writes = true, .instruction = __builtin_return_address(0)});
  emulated::together("stmatrix", &own, [](const emulated::Operands& lanes) EMULATED_BESIDE {
    for (unsigned lane = 0; lane < emulated::kLanes; ++lane) {
      for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned char* const row = static_cast<const Lane*>(lanes[8 * matrix + lane / 4])->row;
        std::memcpy(row + 4 * (lane % 4), &static_cast<const Lane*>(lanes[lane])->x[matrix], 4);
      }
    }
  });
}

template <int>
void give_registers() {}
template <int>
void take_registers() {}

}  // namespace lln::cuda::sm90
