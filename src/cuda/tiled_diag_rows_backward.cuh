// The backward pass over rows of Diag and LLN+Diag: dq of both parts, the statistics of rows that
// the pass over keys needs, and for each piece of a sequence dC = W^T g and t = W^T delta of LLN.
// q and g pass through shared memory with the keys that they see.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_add.cuh"
#include "cuda/tiled_diag_lln.cuh"

namespace lln::cuda {

template <int kDim, bool kLln>
struct DiagRowsBackwardShape {
  using Split = DiagSplit<kDim>;
  static constexpr int kPair = 2 * Split::kTileBytes;
  static constexpr int kRowsAt = Split::kStages * kPair;             // q and g, after k and v
  static constexpr int kWordsAt = kRowsAt + Split::kStages * kPair;  // WarpWords of dS
  static constexpr int kSharesAt = kWordsAt + Split::kWordBytes;
  static constexpr int kChannelsAt =
      kSharesAt +
      (Split::kWarps == 1 ? 0 : Split::kWarps * kDiagTile * static_cast<int>(sizeof(SharedRow)));
  static constexpr int kStateAt = kChannelsAt + 2 * kDim * 4;  // after those of both parts
  static constexpr int kExponentsAt = kStateAt + kDim * kDim * 2;
  static constexpr int kDeltasAt = kExponentsAt + static_cast<int>(sizeof(RowExponents<kDim>));
  static constexpr int kShared = kLln ? kDeltasAt + 2 * kDiagTile * 2 : kStateAt;
};

// The Diag part of 16 rows. Where their keys are several tiles, a first sweep over them finds the
// statistics and a second one the gradients; they never are where not kSeveral.
template <class T, int kDim, bool kSeveral>
struct DiagRowGradients {
  using Split = DiagSplit<kDim>;
  static constexpr int kCount = Split::kScored / 8, kSteps = Split::kScored / 16;

  float top[2];           // of scores, before they are scaled
  float mass[2], dot[2];  // sums of P and P dP of this lane, with reference `top`
  float reference[2];     // log2 of the row's mass
  float delta[2];         // sum of P dP
  float dq[Split::kHeld / 8][4];

  __device__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = kNoExponent;
      mass[half] = dot[half] = 0;
      reference[half] = INFINITY;
      delta[half] = 0;
    }
#pragma unroll
    for (int n = 0; n < Split::kHeld / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[n][i] = 0;
    }
  }

  // Scores become weights with reference `top`.
  __device__ void soften(float (&scores)[kCount][4], const float (&dp)[kCount][4], float scale) {
    float next[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) next[i >> 1] = fmaxf(next[i >> 1], scores[n][i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next[half] = quad_max(next[half]);
      const float keep = exp2_fast((top[half] - next[half]) * scale);
      top[half] = next[half];
      mass[half] *= keep;
      dot[half] *= keep;
    }
    const float shift[2] = {-top[0] * scale, -top[1] * scale};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2_fast(fmaf(scores[n][i], scale, shift[i >> 1]));
        mass[i >> 1] += scores[n][i];
        dot[i >> 1] = fmaf(scores[n][i], dp[n][i], dot[i >> 1]);
      }
    }
  }

  // After the first sweep; shares[part, row].
  __device__ void finish_statistics(const Split& split, SharedRow* shares, float scale) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] = quad_sum(mass[half]);
      dot[half] = quad_sum(dot[half]);
    }
    float highest[2] = {top[0], top[1]}, all[2] = {mass[0], mass[1]}, dots[2] = {dot[0], dot[1]};
    if constexpr (Split::kWarps > 1) {
      const int row = split.first_row() + (lane >> 2);
      if ((lane & 3) == 0) {
        shares[split.part * kDiagTile + row] = {top[0], mass[0], dot[0]};
        shares[split.part * kDiagTile + row + 8] = {top[1], mass[1], dot[1]};
      }
      split.join();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const SharedRow* const first = shares + row + 8 * half;
        highest[half] = first->top;
#pragma unroll
        for (int i = 1; i < Split::kWarps; ++i) {
          highest[half] = fmaxf(highest[half], first[i * kDiagTile].top);
        }
        const float keep_first = exp2_fast((first->top - highest[half]) * scale);
        all[half] = first->mass * keep_first;
        dots[half] = first->dot * keep_first;
#pragma unroll
        for (int i = 1; i < Split::kWarps; ++i) {
          const SharedRow share = first[i * kDiagTile];
          const float keep = exp2_fast((share.top - highest[half]) * scale);
          all[half] += share.mass * keep;
          dots[half] += share.dot * keep;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (all[half] == 0) continue;
      reference[half] = fmaf(highest[half], scale, log2f(all[half]));
      delta[half] = dots[half] / all[half];
    }
  }

  // Takes the rows against the tiles of a step.
  __device__ void add(const Split& split, const DiagStep<kSeveral>& step, const unsigned char* rows,
                      const unsigned char* keys, float scale, const std::uint64_t (&seen)[2],
                      SharedRow* shares, const WarpWords<Split>& words) {
    constexpr int kTile = Split::kTileBytes;
    const int skipped = split.scored() * kDim * 2;
    float scores[kCount][4] = {}, dp[kCount][4] = {};
    multiply_tiles<T, kDim, kCount>(scores, rows, split.first_row(), keys + skipped);
    multiply_tiles<T, kDim, kCount>(dp, rows + kTile, split.first_row(), keys + kTile + skipped);
    mask_pairs(scores, dp, seen);
    float factor[2] = {1, 1};
    if (!kSeveral || step.sweep == 0) {
      soften(scores, dp, scale);
      if (step.last_keys()) finish_statistics(split, shares, scale);
      if (step.several()) return;
      factor[0] = exp2_fast(fmaf(top[0], scale, -reference[0]));
      factor[1] = exp2_fast(fmaf(top[1], scale, -reference[1]));
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[n][i] = exp2_fast(fmaf(scores[n][i], scale, -reference[i >> 1]));
        }
      }
    }
    std::uint32_t ds[kSteps][4];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = scores[n][2 * half] * factor[half];
        const float high = scores[n][2 * half + 1] * factor[half];
        ds[n / 2][2 * (n % 2) + half] = pack<T>(low * (dp[n][2 * half] - delta[half]),
                                                high * (dp[n][2 * half + 1] - delta[half]));
      }
    }
    if constexpr (Split::kWarps == 1) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        multiply_step<T, kDim, Split::kHeld>(dq, ds[i], keys, i, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) words.put(split, split.part * kSteps + i, ds[i]);
      split.join();
