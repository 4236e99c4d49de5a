// The warpgroup products of compute capability 9.0: four warps multiply 64 rows at once, with right
// operands, and left ones where they are not in registers, read from shared memory by the tensor
// core itself. Only code for sm_90a has them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/mma.cuh"

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

// Arrives at a barrier of the block that others wait at (mma.cuh: meet).
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

__device__ inline std::uint64_t describe(std::uint32_t address, std::uint32_t leading,
                                         std::uint32_t stride, bool permuted) {
  return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) |
         static_cast<std::uint64_t>(leading >> 4) << 16 |
         static_cast<std::uint64_t>(stride >> 4) << 32 |
         static_cast<std::uint64_t>(permuted ? 1 : 0) << 62;
}

// Tiles are panels of 64 columns: rows of 128 bytes, whose 16-byte pieces are permuted as the
// tensor core does it; a panel of kRows rows follows the other. They begin at multiples of 1024.
inline constexpr int kPanelRow = 128;
template <int kRows>
__device__ inline std::uint32_t panel_offset(int row, int piece) {
  return static_cast<std::uint32_t>((piece >> 3) * (kRows * kPanelRow) + row * kPanelRow +
                                    (((piece ^ row) & 7) << 4));
}

// 64 rows of a tile, summed over its columns.
template <int kRows>
struct ByRows {
  std::uint64_t base;
  static constexpr int kTransposed = 0;
  __device__ ByRows(const unsigned char* tile, int first_row)
      : base(describe(shared_address(tile) + first_row * kPanelRow, 16, 8 * kPanelRow, true)) {}
  __device__ std::uint64_t step(int i) const {
    return base + (((i >> 2) * (kRows * kPanelRow) + (i & 3) * 32) >> 4);
  }
};
// Columns of a tile from column `first` (a multiple of 64) on, summed over its rows.
template <int kRows>
struct ByColumns {
  std::uint64_t base;
  static constexpr int kTransposed = 1;
  __device__ ByColumns(const unsigned char* tile, int first)
      : base(describe(shared_address(tile) + first / 64 * (kRows * kPanelRow), kRows * kPanelRow,
                      8 * kPanelRow, true)) {}
  __device__ std::uint64_t step(int i) const { return base + ((i * 16 * kPanelRow) >> 4); }
};
// Eight columns, [eight of the sum][column][of the sum]: 128 bytes for eight of the sum.
struct Narrow {
  std::uint64_t base;
  static constexpr int kTransposed = 0;
  __device__ explicit Narrow(const void* vector)
      : base(describe(shared_address(vector), 128, 128, false)) {}
  __device__ std::uint64_t step(int i) const { return base + ((i * 256) >> 4); }
};
// Eight columns of ones: 256 bytes.
struct Ones {
  std::uint64_t base;
  static constexpr int kTransposed = 0;
  __device__ explicit Ones(const void* ones)
      : base(describe(shared_address(ones), 128, 128, false)) {}
  __device__ std::uint64_t step(int) const { return base; }
};

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

// acc = x y, or acc += x y: kSteps times 16 of the sum.
template <int kSteps, class Acc, class X, class Y>
__device__ inline void multiply(Acc& acc, const X& x, const Y& y, bool accumulate) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    wgmma<X::kTransposed, Y::kTransposed>(acc, x.step(i), y.step(i), accumulate || i > 0);
  }
}
// The same with rows in registers.
template <class Acc, int kSteps, class Y>
__device__ inline void multiply_words(Acc& acc, const std::uint32_t (&x)[kSteps][4], const Y& y,
                                      bool accumulate) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    wgmma<Y::kTransposed>(acc, x[i], y.step(i), accumulate || i > 0);
  }
}

}  // namespace lln::cuda::sm90
