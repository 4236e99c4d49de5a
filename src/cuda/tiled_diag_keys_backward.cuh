// The backward pass over keys of Diag and LLN+Diag: dk and dv of both parts. A warp takes 16 keys
// against tiles of the rows that see them, whose weights it finds from the rows' statistics, and
// then against dC of LLN, one tile in shared memory that serves both products.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_add.cuh"
#include "cuda/tiled_diag_lln.cuh"
#include "cuda/tiled_diag_rows.cuh"

namespace lln::cuda {

// Of a tile of rows, in shared memory: one number each.
struct RowStatistics {
  float mass[kDiagTile];  // log2
  float delta[kDiagTile];
  float weight[kDiagTile];  // of Diag, as the caller gave it; only where it differs between rows
};

template <int kDim, bool kLln>
struct DiagKeysBackwardShape {
  using Split = DiagSplit<kDim>;
  static constexpr int kPair = 2 * Split::kTileBytes;
  static constexpr int kRowsAt = Split::kStages * kPair;  // q and g, after k and v
  static constexpr int kStatisticsAt = kRowsAt + Split::kStages * kPair;
  static constexpr int kWordsAt =
      kStatisticsAt + Split::kStages * static_cast<int>(sizeof(RowStatistics));
  static constexpr int kChannelsAt = kWordsAt + 2 * Split::kWordBytes;  // of P and of dS
  static constexpr int kSumsAt = kChannelsAt + kDim * 4;                // dC
  static constexpr int kVectorsAt = kSumsAt + kDim * kDim * 2;
  static constexpr int kShared = kLln ? kVectorsAt + 3 * kDim * 4 : kSumsAt;
};

// One block per key job and key head. rows.s is -1 where there is no such job.
template <bool kLln>
__device__ inline DiagPiece find_diag_keys(const TiledCall& tiled) {
  const KeyRows keys = key_rows(tiled);
  const RowPiece piece{keys.s, keys.head, keys.head, keys.sequence, keys.begin, keys.count};
  return cut_piece(tiled.call, piece, keys.sequence.k_tokens, keys.sequence.q_tokens,
                   !kLln && tiled.causal ? DiagSight::from : DiagSight::all);
}

// dk and dv of 16 keys in Diag: this warp's columns, in natural order.
template <class T, int kDim>
struct DiagKeyGradients {
  using Split = DiagSplit<kDim>;
  static constexpr int kHeld = Split::kHeld;
  // Rows of q whose scores a warp holds at a time.
  static constexpr int kTurnedRows = Split::kScored < 32 ? Split::kScored : 32;
  static constexpr int kCount = kTurnedRows / 8, kSteps = kTurnedRows / 16;

  float dk[kHeld / 8][4];  // before it is scaled
  float dv[kHeld / 8][4];

  __device__ void reset() {
#pragma unroll
    for (int n = 0; n < kHeld / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0;
    }
  }

