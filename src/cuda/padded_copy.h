// Copies between tensors of the caller and scratch memory with rows of another length, any number
// of tensors in one launch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "lln/tensor.h"

namespace lln::cuda {

// Rows of one tensor, in words of a size that divides everything here.
struct RowCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  // Bytes from one to the next.
  std::int64_t to_batch = 0, to_head = 0, to_row = 0;
  std::int64_t from_batch = 0, from_head = 0, from_row = 0;
  std::int64_t rows = 0, rows_there = 0;  // written in each head; of these, read: others are zeros
  std::uint32_t heads = 1;
  std::uint32_t tiles = 0;                   // of rows, in each head: a block takes one
  std::uint32_t words = 0, words_there = 0;  // the same of a row
  int word_bytes = 0;
  std::int64_t first_block = 0;
};

class RowCopies {
 public:
  // What `to` and `from` have in common, and zeros in the rest of `to`. No data in `from`: zeros
  // alone. Both are of one type and as many batches and heads.
  void add(const View& to, const ConstView& from);
  void launch(const char* name, cudaStream_t stream) const;

  static constexpr int kMost = 20;
  __device__ const RowCopy& of_block(std::int64_t block) const {
    int i = 0;
    while (i + 1 < count_ && all_[i + 1].first_block <= block) ++i;
    return all_[i];
  }

 private:
  RowCopy all_[kMost] = {};
  int count_ = 0;
  std::int64_t blocks_ = 0;
};

}  // namespace lln::cuda
