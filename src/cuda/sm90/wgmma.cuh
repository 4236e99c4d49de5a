// Operands of the products of warpgroups: how tiles in shared memory are described to the tensor
// core, and products of them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/mma.cuh"
#include "cuda/sm90/instructions.cuh"

namespace lln::cuda::sm90 {

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
