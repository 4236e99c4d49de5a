// Rows that one warp takes 16 at a time, on their way from device memory before they are needed: in
// registers where rows are narrow, in shared memory where they are wide.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiles.cuh"

namespace lln::cuda {

// Rows of a tensor that a warp takes 16 at a time, the next ones already on their way to registers.
// Rows past the last one are the last one again, channels past `dim` are channels from 0 on: what
// they are multiplied with is 0.
template <int kWidth, class T>
class RowsAhead {
 public:
  static constexpr int kBytes = 0;  // of shared memory

  __device__ RowsAhead(unsigned char*, const T* rows, std::int64_t stride, int first, int step,
                       int count, int dim)
      : half_(8 * stride), advance_(step * stride), first_(first), step_(step), count_(count) {
    const int lane = threadIdx.x & 31, t = lane & 3;
    at_ = rows + (first + lane / 4) * stride;
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      offset_[group] = 32 * group + 8 * t < dim ? 32 * group + 8 * t : 0;
    }
    if (first < count) load();
  }

  __device__ void take(RowWords<kWidth>& x) {
    copy_rows<kWidth>(x, next_);
    at_ += advance_;
    first_ += step_;
    if (first_ < count_) load();
  }

 private:
  __device__ void load() {
    const T* from[2] = {at_, at_ + half_};
    if (first_ + 16 > count_) {
      const int past = first_ + static_cast<int>(threadIdx.x & 31) / 4 - (count_ - 1);
      from[0] -= max(past, 0) * (half_ / 8);
      from[1] -= max(past + 8, 0) * (half_ / 8);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < kWidth / 32; ++group) {
        const uint4 words = *reinterpret_cast<const uint4*>(from[half] + offset_[group]);
        next_[group][half][0] = words.x;
        next_[group][half][1] = words.y;
        next_[group][half][2] = words.z;
        next_[group][half][3] = words.w;
      }
    }
  }

  const T* at_;
  std::int64_t half_, advance_;
  int first_, step_, count_;
  int offset_[kWidth / 32];
  RowWords<kWidth> next_;
};

// Rows of a tensor that a warp takes 16 at a time, on their way through a ring of tiles in shared
// memory that belongs to the warp alone: enough bytes are under way at any time, whatever the warp
// is computing, and no register holds them.
template <int kWidth, int kStages, class T>
class RowRing {
 public:
  static constexpr int kTileBytes = 16 * kWidth * 2;
  static constexpr int kBytes = kStages * kTileBytes;

  __device__ RowRing(unsigned char* ring, const T* rows, std::int64_t stride, int first, int step,
                     int count, int dim)
      : ring_(ring), stride_(stride), first_(first), step_(step), count_(count) {
    const int lane = threadIdx.x & 31, piece = lane % kPieces;
    there_ = 8 * piece < dim;
    rows_ = rows + (there_ ? 8 * piece : 0);
    row_ = lane / kPieces;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      to_[i] = shared_address(ring) + tile_offset<kWidth>(row_ + i * kStep, piece);
    }
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) start_next();
  }

  __device__ void take(RowWords<kWidth>& x) {
    copy_wait<kStages - 2>();
    __syncwarp();
    start_next();
    read_rows<kWidth>(x, ring_ + taken_ * kTileBytes, 0);
    taken_ = taken_ + 1 == kStages ? 0 : taken_ + 1;
  }

 private:
  __device__ void start_next() {
    if (first_ < count_) start(started_, first_);
    first_ += step_;
    started_ = started_ + 1 == kStages ? 0 : started_ + 1;
    copy_commit();
  }

  // Rows from `first` on into a slot; those past the last one are the last one again, channels past
  // `dim` are zeros.
  __device__ void start(int slot, int first) const {
    const bool whole = first + 16 <= count_;
    const T* from = rows_ + (first + row_) * stride_;
#pragma unroll
    for (int i = 0; i < 16 / kStep; ++i) {
      if (!whole) from = rows_ + min(first + row_ + i * kStep, count_ - 1) * stride_;
      const int above = i / kTurns * kTurns * kStep * kWidth * 2;
      copy_async(to_[i % kTurns] + slot * kTileBytes + above, from, there_);
      from += kStep * stride_;
    }
  }

  static constexpr int kPieces = kWidth / 8, kStep = 32 / kPieces;  // rows of one instruction
  static constexpr int kTurns = kStep < 8 ? 8 / kStep : 1;          // until the permutation repeats
  static_assert(kPieces <= 32);

  unsigned char* ring_;
  const T* rows_;
  std::int64_t stride_;
  int first_, step_, count_, row_;
  int started_ = 0, taken_ = 0;  // slots
  bool there_;
  std::uint32_t to_[kTurns];
};

// Narrow rows fit into registers on their way, and reading them again from shared memory would cost
// more than it hides; wide ones do not.
template <int kWidth, int kStages, class T>
using RowSource =
    std::conditional_t<kWidth <= 64, RowsAhead<kWidth, T>, RowRing<kWidth, kStages, T>>;

}  // namespace lln::cuda
