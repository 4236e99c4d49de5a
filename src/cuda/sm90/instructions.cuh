// What only Hopper has, behind one function each: barriers that count bytes, copies of whole tiles
// by the copy engine (TMA), and products of a warpgroup whose right operand, or both, lie in shared
// memory (wgmma). Descriptors are those of PTX ISA, "Asynchronous warpgroup level matrix
// instructions".
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/mma.cuh"

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
__device__ inline void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
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

// What threads wrote to shared memory becomes visible to the copy engine and to wgmma; a barrier
// among the writers must follow.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Tiles as TMA writes them with the 128-byte swizzle: blocks of 64 channels, in a block rows of 128
// bytes whose 16-byte pieces are permuted by the row. Blocks are aligned to 1024 bytes.
inline constexpr int kBlockChannels = 64;
__device__ inline std::uint32_t swizzled(int row, int piece) {
  return static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
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

// An operand in swizzled blocks, `channels` being what a row of it holds.
// Summed over channels ("K-major"): groups of 8 rows lie 1024 bytes apart; 16 channels further are
// 32 bytes further.
// Summed over rows ("MN-major"): the same, and blocks of 64 channels lie `block_bytes` apart; 16
// rows further are 2048 bytes further.
__device__ inline std::uint64_t swizzled_operand(std::uint32_t address, int block_bytes = 0) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | (std::uint64_t{1024 >> 4} << 32) |
         (static_cast<std::uint64_t>(block_bytes >> 4) << 16) |
         static_cast<std::uint64_t>((address & 0x3FFFF) >> 4);
}
// 8 columns, summed over rows of 16 bytes a column and 8 sum terms, without swizzle: matrices of 8
// columns x 8 terms lie 128 bytes apart.
__device__ inline std::uint64_t narrow_operand(std::uint32_t address) {
  return (std::uint64_t{128 >> 4} << 16) | (std::uint64_t{128 >> 4} << 32) |
         static_cast<std::uint64_t>((address & 0x3FFFF) >> 4);
}
// The descriptor of what lies `bytes` further.
__device__ inline std::uint64_t advanced(std::uint64_t operand, int bytes) {
  return operand + static_cast<std::uint64_t>(bytes >> 4);
}

// Before the first product after registers of its operands or results were written.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// How an operand in shared memory is read (swizzled_operand).
enum class Sum { channels, rows };

// d (+)= a b of 64 x 64, 16 terms: a from registers, rows as of mma() for each of the four warps.
template <Sum kB>
__device__ inline void multiply_64(float (&d)[8][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                   bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kB == Sum::rows ? 1 : 0));
}

// The same with a from shared memory.
template <Sum kA, Sum kB>
__device__ inline void multiply_64(float (&d)[8][4], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, %35, %36;\n}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Sum::rows ? 1 : 0),
        "n"(kB == Sum::rows ? 1 : 0));
}

// d (+)= a b of 64 x 128, 16 terms: a from registers, rows as of mma() for each of the four warps.
template <Sum kB>
__device__ inline void multiply_128(float (&d)[16][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                    bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
        "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]),
        "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]),
        "+f"(d[15][2]), "+f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kB == Sum::rows ? 1 : 0));
}

// The same with a from shared memory.
template <Sum kA, Sum kB>
__device__ inline void multiply_128(float (&d)[16][4], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "%64, %65, p, 1, 1, %67, %68;\n}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
        "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]),
        "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]),
        "+f"(d[15][2]), "+f"(d[15][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Sum::rows ? 1 : 0),
        "n"(kB == Sum::rows ? 1 : 0));
}

// Any width that is there.
template <Sum kB, int kTiles>
__device__ inline void multiply(float (&d)[kTiles][4], const std::uint32_t (&a)[4], std::uint64_t b,
                                bool add) {
  if constexpr (kTiles == 8) {
    multiply_64<kB>(d, a, b, add);
  } else {
    multiply_128<kB>(d, a, b, add);
  }
}
template <Sum kA, Sum kB, int kTiles>
__device__ inline void multiply(float (&d)[kTiles][4], std::uint64_t a, std::uint64_t b, bool add) {
  if constexpr (kTiles == 8) {
    multiply_64<kA, kB>(d, a, b, add);
  } else {
    multiply_128<kA, kB>(d, a, b, add);
  }
}

// d += a b of 64 x 8, a from shared memory summed over its rows, b a narrow_operand.
__device__ inline void multiply_narrow(float (&d)[4], std::uint64_t a, std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b));
}

}  // namespace lln::cuda::sm90
