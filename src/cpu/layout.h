// Scratch memory of each kernel: what a worker needs, and what the workers share. The constructors
// run once without memory to count bytes and once with it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cpu/parameter_sums.h"
#include "cpu/plan.h"

namespace lln::cpu {

// Tiles of one worker in the forward kernels.
struct ForwardTiles {
  ForwardTiles(Arena& arena, const Problem& p, const Dims& dims)
      : token(arena.take<std::int64_t>(padded(dims.chunk))),
        exponents(arena.floats(padded(dims.chunk) * dims.dp)),
        values(arena.floats(padded(dims.chunk) * dims.dvp)),
        rows(arena.floats(padded(dims.chunk) * dims.dvp)),
        diag(arena.floats(padded(dims.chunk) * dims.dvp)),
        spare(arena.floats(padded(dims.chunk) * dims.dvp)),
        row(arena.floats(dims.dvp)),
        shifted_c(arena.floats(dims.dp)),
        row_factor(arena.floats(padded(dims.chunk))),
        lln_channel(arena.floats(dims.dvp)),
        diag_channel(arena.floats(dims.dvp)) {
    if (p.dtype == DType::bf16 && p.has_lln()) state_pairs = arena.floats(dims.state() / 2);
    arena.fill(scores, p.kind != Kind::lln ? 1 : 0, dims, /*backward=*/false);
  }
  std::int64_t* token;
  float* exponents;                // [chunk, dp]
  float* values;                   // [chunk, dvp]
  float* rows;                     // [chunk, dvp] of o
  float* diag;                     // [chunk, dvp] rows of the block-diagonal part
  float* spare;                    // [chunk, dvp]
  float* row;                      // [dvp]
  float* shifted_c;                // [dp] c of the state, its maximum 0
  float* row_factor;               // [chunk] what makes weights probabilities
  float* lln_channel;              // [dvp] weights
  float* diag_channel;             // [dvp]
  float* state_pairs = nullptr;    // [dp / 2, dvp] C in words (pairs-inl.h)
  std::vector<ScoreTiles> scores;  // one or none
};

// The bidirectional forward.
struct ForwardLayout {
  ForwardLayout(Arena& arena, const Problem& p, const Dims& dims, int workers) {
    arena.fill(tiles, workers, p, dims);
    if (!p.has_lln()) return;
    arena.fill(sums, wave_slots(p.tokens_k, workers), dims);
    arena.fill(states, wave_heads(workers), dims);
  }
  std::vector<ForwardTiles> tiles;  // one per worker
  std::vector<KeySums> sums;        // one per key segment of a wave
  std::vector<State> states;        // one per head of a wave
};

// Diagonal blocks whose scores do not fit one tile.
inline bool spans_tiles(const Problem& p) { return p.has_diag() && p.diag_block > kMaxChunk; }

// Tiles of one worker in the backward kernels.
struct BackwardTiles {
  BackwardTiles(Arena& arena, const Problem& p, const Dims& dims)
      : token(arena.take<std::int64_t>(padded(dims.chunk))),
        exponents(arena.floats(padded(dims.chunk) * dims.dp)),
        slope(arena.floats(padded(dims.chunk) * dims.dp)),
        raw(arena.floats(padded(dims.chunk) * dims.dp)),
        dweights(arena.floats(padded(dims.chunk) * dims.dp)),
        lln_d(arena.floats(padded(dims.chunk) * dims.dp)),
        diag_d(arena.floats(padded(dims.chunk) * dims.dp)),
        values(arena.floats(padded(dims.chunk) * dims.dvp)),
        g(arena.floats(padded(dims.chunk) * dims.dvp)),
        lln_dv(arena.floats(padded(dims.chunk) * dims.dvp)),
        diag_dv(arena.floats(padded(dims.chunk) * dims.dvp)),
        row_dots(arena.floats(2 * kMaxChunk)),
        shifted_c(arena.floats(dims.dp)),
        row_factor(arena.floats(padded(dims.chunk))),
        row_weight(arena.floats(padded(dims.chunk))),
        lln_channel(arena.floats(dims.dvp)),
        diag_channel(arena.floats(dims.dvp)) {
    if (p.dtype == DType::bf16 && p.has_lln()) words = arena.floats(padded(dims.chunk) * dims.dvp);
    arena.fill(scores, p.kind != Kind::lln ? 1 : 0, dims, /*backward=*/true);
    if (spans_tiles(p)) {
      const std::int64_t rows = std::min(p.diag_block, p.tokens);
      block = arena.take<std::int64_t>(2);
      block_lse = arena.floats(dims.group * rows);
      block_delta = arena.floats(dims.group * rows);
    }
  }
  std::int64_t* token;
  float* exponents;                // [chunk, dp], then weights
  float* slope;                    // [chunk, dp] f' where the feature map is not exp
  float* raw;                      // [chunk, dp] q or k as they are
  float* dweights;                 // [chunk, dp]
  float* lln_d;                    // [chunk, dp] dq or dk of the LLN part
  float* diag_d;                   // [chunk, dp] of the block-diagonal part
  float* values;                   // [chunk, dvp]
  float* g;                        // [chunk, dvp]
  float* lln_dv;                   // [chunk, dvp]
  float* diag_dv;                  // [chunk, dvp]
  float* row_dots;                 // [2, chunk]: g . LLN and g . Diag
  float* shifted_c;                // [dp] c of the state, its maximum 0
  float* row_factor;               // [chunk] what makes weights probabilities
  float* row_weight;               // [chunk] weight of the LLN part
  float* lln_channel;              // [dvp] weights
  float* diag_channel;             // [dvp]
  float* words = nullptr;          // [chunk, dvp] g in words (pairs-inl.h)
  std::vector<ScoreTiles> scores;  // one or none
  // Softmax statistics of the rows of one diagonal block, where spans_tiles().
  std::int64_t* block = nullptr;  // [2]: which key head and block they are of
  float* block_lse = nullptr;     // [group, rows]
  float* block_delta = nullptr;   // [group, rows]
};

// Sums over queries that the keys need: dC = W^T g and t = W^T delta.
struct QuerySums {
  QuerySums() = default;
  QuerySums(Arena& arena, const Dims& dims)
      : t(arena.floats(dims.dp)), dvalues(arena.floats(dims.state())) {}
  float* t = nullptr;        // [dp]
  float* dvalues = nullptr;  // [dp, dvp]
};

// A state with what the backward pass adds to it.
struct GradientState {
  GradientState(Arena& arena, const Dims& dims)
      : state(arena, dims),
        transposed(arena.floats(dims.state())),
        sums(arena, dims),
        dtransposed(arena.floats(dims.state())) {}
  State state;
  float* transposed;  // [dvp, dp]
  QuerySums sums;
  float* dtransposed;  // [dvp, dp]
};

// The bidirectional backward.
struct BackwardLayout {
  BackwardLayout(Arena& arena, const Problem& p, const Dims& dims, int workers)
      : totals(arena, p, dims) {
    arena.fill(tiles, workers, p, dims);
    if (p.kind == Kind::softmax) {  // two numbers per row pass from the rows to the keys
      row_lse = arena.floats(p.batch * p.heads * p.tokens);
      row_delta = arena.floats(p.batch * p.heads * p.tokens);
    }
    if (!p.has_lln()) return;
    const std::int64_t key_slots = wave_slots(p.tokens_k, workers);
    const std::int64_t row_slots = wave_slots(p.tokens, workers);
    arena.fill(states, wave_heads(workers), dims);
    arena.fill(key_sums, key_slots, dims);
    beta_sums = arena.take<double>(key_slots);
    arena.fill(query_sums, row_slots, dims);
    arena.fill(row_sums, row_slots * dims.group, dims);
  }
  ParameterTotals totals;
  std::vector<BackwardTiles> tiles;   // one per worker
  std::vector<GradientState> states;  // one per head of a wave
  std::vector<KeySums> key_sums;      // one per key segment of a wave
  double* beta_sums = nullptr;        // the same
  std::vector<QuerySums> query_sums;  // one per row segment of a wave
  std::vector<RowSums> row_sums;      // one per row segment and query head of the group
  float* row_lse = nullptr;           // [batch, heads, tokens]
  float* row_delta = nullptr;
};

// Tiles of one worker for the exact masked block inside a causal chunk.
struct CausalTiles {
  CausalTiles(Arena& arena, const Dims& dims)
      : keys(arena.floats(padded(dims.chunk) * dims.dp)),
        spare(arena.floats(padded(dims.chunk) * dims.dp)),
        values(arena.floats(padded(dims.chunk) * dims.dvp)),
        reference(arena.floats(dims.dp)),
        row_reference(arena.floats(dims.dp)),
        key_sum(arena.floats(dims.dp)),
        relative(arena.floats(padded(dims.chunk) * dims.dp)),
        relative_transposed(arena.floats(dims.dp * padded(dims.chunk))),
        rows(arena.floats(padded(dims.chunk) * dims.dp)),
        prefix_weights(arena.floats(padded(dims.chunk) * dims.dp)),
        chunk_weights(arena.floats(padded(dims.chunk) * dims.dp)),
        products(arena.floats(padded(dims.chunk) * padded(dims.chunk))),
        prefix_factor(arena.floats(padded(dims.chunk))),
        chunk_factor(arena.floats(padded(dims.chunk))),
        prefix_high(arena.floats(padded(dims.chunk))),
        prefix_sum(arena.floats(padded(dims.chunk))),
        chunk_high(arena.floats(padded(dims.chunk))),
        chunk_sum(arena.floats(padded(dims.chunk))),
        sums(arena, dims),
        half_sums(arena, dims),
        start_sums(arena, dims),
        start(arena, dims) {
    arena.fill(halves, kMaxHalvings, dims);
  }
  float* keys;                 // [chunk, dp] exponents u of all keys of the chunk; -inf: not valid
  float* spare;                // [chunk, dp]
  float* values;               // [chunk, dvp]; zero: not valid
  float* reference;            // [dp] r: middle of u over the keys of the leaf, 0 for padding
  float* row_reference;        // [dp] the same, -inf for padding
  float* key_sum;              // [dp] sums of E over the keys
  float* relative;             // [leaf, dp] E = 2^(u - r)
  float* relative_transposed;  // [dp, leaf]
  float* rows;                 // [leaf, dp] exponents a of the rows
  float* prefix_weights;       // [leaf, dp] 2^(a + c0 - high)
  float* chunk_weights;        // [leaf, dp] Y = 2^(a + r - high)
  float* products;             // [leaf, leaf] tril(Y E^T)
  float* prefix_factor;        // [leaf] turns prefix_weights into probabilities
  float* chunk_factor;         // [leaf] the same for products
  float *prefix_high, *prefix_sum, *chunk_high, *chunk_sum;  // [leaf]
  KeySums sums;                                              // keys of the segment before the chunk
  KeySums half_sums;
  KeySums start_sums;         // all keys before the chunk, against the reference of `sums`
  State start;                // all keys before the chunk
  std::vector<State> halves;  // all keys before the second half, one per halving
};

// Scratch of one worker for tokens that are decoded one at a time.
struct DecodeTiles {
  // Rows that one pass over a state reads.
  static constexpr std::int64_t kRows = 4;
  DecodeTiles(Arena& arena, const Problem& p, const Dims& dims)
      : key(arena.floats(dims.dp)),
        share(arena.floats(dims.dp)),
        value(arena.floats(dims.dvp)),
        weights(arena.floats(kRows * dims.dp)),
        recent_weights(arena.floats(kRows * dims.dp)),
        lln(arena.floats(kRows * dims.dvp)),
        lln_channel(arena.floats(dims.dvp)),
        diag_channel(arena.floats(dims.dvp)) {
    if (!p.has_diag()) return;
    query = arena.floats(dims.dp);
    diag = arena.floats(dims.dvp);
    scores = arena.floats(padded(p.diag_block));
  }
  float* key;                               // [dp] exponents of the new key
  float* share;                             // [dp] of the new key in each channel's average
  float* value;                             // [dvp]
  float* weights;                           // [rows, dp] of all keys but the recent ones
  float* recent_weights;                    // [rows, dp] of those
  float* lln;                               // [rows, dvp]
  float *lln_channel, *diag_channel;        // [dvp] weights of the two parts
  float *query = nullptr, *diag = nullptr;  // [dp], [dvp]
  float* scores = nullptr;                  // [block]
};

// Heads so few that a sequence must be cut for all workers to have work.
inline bool cuts_sequences(const Problem& p, int workers) {
  return workers > 1 && p.sequences * p.heads_k < 4 * static_cast<std::int64_t>(workers);
}

// The causal forward. Either a worker walks a head from end to end and carries the state, or the
// sums of all segments come first and every segment is walked by itself.
struct CausalForwardLayout {
  CausalForwardLayout(Arena& arena, const Problem& p, const Dims& dims, int workers) {
    arena.fill(tiles, workers, p, dims);
    arena.fill(causal, workers, dims);
    arena.fill(prefixes, workers, dims);
    arena.fill(decode, p.op == Op::append ? workers : 0, p, dims);
    if (!cuts_sequences(p, workers)) return;
    arena.fill(sums, p.heads_k * max_causal_segments(p), dims);
    arena.fill(states, p.heads_k * max_causal_segments(p), dims);
  }
  std::vector<ForwardTiles> tiles;  // one per worker
  std::vector<CausalTiles> causal;  // one per worker
  std::vector<State> prefixes;      // one per worker
  std::vector<DecodeTiles> decode;  // one per worker, of an append
  std::vector<KeySums> sums;        // one per segment, where sequences are cut
  std::vector<State> states;        // all keys before the segment
};

// What one worker adds to its tiles in the causal backward.
struct CausalGradientTiles {
  CausalGradientTiles(Arena& arena, const Dims& dims)
      : key_slope(arena.floats(padded(dims.chunk) * dims.dp)),
        decayed(arena.floats(padded(dims.chunk) * dims.dp)),
        values_transposed(arena.floats(dims.dvp * padded(dims.chunk))),
        start_transposed(arena.floats(dims.state())),
        dproducts(arena.floats(padded(dims.chunk) * padded(dims.chunk))),
        row_products(arena.floats(padded(dims.chunk) * dims.dp)),
        key_products(arena.floats(padded(dims.chunk) * dims.dp)),
        dk(arena.floats(padded(dims.chunk) * dims.dp)),
        dv(arena.floats(padded(dims.chunk) * dims.dvp)),
        later_c(arena.floats(dims.dp)),
        later_factor(arena.floats(dims.dp)),
        later_t(arena.floats(dims.dp)),
        later(arena, dims),
        all_later(arena, dims),
        all_later_transposed(arena.floats(dims.state())),
        beyond(arena, dims) {
    const std::int64_t chunks = ceil_div(causal_segment_tokens(dims.chunk), dims.chunk);
    arena.fill(starts, chunks, dims);
  }
  float* key_slope;          // [chunk, dp]
  float* decayed;            // [leaf, dp] 2^(u - c1)
  float* values_transposed;  // [dvp, leaf]
  float* start_transposed;   // [dvp, dp] C0^T
  float* dproducts;          // [leaf, leaf] S = tril(g v^T - delta)
  float* row_products;       // [leaf, dp] S E
  float* key_products;       // [leaf, dp] S^T Y
  float* dk;                 // [chunk, dp]
  float* dv;                 // [chunk, dvp]
  float* later_c;            // [dp] c1: reference of `later`
  float* later_factor;       // [dp] 2^(r - c1)
  float* later_t;            // [dp] T of all later rows
  QuerySums later;           // [G, T] of the rows after the leaf, inside the segment
  QuerySums all_later;       // with those after the segment
  float* all_later_transposed;
  QuerySums beyond;           // rows after the segment, where one worker walks the head
  std::vector<State> starts;  // state before each chunk of the segment
};

// The causal backward. Segments have slots for what is summed over them, and where sequences are
// cut also for what travels between them.
struct CausalBackwardLayout {
  CausalBackwardLayout(Arena& arena, const Problem& p, const Dims& dims, int workers)
      : totals(arena, p, dims) {
    arena.fill(tiles, workers, p, dims);
    arena.fill(causal, workers, dims);
    arena.fill(gradient, workers, dims);
    const std::int64_t segments = p.heads_k * max_causal_segments(p);
    const bool cut = cuts_sequences(p, workers);
    beta_sums = arena.take<double>(segments);
    arena.fill(row_sums, segments * dims.group, dims);
    arena.fill(states, cut ? segments : workers * longest_causal_segments(p), dims);
    arena.fill(key_sums, cut ? segments : 0, dims);
    arena.fill(query_sums, cut ? segments : 0, dims);
    arena.fill(ends, !p.state ? 0 : cut ? p.sequences * p.heads_k : workers, dims);
  }
  ParameterTotals totals;
  std::vector<BackwardTiles> tiles;           // one per worker
  std::vector<CausalTiles> causal;            // one per worker
  std::vector<CausalGradientTiles> gradient;  // one per worker
  double* beta_sums = nullptr;                // one per segment
  std::vector<RowSums> row_sums;              // one per segment and query head of the group
  std::vector<State> states;                  // keys before each segment: of all heads where
                                              // sequences are cut, otherwise of a worker's head
  std::vector<KeySums> key_sums;              // one per segment, where sequences are cut
  std::vector<QuerySums> query_sums;          // the same: rows of the segment, then rows beyond it
  std::vector<State> ends;                    // all keys, where the problem has a state: of all
                                              // heads where sequences are cut, or of a worker's
};

// Bytes that a layout takes.
template <class Layout>
std::size_t layout_bytes(const Problem& problem, int workers) {
  Arena arena(nullptr);
  const Layout layout(arena, problem, Dims(problem), workers);
  return arena.used();
}

}  // namespace lln::cpu
