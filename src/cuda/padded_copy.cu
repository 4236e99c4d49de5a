// A block copies neighbouring rows of one head: neighbouring threads have neighbouring words, and
// several of them are on their way before the first is written.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/padded_copy.h"

#include <algorithm>

#include "cuda/launch.h"

namespace lln::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnderWay = 4;           // words of a thread
constexpr int kTurns = 2 * kUnderWay;  // words of a thread in all

// The largest power of two up to 16 that divides all of these.
template <class... Numbers>
int common_bytes(Numbers... numbers) {
  const std::uint64_t all = (static_cast<std::uint64_t>(numbers) | ...) | 16;
  return static_cast<int>(all & (~all + 1));
}

template <class Word>
__device__ void copy_tile(const RowCopy& copy, std::uint32_t block) {
  const std::uint32_t pair = block / copy.tiles, tile = block % copy.tiles;
  const std::int64_t head = pair % copy.heads, batch = pair / copy.heads;
  const std::uint32_t step = kThreads / copy.words;  // rows of all threads
  const std::uint32_t own = threadIdx.x / copy.words, word = threadIdx.x % copy.words;
  if (own >= step) return;
  const std::byte* const from = copy.from + batch * copy.from_batch + head * copy.from_head;
  std::byte* const to = copy.to + batch * copy.to_batch + head * copy.to_head;
  const std::int64_t first = std::int64_t{tile} * step * kTurns + own;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn += kUnderWay) {
    Word words[kUnderWay];
#pragma unroll
    for (int i = 0; i < kUnderWay; ++i) {
      const std::int64_t row = first + (turn + i) * step;
      words[i] = {};
      if (row < copy.rows_there && word < copy.words_there) {
        words[i] = reinterpret_cast<const Word*>(from + row * copy.from_row)[word];
      }
    }
#pragma unroll
    for (int i = 0; i < kUnderWay; ++i) {
      const std::int64_t row = first + (turn + i) * step;
      if (row < copy.rows) reinterpret_cast<Word*>(to + row * copy.to_row)[word] = words[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ RowCopies copies) {
  const RowCopy& copy = copies.of_block(blockIdx.x);
  const auto block = static_cast<std::uint32_t>(blockIdx.x - copy.first_block);
  switch (copy.word_bytes) {
    case 2:
      return copy_tile<std::uint16_t>(copy, block);
    case 4:
      return copy_tile<std::uint32_t>(copy, block);
    case 8:
      return copy_tile<uint2>(copy, block);
    default:
      return copy_tile<uint4>(copy, block);
  }
}

}  // namespace

void RowCopies::add(const View& to, const ConstView& from) {
  const auto bytes = static_cast<std::int64_t>(size_of(to.dtype));
  const bool read = from.data != nullptr;
  RowCopy copy;
  copy.to = static_cast<std::byte*>(to.data);
  copy.from = static_cast<const std::byte*>(from.data);
  copy.to_batch = to.stride[0] * bytes;
  copy.to_head = to.stride[1] * bytes;
  copy.to_row = to.stride[2] * bytes;
  copy.from_batch = from.stride[0] * bytes;
  copy.from_head = from.stride[1] * bytes;
  copy.from_row = from.stride[2] * bytes;
  copy.rows = to.shape[2];
  copy.rows_there = read ? std::min(to.shape[2], from.shape[2]) : 0;
  copy.heads = static_cast<std::uint32_t>(to.shape[1]);
  const std::int64_t row = to.shape[3] * bytes;
  const std::int64_t row_there = read ? std::min(to.shape[3], from.shape[3]) * bytes : 0;
  copy.word_bytes =
      common_bytes(reinterpret_cast<std::uintptr_t>(to.data), copy.to_batch, copy.to_head,
                   copy.to_row, reinterpret_cast<std::uintptr_t>(from.data), copy.from_batch,
                   copy.from_head, copy.from_row, row, row_there);
  copy.words = static_cast<std::uint32_t>(row / copy.word_bytes);
  copy.words_there = static_cast<std::uint32_t>(row_there / copy.word_bytes);
  const std::int64_t pairs = to.shape[0] * to.shape[1];
  if (copy.words == 0 || copy.rows == 0 || pairs == 0) return;
  if (count_ == kMost || copy.words > kThreads) {
    throw Error(ErrorCode::internal, "copy_rows: more tensors or longer rows than it is for");
  }
  copy.tiles = static_cast<std::uint32_t>(blocks_for(copy.rows, kThreads / copy.words * kTurns));
  copy.first_block = blocks_;
  blocks_ += pairs * copy.tiles;
  all_[count_++] = copy;
}

void RowCopies::launch(const char* name, cudaStream_t stream) const {
  if (count_ == 0) return;
  lln::cuda::launch(name, copy_rows, LaunchShape{blocks_, kThreads, 0, stream}, *this);
}

}  // namespace lln::cuda