  // P w2 and dS of these keys and kTurnedRows rows of a tile. `seen`: bit j for row first + j.
  __device__ static void turn(std::uint32_t (&p)[kSteps][4], std::uint32_t (&ds)[kSteps][4],
                              const Split& split, const unsigned char* keys,
                              const unsigned char* rows, int first, const RowStatistics& statistics,
                              const RowFactor& weight, float scale,
                              const std::uint64_t (&seen)[2]) {
    const int t = threadIdx.x & 3;
    float scores[kCount][4] = {}, dp[kCount][4] = {};
    const int skipped = first * kDim * 2;
    multiply_tiles<T, kDim, kCount>(scores, keys, split.first_row(), rows + skipped);
    multiply_tiles<T, kDim, kCount>(dp, keys + Split::kTileBytes, split.first_row(),
                                    rows + Split::kTileBytes + skipped);
    mask_pairs(scores, dp, seen);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int row = first + 8 * n + 2 * t;
      const float2 mass = *reinterpret_cast<const float2*>(statistics.mass + row);
      const float2 delta = *reinterpret_cast<const float2*>(statistics.delta + row);
      float2 factor = {weight.constant, weight.constant};
      if (weight.at != nullptr) {
        factor = *reinterpret_cast<const float2*>(statistics.weight + row);
      }
      if (weight.complement) factor = {1 - factor.x, 1 - factor.y};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = exp2_fast(fmaf(scores[n][2 * half], scale, -mass.x)) * factor.x;
        const float high = exp2_fast(fmaf(scores[n][2 * half + 1], scale, -mass.y)) * factor.y;
        p[n / 2][2 * (n % 2) + half] = pack<T>(low, high);
        ds[n / 2][2 * (n % 2) + half] =
            pack<T>(low * (dp[n][2 * half] - delta.x), high * (dp[n][2 * half + 1] - delta.y));
      }
    }
  }

  // Takes the keys against a tile of rows; words[0] and [1] are for P and dS.
  __device__ void add(const Split& split, const unsigned char* keys, const unsigned char* rows,
                      const RowStatistics& statistics, const RowFactor& weight, float scale,
                      const std::uint64_t (&seen)[2], const WarpWords<Split> (&words)[2]) {
    const std::uint64_t rest = ~low_bits(kTurnedRows);
    std::uint32_t p[kSteps][4], ds[kSteps][4];
    if constexpr (Split::kWarps == 1) {
#pragma unroll
      for (int part = 0; part < kDiagTile / kTurnedRows; ++part) {
        const int first = part * kTurnedRows;
        const std::uint64_t bits[2] = {seen[0] >> first | rest, seen[1] >> first | rest};
        turn(p, ds, split, keys, rows, first, statistics, weight, scale, bits);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = part * kSteps + i;
          multiply_step<T, kDim, kHeld>(dk, ds[i], rows, step, 0);
          multiply_step<T, kDim, kHeld>(dv, p[i], rows + Split::kTileBytes, step, 0);
        }
      }
    } else {
      const int first = split.part * kTurnedRows;
      const std::uint64_t bits[2] = {seen[0] >> first | rest, seen[1] >> first | rest};
      turn(p, ds, split, keys, rows, first, statistics, weight, scale, bits);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        words[0].put(split, split.part * kSteps + i, p[i]);
        words[1].put(split, split.part * kSteps + i, ds[i]);
      }
      split.join();
#pragma unroll
      for (int step = 0; step < kDiagTile / 16; ++step) {
        std::uint32_t a[4];
        words[0].get(split, step, a);
        multiply_step<T, kDim, kHeld>(dv, a, rows + Split::kTileBytes, step, split.first_column());
        words[1].get(split, step, a);
        multiply_step<T, kDim, kHeld>(dk, a, rows, step, split.first_column());
      }
    }
  }
};

// q and g of a query head as the keys of a piece count tokens, and the statistics of its rows.
template <class T, int kDim>
struct HeadRows {
  using Split = DiagSplit<kDim>;

  TilePair<T, kDim, Split::kThreads> tensors;
  const float *mass, *delta;
  RowFactor weight;
  std::int64_t begin;

  __device__ HeadRows(const TiledCall& tiled, const DiagPiece& piece, std::int64_t head)
      : weight(row_factor(tiled.call.diag_weight, piece.rows.sequence, head)),
        begin(piece.rows.begin) {
    const DeviceCall& call = tiled.call;
    RowPiece rows = piece.rows;
    rows.head = head;
    tensors = {rows.template rows<const T>(call.q),
               rows.template rows<const T>(call.g),
               call.q.token,
               call.g.token,
               static_cast<int>(call.dim),
               static_cast<int>(call.dim_v)};
    const std::int64_t first = head * tiled.diag_rows +
                               rows.sequence.batch * call.sequences.tokens + rows.sequence.q_begin +
                               begin;
    mass = tiled.diag_mass + first;
    delta = tiled.diag_delta + first;
  }