#pragma unroll
      for (int i = 0; i < kDiagTile / 16; ++i) {
        std::uint32_t a[4];
        words.get(split, i, a);
        multiply_step<T, kDim, Split::kHeld>(dq, a, keys, i, split.first_column());
      }
    }
  }

  // Leaves the statistics of rows `row` + g and + 8 for the pass over keys.
  __device__ void write(float* to_mass, float* to_delta, int row, int end) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + (lane >> 2) + 8 * half;
      if ((lane & 3) != 0 || own >= end) continue;
      to_mass[own] = reference[half];
      to_delta[own] = delta[half];
    }
  }
};

template <class T, int kDim, bool kLln, bool kSeveral>
__global__ void __launch_bounds__(DiagSplit<kDim>::kThreads, kDim <= 64 ? 3 : 1)
    rows_diag_backward(const __grid_constant__ TiledCall tiled) {
  using Split = DiagSplit<kDim>;
  using Shape = DiagRowsBackwardShape<kDim, kLln>;
  constexpr int kHeld = Split::kHeld, kThreads = Split::kThreads, kStages = Split::kStages;
  LLN_DYNAMIC_SHARED(shared);
  const WarpWords<Split> words{reinterpret_cast<uint4*>(shared + Shape::kWordsAt)};
  auto* const shares = reinterpret_cast<SharedRow*>(shared + Shape::kSharesAt);
  float* const channels = reinterpret_cast<float*>(shared + Shape::kChannelsAt);
  float* const lln_channels = channels + kDim;
  unsigned char* const state_tile = shared + Shape::kStateAt;
  auto& exponents = *reinterpret_cast<RowExponents<kDim>*>(shared + Shape::kExponentsAt);
  auto* const deltas = reinterpret_cast<std::uint16_t*>(shared + Shape::kDeltasAt);
  const DeviceCall& call = tiled.call;
  const DiagPiece piece = find_diag_rows<kLln>(tiled);
  if (piece.rows.s < 0) return;
  const std::int64_t head = piece.rows.head;
  const DeviceSequence& seq = piece.rows.sequence;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const auto keys = keys_of<T, kDim, kThreads>(call, piece.rows);
  const TilePair<T, kDim, kThreads> rows{piece.rows.template rows<const T>(call.q),
                                         piece.rows.template rows<const T>(call.g),
                                         call.q.token,
                                         call.g.token,
                                         dim,
                                         dim_v};
  const auto start = [&](const DiagStep<kSeveral>& step, int stage) {
    if (step.tile < piece.tiles) {
      if (step.opens()) {
        rows.start(shared + Shape::kRowsAt + (step.tile & (kStages - 1)) * Shape::kPair,
                   piece.tile_begin(step.tile), piece.tile_end(step.tile), false,
                   [](int) { return true; });
      }
      start_keys(keys, call.sequences, piece, step, shared + stage * Shape::kPair);
    }
    copy_commit();
  };
  DiagStep<kSeveral> ahead;
  ahead.open(piece);
  if constexpr (kStages > 1) start(ahead, 0);

  for (int c = static_cast<int>(threadIdx.x); c < kDim; c += kThreads) {
    channels[c] = c < dim_v ? channel_factor(call.diag_weight, head, c) : 0;
    lln_channels[c] = c < dim_v ? channel_factor(call.lln_weight, head, c) : 0;
  }
  const Split split;
  wait_for_previous();
  let_next_start();
  float taken_out = 0;
  if constexpr (kLln) {
    taken_out = fill_exponents<T, kDim>(
        exponents, tiled.state.c_at(piece.rows.s, piece.rows.head_k), dim, call.channels);
    fill_direct_tile<T, kDim, kThreads>(
        state_tile, tiled.state.values_at(piece.rows.s, piece.rows.head_k), tiled.state.row, dim,
        dim_v, [&](int, int c) { return lln_channels[c]; });
  }
  const float alpha = kLln ? scale_at(call.alpha, piece.rows.s, head) : 0;
  const LlnRowGradients<T, kDim> lln{state_tile, exponents, shares, deltas, alpha, taken_out};
  const RowFactor lln_factor = row_factor(call.lln_weight, seq, head);
  const RowFactor diag_factor = row_factor(call.diag_weight, seq, head);
  const float inverse_root = rsqrtf(static_cast<float>(call.channels));
  const std::int64_t first_row =
      head * tiled.diag_rows + seq.batch * call.sequences.tokens + seq.q_begin + piece.rows.begin;
  T* const dq = piece.rows.template rows<T>(call.dq) + split.first_column();
  float dc[kLln ? kDim / 8 : 1][4] = {};
  float t[4] = {};
  DiagRowGradients<T, kDim, kSeveral> diag;
  for (int stage = 0; ahead.tile < piece.tiles; stage ^= kStages - 1) {
    const DiagStep<kSeveral> step = ahead;
    ahead.next(piece, step.several() ? 2 : 1);
    if constexpr (kStages == 1) {
      __syncthreads();  // what was there has been read
      start(step, stage);
    }
    copy_wait<0>();
    __syncthreads();
    if constexpr (kStages > 1) start(ahead, stage ^ 1);
    unsigned char* const key_tiles = shared + stage * Shape::kPair;
    unsigned char* const row_tiles =
        shared + Shape::kRowsAt + (step.tile & (kStages - 1)) * Shape::kPair;
    const int row = piece.tile_begin(step.tile) + split.first_row();
    const int end = piece.tile_end(step.tile), lane_row = row + ((threadIdx.x & 31) >> 2);
    const int own[2] = {min(lane_row, end - 1), min(lane_row + 8, end - 1)};
    if (step.opens()) diag.reset();
    if (step.has_keys()) {
      if (call.diag_weight.channel != 0) {
        scale_columns<T, kDim, kThreads>(key_tiles + Split::kTileBytes, channels);
        __syncthreads();
      }
      const std::uint64_t valid = step_keys(call.sequences, piece, step);
      std::uint64_t seen[2] = {seen_keys(piece, step, own[0], valid),
                               seen_keys(piece, step, own[1], valid)};
      if constexpr (Split::kWarps > 1) {
        const std::uint64_t rest = low_bits(Split::kScored);
        seen[0] = seen[0] >> split.scored() | ~rest;
        seen[1] = seen[1] >> split.scored() | ~rest;
      }
      diag.add(split, step, row_tiles, key_tiles, kLog2E * inverse_root, seen, shares, words);
    }
    if (!step.last_keys() || (step.several() && step.sweep == 0)) continue;
    if (split.part == 0) {
      diag.write(tiled.diag_mass + first_row, tiled.diag_delta + first_row, row, end);
    }
    const float times[2] = {inverse_root * diag_factor(piece.rows.begin + own[0]),
                            inverse_root * diag_factor(piece.rows.begin + own[1])};
#pragma unroll
    for (int n = 0; n < kHeld / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) diag.dq[n][i] *= times[i >> 1];
    }
    to_direct<kHeld>(diag.dq);
    if constexpr (kLln) {
      const float factor[2] = {lln_factor(piece.rows.begin + own[0]),
                               lln_factor(piece.rows.begin + own[1])};
      float dw[kHeld / 8][4] = {};
      lln.add(split, row_tiles, factor, dw);
#pragma unroll
      for (int n = 0; n < kHeld / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) diag.dq[n][i] += dw[n][i];
      }
    }
    const int columns = dim - split.first_column();
    if constexpr (kAddsToLln<T, kDim, kLln>) {
      if (tiled.adds) add_stored_rows<T, kHeld>(diag.dq, dq, call.dq.token, row, end, columns);
    }
    store_rows<kHeld>(dq, call.dq.token, row, end, columns, diag.dq);
    if constexpr (kLln) {
      __syncthreads();
      add_row_sums<T, kDim>(dc, t, row_tiles, row_tiles + Split::kTileBytes, deltas);
    }
  }
  if constexpr (kLln) write_row_sums<T, kDim>(tiled, head, exponents.w, dc, t);
}

}  // namespace lln::cuda
