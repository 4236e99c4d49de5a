// The instructions of compute capability 9.0, each behind a function: products of warpgroups, four
// warps that multiply 64 rows at once with operands that the tensor core reads from shared memory
// itself (wgmma.cuh describes them to it); barriers that count bytes, and copies of whole tiles by
// the copy engine (TMA); the registers that warpgroups hand to each other. Only code for sm_90a has
// them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/instructions.cuh"

namespace lln::cuda::sm90 {

// What threads wrote to shared memory is for the tensor core to see: before the barrier that others
// wait at.
__device__ inline void show_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Before products that read registers written by other instructions.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups are under way. Results are for use after settle().
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Arrives at a barrier of the block that others wait at (meet).
__device__ inline void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Keeps the compiler from using results before, or operands again until, the wait.
template <int kCount>
__device__ inline void settle(float (&x)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(x[n][i])::"memory");
  }
}
__device__ inline void settle(float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ inline void settle(std::uint32_t (&x)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[n][i])::"memory");
  }
}

// d = x y, or d += x y, for 16 of the sum and 8, 64 or 128 columns. Operands are descriptors, x
// also 64 rows in registers; kTrans: the operand is summed over the rows of its tile.
#define LLN_ROW(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
template <int kTransA, int kTransB>
__device__ inline void wgmma(float (&d)[4], std::uint64_t a, std::uint64_t b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %6, 0; "
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %8;}"
      : LLN_ROW(d)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA), "n"(kTransB));
}
template <int kTransB>
__device__ inline void wgmma(float (&d)[4], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %9, 0; "
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, %10;}"
      : LLN_ROW(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransB));
}
template <int kTransA, int kTransB>
__device__ inline void wgmma(float (&d)[8][4], std::uint64_t a, std::uint64_t b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, %35, %36;}"
      : LLN_ROW(d[0]), LLN_ROW(d[1]), LLN_ROW(d[2]), LLN_ROW(d[3]), LLN_ROW(d[4]), LLN_ROW(d[5]),
        LLN_ROW(d[6]), LLN_ROW(d[7])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA), "n"(kTransB));
}
template <int kTransB>
__device__ inline void wgmma(float (&d)[8][4], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
      : LLN_ROW(d[0]), LLN_ROW(d[1]), LLN_ROW(d[2]), LLN_ROW(d[3]), LLN_ROW(d[4]), LLN_ROW(d[5]),
        LLN_ROW(d[6]), LLN_ROW(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransB));
}
template <int kTransA, int kTransB>
__device__ inline void wgmma(float (&d)[16][4], std::uint64_t a, std::uint64_t b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63}, %64, %65, p, 1, 1, %67, %68;}"
      : LLN_ROW(d[0]), LLN_ROW(d[1]), LLN_ROW(d[2]), LLN_ROW(d[3]), LLN_ROW(d[4]), LLN_ROW(d[5]),
        LLN_ROW(d[6]), LLN_ROW(d[7]), LLN_ROW(d[8]), LLN_ROW(d[9]), LLN_ROW(d[10]), LLN_ROW(d[11]),
        LLN_ROW(d[12]), LLN_ROW(d[13]), LLN_ROW(d[14]), LLN_ROW(d[15])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA), "n"(kTransB));
}
template <int kTransB>
__device__ inline void wgmma(float (&d)[16][4], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
      : LLN_ROW(d[0]), LLN_ROW(d[1]), LLN_ROW(d[2]), LLN_ROW(d[3]), LLN_ROW(d[4]), LLN_ROW(d[5]),
        LLN_ROW(d[6]), LLN_ROW(d[7]), LLN_ROW(d[8]), LLN_ROW(d[9]), LLN_ROW(d[10]), LLN_ROW(d[11]),
        LLN_ROW(d[12]), LLN_ROW(d[13]), LLN_ROW(d[14]), LLN_ROW(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kTransB));
}
#undef LLN_ROW

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
