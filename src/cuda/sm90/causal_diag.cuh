// The block-diagonal part of causal attention for a warpgroup's 64 rows and the 64 keys of their
// chunk, which holds whole blocks: which pairs meet, weights and gradients of pairs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/causal_tiles.cuh"
#include "cuda/tiled_causal_diag.cuh"

namespace lln::cuda::sm90 {

// Which of the pairs of a lane meet in a block.
class Meetings {
 public:
  // Rows of the chunk and the keys that they see.
  __device__ static Meetings of_rows(int log2, std::uint64_t valid) {
    Meetings all;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row(half), first = row >> log2 << log2;
      all.set(half, valid & ((std::uint64_t{2} << row) - 1) & ~std::uint64_t{0} << first);
    }
    return all;
  }
  // Keys of the chunk and the rows that see them.
  __device__ static Meetings of_keys(int log2, std::uint64_t valid) {
    Meetings all;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = own_row(half), last = key | ((1 << log2) - 1);
      const std::uint64_t rows = ((std::uint64_t{2} << last) - 1) & ~std::uint64_t{0} << key;
      all.set(half, ((valid >> key) & 1) != 0 ? rows : 0);
    }
    return all;
  }
  // Of result [n][i].
  __device__ bool operator()(int n, int i) const {
    return (bits_[i >> 1][n >> 2] >> (8 * (n & 3) + (i & 1)) & 1) != 0;
  }

 private:
  __device__ static int own_row(int half) {
    return 16 * (warp_index() & 3) + static_cast<int>(threadIdx.x & 31) / 4 + 8 * half;
  }
  __device__ void set(int half, std::uint64_t bits) {
    bits >>= 2 * (threadIdx.x & 3);
    bits_[half][0] = static_cast<std::uint32_t>(bits);
    bits_[half][1] = static_cast<std::uint32_t>(bits >> 32);
  }

  std::uint32_t bits_[2][2];
};

// Products of rows and keys become 2^(scale x - top of the row), 0 where they do not meet. Returns
// the tops. Without branches, which would make the compiler wait for products under way.
__device__ inline float2 diag_weights(PairSums& x, const Meetings& meets, float scale) {
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[n][i] = meets(n, i) ? x[n][i] * scale : -INFINITY;
      top[i >> 1] = fmaxf(top[i >> 1], x[n][i]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = quad_max(top[half]);
    if (top[half] == -INFINITY) top[half] = 0;
  }
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = exp2_fast(x[n][i] - top[i >> 1]);
  }
  return {top[0], top[1]};
}

__device__ inline void pack_pairs(PairWords& words, const PairSums& x) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = x[2 * part + (i >> 1)] + 2 * (i & 1);
      words[part][i] = pack<Bf16>(pair[0], pair[1]);
    }
  }
}

// What a row of the block-diagonal part leaves for the keys' walk.
struct DiagRow {
  float mass;  // log2
  float delta;
};

// Scores of pairs and g v^T to w2 P (g v^T - delta) / sqrt(dim), in words.
__device__ inline void diag_row_gradients(PairWords& words, DiagRow (&rows)[2], PairSums& scores,
                                          const PairSums& dots, const Meetings& meets, float scale,
                                          const float (&weight)[2]) {
  const float2 tops = diag_weights(scores, meets, scale);
  float mass[2] = {}, delta[2] = {}, factor[2];
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mass[i >> 1] += scores[n][i];
      delta[i >> 1] = fmaf(scores[n][i], dots[n][i], delta[i >> 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mass[half] = quad_sum(mass[half]);
    const float inverse = mass[half] == 0 ? 0 : 1 / mass[half];
    delta[half] = quad_sum(delta[half]) * inverse;
    factor[half] = inverse * weight[half] * scale * kLn2;
    const float top = half == 0 ? tops.x : tops.y;
    rows[half] = {mass[half] == 0 ? INFINITY : top + log2f(mass[half]), delta[half]};
  }
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] *= (dots[n][i] - delta[i >> 1]) * factor[i >> 1];
    }
  }
  pack_pairs(words, scores);
}

// Scores of keys and rows and v g^T to w2 P (in p) and w2 P (v g^T - delta) / sqrt(dim), in words.
__device__ inline void diag_key_gradients(PairWords& p, PairWords& ds, PairSums& scores,
                                          const PairSums& dots, const Meetings& meets, float scale,
                                          const DiagStatistics& statistics) {
  const int t = threadIdx.x & 3, own = warp_index() & 3;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part < own) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[part][i] = ds[part][i] = 0;
      continue;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int n = 2 * part + j;
      const auto at = [&](const float* of) {
        return *reinterpret_cast<const float2*>(of + 8 * n + 2 * t);
      };
      const float2 mass = at(statistics.mass), delta = at(statistics.delta);
      const float2 weight = at(statistics.weight);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = exp2_fast(fmaf(scores[n][2 * half], scale, -mass.x)) * weight.x;
        float y = exp2_fast(fmaf(scores[n][2 * half + 1], scale, -mass.y)) * weight.y;
        if (!meets(n, 2 * half)) x = 0;
        if (!meets(n, 2 * half + 1)) y = 0;
        const int word = half + 2 * j;
        p[part][word] = pack<Bf16>(x, y);
        ds[part][word] = pack<Bf16>(x * (dots[n][2 * half] - delta.x) * (scale * kLn2),
                                    y * (dots[n][2 * half + 1] - delta.y) * (scale * kLn2));
      }
    }
  }
}

}  // namespace lln::cuda::sm90