  __device__ void start(const DiagStep<true>& step, unsigned char* tiles,
                        RowStatistics& statistics) const {
    if (!step.has_keys()) return;
    tensors.start(tiles, step.key, step.key_end, false, [](int) { return true; });
    const int i = static_cast<int>(threadIdx.x), row = step.key + i % kDiagTile;
    const bool there = row < step.key_end;
    if (i < kDiagTile) {
      copy_word_async(shared_address(statistics.mass + i), there ? mass + row : mass, there);
      if (weight.at != nullptr) {
        copy_word_async(shared_address(statistics.weight + i),
                        there ? weight.at + (begin + row) * weight.stride : mass, there);
      }
    } else if (i < 2 * kDiagTile) {
      copy_word_async(shared_address(statistics.delta + i - kDiagTile), there ? delta + row : delta,
                      there);
    }
  }
};

template <class T, int kDim, bool kLln>
__global__ void __launch_bounds__(DiagSplit<kDim>::kThreads, kDim <= 64 ? 3 : 1)
    keys_diag_backward(const __grid_constant__ TiledCall tiled) {
  using Split = DiagSplit<kDim>;
  using Shape = DiagKeysBackwardShape<kDim, kLln>;
  constexpr int kHeld = Split::kHeld, kThreads = Split::kThreads, kStages = Split::kStages;
  LLN_DYNAMIC_SHARED(shared);
  auto* const statistics = reinterpret_cast<RowStatistics*>(shared + Shape::kStatisticsAt);
  const WarpWords<Split> words[2] = {
      {reinterpret_cast<uint4*>(shared + Shape::kWordsAt)},
      {reinterpret_cast<uint4*>(shared + Shape::kWordsAt + Split::kWordBytes)}};
  float* const channels = reinterpret_cast<float*>(shared + Shape::kChannelsAt);
  const DeviceCall& call = tiled.call;
  const DiagPiece piece = find_diag_keys<kLln>(tiled);
  if (piece.rows.s < 0) return;
  const DeviceSequence& seq = piece.rows.sequence;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int group =
      static_cast<int>(static_cast<unsigned>(call.heads) / static_cast<unsigned>(call.heads_k));
  const std::int64_t first_head = piece.rows.head * group;
  const auto keys = keys_of<T, kDim, kThreads>(call, piece.rows);
  const auto start = [&](const DiagStep<true>& step, int stage) {
    if (step.tile < piece.tiles) {
      if (step.opens()) {
        const int first = piece.tile_begin(step.tile), end = piece.tile_end(step.tile);
        const std::int64_t begin = piece.rows.begin;
        const bool masked = call.sequences.mask != nullptr || begin + first < seq.key_first ||
                            begin + end > seq.key_end;
        keys.start(shared + (step.tile & (kStages - 1)) * Shape::kPair, first, end, masked,
                   [&](int key) { return key_valid(call.sequences, seq, begin + key); });
      }
      HeadRows<T, kDim>(tiled, piece, first_head + step.sweep)
          .start(step, shared + Shape::kRowsAt + stage * Shape::kPair, statistics[stage]);
    }
    copy_commit();
  };
  DiagStep<true> ahead;
  ahead.open(piece);
  if constexpr (kStages > 1) start(ahead, 0);
  const Split split;
  wait_for_previous();
  [[maybe_unused]] const auto lln = [&] {
    if constexpr (kLln) {
      return LlnKeyGradients<T, kDim>(tiled, piece.rows, shared + Shape::kSumsAt,
                                      reinterpret_cast<float*>(shared + Shape::kVectorsAt));
    } else {
      return 0;
    }
  }();
  const auto rows_of = [&](const Rows& tensor) {
    return static_cast<T*>(tensor.data) + seq.batch * tensor.batch + piece.rows.head * tensor.head +
           (seq.k_begin + piece.rows.begin) * tensor.token + split.first_column();
  };
  T* const dk = rows_of(call.dk);
  T* const dv = rows_of(call.dv);
  const float inverse_root = rsqrtf(static_cast<float>(call.channels));
  DiagKeyGradients<T, kDim> diag;
  for (int stage = 0; ahead.tile < piece.tiles; stage ^= kStages - 1) {
    const DiagStep<true> step = ahead;
    ahead.next(piece, group);
    if constexpr (kStages == 1) {
      __syncthreads();  // what was there has been read
      start(step, stage);
    }
    copy_wait<0>();
    __syncthreads();
    if constexpr (kStages > 1) start(ahead, stage ^ 1);
    const unsigned char* const key_tiles = shared + (step.tile & (kStages - 1)) * Shape::kPair;
    unsigned char* const row_tiles = shared + Shape::kRowsAt + stage * Shape::kPair;
    const int row = piece.tile_begin(step.tile) + split.first_row();
    const int end = piece.tile_end(step.tile), lane_row = row + ((threadIdx.x & 31) >> 2);
    if (step.opens()) diag.reset();
    if (step.has_keys()) {
      if (call.diag_weight.channel != 0) {
        const std::int64_t head = first_head + step.sweep;
        for (int c = static_cast<int>(threadIdx.x); c < kDim; c += kThreads) {
          channels[c] = c < dim_v ? channel_factor(call.diag_weight, head, c) : 0;
        }
        __syncthreads();
        scale_columns<T, kDim, kThreads>(row_tiles + Split::kTileBytes, channels);
        __syncthreads();
      }
      const std::uint64_t inside = low_bits(step.key_end - step.key);
      const std::uint64_t seen[2] = {seen_keys(piece, step, min(lane_row, end - 1), inside),
                                     seen_keys(piece, step, min(lane_row + 8, end - 1), inside)};
      diag.add(split, key_tiles, row_tiles, statistics[stage],
               row_factor(call.diag_weight, seq, first_head + step.sweep), kLog2E * inverse_root,
               seen, words);
    }
    if (!step.last_keys() || step.sweep + 1 < group) continue;
    const bool valid[2] = {key_valid(call.sequences, seq, piece.rows.begin + lane_row),
                           key_valid(call.sequences, seq, piece.rows.begin + lane_row + 8)};
    const bool all_valid = __all_sync(0xFFFFFFFFU, valid[0] && valid[1]);
    [[maybe_unused]] RowWords<kDim> kn;
    if constexpr (kLln) {
      read_rows<kDim>(kn, key_tiles, split.first_row());
      key_weights<T, kDim>(kn, lln.added, lln.beta * kLog2E, lln.folded);
      lln.add_values(split, kn, diag.dv);
    }
    if (!all_valid) zero_rows(diag.dv, valid);
#pragma unroll
    for (int pass = 0; pass < kHeld / 32; ++pass) {
      float out[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) out[i / 4][i % 4] = diag.dv[4 * pass + i / 4][i % 4];
      T* const to = dv + 32 * pass;
      const int columns = dim_v - split.first_column() - 32 * pass;
      if constexpr (kAddsToLln<T, kDim, kLln>) {
        if (tiled.adds) add_stored_natural<T>(out, to, call.dv.token, row, end, columns);
      }
      store_natural<T>(to, call.dv.token, row, end, columns, out);
    }
#pragma unroll
    for (int pass = 0; pass < kHeld / 32; ++pass) {
      float out[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        out[i / 4][i % 4] = diag.dk[4 * pass + i / 4][i % 4] * inverse_root;
      }
      to_direct<32>(out);
      if constexpr (kLln) {
        constexpr int kHalfGroups = (kDim - kHeld) / 32;
        std::uint32_t own[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t high = kn[kHalfGroups + pass][i / 4][i % 4];
          own[i / 4][i % 4] = split.part == 0 ? kn[pass][i / 4][i % 4] : high;
        }
        lln.add_keys(split, own, key_tiles + Split::kTileBytes, split.first_column() + 32 * pass,
                     out);
      }
      if (!all_valid) zero_rows(out, valid);
      T* const to = dk + 32 * pass;
      const int columns = dim - split.first_column() - 32 * pass;
      if constexpr (kAddsToLln<T, kDim, kLln>) {
        if (tiled.adds) add_stored_rows<T, 32>(out, to, call.dk.token, row, end, columns);
      }
      store_rows<32>(to, call.dk.token, row, end, columns, out);
    }
  }
}

}  // namespace lln::cuda
