// Barriers that count bytes, and copies of whole tiles by the copy engine (TMA) of compute
// capability 9.0; the registers that warpgroups hand to each other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/sm90/wgmma.cuh"

namespace lln::cuda::sm90 {

// A barrier in shared memory whose phase ends when so many threads have arrived and all bytes that
// they announced are there.
using Barrier = std::uint64_t;

__device__ inline void barrier_init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes what was initialised known to the copy engine; a barrier of the block must follow.
__device__ inline void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
template <int kTimes = 1>
__device__ inline void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "n"(kTimes)
               : "memory");
}
__device__ inline void arrive_expecting(Barrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the phase of this parity has ended.
__device__ inline void wait(Barrier& barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// meet() that also says whether `good` holds in all of the threads.
__device__ inline bool meet_all(bool good, int barrier, int threads) {
  int all;
  asm volatile(
      "{\n.reg .pred own, all;\n"
      "setp.ne.b32 own, %1, 0;\n"
      "barrier.cta.red.and.aligned.pred all, %2, %3, own;\n"
      "selp.b32 %0, 1, 0, all;\n}\n"
      : "=r"(all)
      : "r"(static_cast<int>(good)), "r"(barrier), "r"(threads)
      : "memory");
  return all != 0;
}

// A box of a tensor [batch, head, token, channel] into shared memory; what is outside is zero.
__device__ inline void load_box(void* to, const CUtensorMap& map, int channel, int token, int head,
                                int batch, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(channel), "r"(token), "r"(head), "r"(batch), "r"(shared_address(&barrier))
      : "memory");
}
// The other way; what is outside is not written.
__device__ inline void store_box(const CUtensorMap& map, const void* from, int channel, int token,
                                 int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(
          shared_address(from)),
      "l"(&map), "r"(channel), "r"(token), "r"(head), "r"(batch)
      : "memory");
}
__device__ inline void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until shared memory has been read by all but the last kPending groups of this thread.
template <int kPending>
__device__ inline void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices to shared memory, the inverse of load_matrices.
__device__ inline void store_matrices(std::uint32_t address, std::uint32_t x0, std::uint32_t x1,
                                      std::uint32_t x2, std::uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

// Registers change hands between warpgroups: those that only copy need few. All four warps of a
// group execute it.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace lln::cuda::sm90
