// Sums over tokens that have the size of a state: (m, s, C) of the keys of each piece and dC, t of
// its rows, 64 x 64 elements to a block, and how pieces are joined in their order: to a total, or
// in causal calls to what comes before (keys) or after (rows) each piece.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/plain_call.cuh"

namespace lln::cuda::plain {

// A part of a state: channels of q and k from l0 on, of v from c0 on.
struct StatePart {
  std::int64_t job, hk;
  int l0, c0;
  int rows, columns;

  __device__ StatePart(const PlainCall& p, std::int64_t index) {
    const int across = (p.dim_v + kStage - 1) / kStage, down = (p.dim + kStage - 1) / kStage;
    c0 = static_cast<int>(index % across) * kStage;
    index /= across;
    l0 = static_cast<int>(index % down) * kStage;
    index /= down;
    hk = index % p.call.heads_k;
    job = index / p.call.heads_k;
    rows = p.dim - l0 < kStage ? p.dim - l0 : kStage;
    columns = p.dim_v - c0 < kStage ? p.dim_v - c0 : kStage;
  }
  static std::int64_t count(const PlainCall& p) {
    return static_cast<std::int64_t>((p.dim_v + kStage - 1) / kStage) *
           ((p.dim + kStage - 1) / kStage);
  }
};

struct PartTiles {
  template <class Memory>
  __host__ __device__ explicit PartTiles(Memory& memory)
      : weights(memory.take(kMaxTile * kStageLd)),
        values(memory.take(kMaxTile * kStageLd)),
        sums(memory.take(kStage * kStageLd)),
        channel(take_running(memory, kStage)),
        row_m(memory.take(kMaxTile)),
        row_inverse(memory.take(kMaxTile)),
        delta(memory.take(kMaxTile)) {}
  float *weights, *values;  // [tokens, channels]
  float* sums;
  Running channel;
  float *row_m, *row_inverse, *delta;  // statistics of rows
};

// (m, s, C) of the keys of a piece.
struct KeySums {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain key sums";

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const StatePart part(p, index);
    const Place at = place_of<true>(p, part.job, 0, part.hk);
    if (!at.exists) return;
    SharedMemory memory{block.shared()};
    const PartTiles tiles(memory);
    const Elements e{p, at};
    const float beta = e.beta();
    clear(block, tiles.sums, kStage * kStageLd);
    for_each(block, part.rows, [&](int l) { tiles.channel.reset(l); });
    const std::int64_t key_end =
        at.end < at.sequence.key_end ? at.end : at.sequence.key_end;  // no valid ones behind it
    for (std::int64_t n = at.begin; n < key_end; n += kMaxTile) {
      for_each_element(block, kMaxTile, part.rows, [&](int r, int l) {
        const bool valid = n + r < at.end && e.valid(n + r);
        tiles.weights[r * kStageLd + l] =
            valid ? exponent_of(p, beta, e.k(n + r, part.l0 + l)).value : -kInfinity;
      });
      for_each_element(block, kMaxTile, part.columns, [&](int r, int c) {
        const bool valid = n + r < at.end && e.valid(n + r);
        tiles.values[r * kStageLd + c] = valid ? e.v(n + r, part.c0 + c) : 0.0F;
      });
      soften_columns(block, tiles.weights, kStageLd, kMaxTile, part.rows, tiles.channel);
      multiply<4, 4>(block, part.rows, part.columns, kMaxTile, {tiles.weights, 1, kStageLd},
                     {tiles.values, kStageLd, 1}, WholeDepth{}, [&](int l, int c, float sum) {
                       float& to = tiles.sums[l * kStageLd + c];
                       to = tiles.channel.keep[l] * to + sum;
                     });
    }
    const std::int64_t slot = part.job * p.call.heads_k + part.hk;
    for_each_element(block, part.rows, part.columns, [&](int l, int c) {
      p.pieces.values[slot * p.state_size() + (part.l0 + l) * p.dim_v + part.c0 + c] =
          tiles.sums[l * kStageLd + c];
      if (part.c0 + c > 0) return;
      p.pieces.m[slot * p.dim + part.l0 + l] = tiles.channel.m[l];
      p.pieces.s[slot * p.dim + part.l0 + l] = tiles.channel.s[l];
    });
  }
};

// The pieces of a sequence and key head.
struct Pieces {
  std::int64_t s, hk, first_job, count;
  int l, c;  // the element of a thread; l beyond the last: none

  template <bool kKeys>
  __device__ static Pieces at(const PlainCall& p, std::int64_t index, int thread) {
    const std::int64_t blocks = blocks_each(p);
    const std::int64_t element = index % blocks * kThreads + thread;
    const std::int64_t pair = index / blocks;
    Pieces pieces;
    pieces.s = pair / p.call.heads_k;
    pieces.hk = pair % p.call.heads_k;
    const PieceList list = pieces_of<kKeys>(p, pieces.s, sequence_at(p.call.sequences, pieces.s));
    pieces.first_job = list.first_job;
    pieces.count = list.count;
    pieces.l = p.takes(pieces.s, pieces.hk) ? static_cast<int>(element / p.dim_v) : p.dim;
    pieces.c = static_cast<int>(element % p.dim_v);
    return pieces;
  }
  __host__ __device__ static std::int64_t blocks_each(const PlainCall& p) {
    return (p.state_size() + kThreads - 1) / kThreads;
  }
  __device__ std::int64_t slot(const PlainCall& p, std::int64_t i) const {
    return (first_job + i) * p.call.heads_k + hk;
  }
};

__device__ inline float log_mass(float m, float s) { return s == 0 ? -kInfinity : m + log2f(s); }

// The state of all keys of a sequence, from its pieces or from what the caller saved; causal: also
// that before each piece.
struct JoinKeySums {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain join of key sums";

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    block.run([&](int t) {
      const Pieces pieces = Pieces::at<true>(p, index, t);
      if (pieces.l >= p.dim) return;
      if (p.reads_saved) {
        read(pieces);
      } else {
        join(pieces);
      }
    });
  }

 private:
  __device__ void read(const Pieces& pieces) const {
    const SavedState& from = p.saved;
    write_total(pieces, from.mass_at(pieces.s, pieces.hk, pieces.l),
                from.value_at(pieces.s, pieces.hk, pieces.l, pieces.c));
  }

  __device__ void join(const Pieces& pieces) const {
    float m = kNoReference, s = 0, value = 0;
    const float given =
        p.state.given() ? p.state.mass_at(pieces.s, pieces.hk, pieces.l) : -kInfinity;
    if (given != -kInfinity) {
      m = given;
      s = 1;
      value = p.state.value_at(pieces.s, pieces.hk, pieces.l, pieces.c);
    }
    for (std::int64_t i = 0; i < pieces.count; ++i) {
      const std::int64_t slot = pieces.slot(p, i);
      const std::int64_t l = slot * p.dim + pieces.l;
      float& own = p.pieces.values[slot * p.state_size() + pieces.l * p.dim_v + pieces.c];
      const float added = own;
      if (p.causal) {
        own = value;
        if (pieces.c == 0) {
          p.before.m[l] = m;
          p.before.s[l] = s;
        }
      }
      const JoinedMass joined = join_mass(m, s, p.pieces.m[l], p.pieces.s[l]);
      if (joined.s == 0) continue;
      m = joined.m;
      s = joined.s;
      value = joined.first * value + joined.second * added;
    }
    const float c = log_mass(m, s);
    write_total(pieces, c, value);
    if (!p.saved.given()) return;
    p.saved.value_at(pieces.s, pieces.hk, pieces.l, pieces.c) = value;
    if (pieces.c == 0) p.saved.lse_at(pieces.s, pieces.hk, pieces.l) = c * kLn2;
  }

  __device__ void write_total(const Pieces& pieces, float c, float value) const {
    if (p.total.m == nullptr) return;
    const std::int64_t pair = pieces.s * p.call.heads_k + pieces.hk;
    p.total.values[pair * p.state_size() + pieces.l * p.dim_v + pieces.c] = value;
    if (pieces.c == 0) p.total.m[pair * p.dim + pieces.l] = c;
  }
};

// dC = W^T g and t = W^T delta of the rows of a piece, W the weights of the state of all keys, or
// in causal calls of the keys before the piece.
struct RowSums {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain row sums";

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const StatePart part(p, index);
    Place at = place_of<false>(p, part.job, 0, part.hk);
    if (!at.exists) return;
    SharedMemory memory{block.shared()};
    const PartTiles tiles(memory);
    float* const c = tiles.channel.m;
    float* const t = tiles.channel.s;
    const float* const from =
        p.causal ? p.chunk_c + chunk_index(p, at.sequence, part.job, at.begin, at.begin, part.hk)
                 : p.total.m + (at.s * p.call.heads_k + part.hk) * p.dim;
    clear(block, tiles.sums, kStage * kStageLd);
    for_each(block, part.rows, [&](int l) {
      c[l] = from[part.l0 + l];
      t[l] = 0;
    });
    for (int g = 0; g < p.group; ++g) {
      at.h = at.hk * p.group + g;
      for (std::int64_t n = at.begin; n < at.end; n += kMaxTile)
        add_rows(block, part, at, tiles, n);
    }
    const std::int64_t slot = part.job * p.call.heads_k + part.hk;
    for_each_element(block, part.rows, part.columns, [&](int l, int column) {
      p.row_pieces.values[slot * p.state_size() + (part.l0 + l) * p.dim_v + part.c0 + column] =
          tiles.sums[l * kStageLd + column];
      if (part.c0 + column == 0) p.row_pieces.s[slot * p.dim + part.l0 + l] = t[l];
    });
  }

 private:
  template <class Block>
  __device__ void add_rows(Block& block, const StatePart& part, const Place& at,
                           const PartTiles& tiles, std::int64_t n) const {
    const Elements e{p, at};
    const float alpha = e.alpha();
    const float* const c = tiles.channel.m;
    float* const t = tiles.channel.s;
    // Rows that see no key take no part, whatever they hold.
    for_each(block, kMaxTile, [&](int r) {
      const std::int64_t i = row_index(p, at, n + r);
      tiles.row_inverse[r] = n + r < at.end ? p.lln.inverse[i] : 0.0F;
      tiles.row_m[r] = tiles.row_inverse[r] == 0 ? 0.0F : p.lln.m[i];
      tiles.delta[r] = tiles.row_inverse[r] == 0 ? 0.0F : p.lln.delta[i];
    });
    for_each_element(block, kMaxTile, part.rows, [&](int r, int l) {
      float weight = 0;
      if (tiles.row_inverse[r] != 0 && c[l] != -kInfinity) {
        const float a = exponent_of(p, alpha, e.q(n + r, part.l0 + l)).value;
        weight = exp2f(a + c[l] - tiles.row_m[r]) * tiles.row_inverse[r];
      }
      tiles.weights[r * kStageLd + l] = weight;
    });
    for_each_element(block, kMaxTile, part.columns, [&](int r, int column) {
      float x = 0;
      if (tiles.row_inverse[r] != 0) {
        x = e.g(n + r, part.c0 + column) * e.lln_weight(n + r, part.c0 + column);
      }
      tiles.values[r * kStageLd + column] = x;
    });
    for_each(block, part.rows, [&](int l) {
      float sum = 0;
      for (int r = 0; r < kMaxTile; ++r) sum += tiles.weights[r * kStageLd + l] * tiles.delta[r];
      t[l] += sum;
    });
    multiply<4, 4>(block, part.rows, part.columns, kMaxTile, {tiles.weights, 1, kStageLd},
                   {tiles.values, kStageLd, 1}, WholeDepth{},
                   [&](int l, int column, float sum) { tiles.sums[l * kStageLd + column] += sum; });
  }
};

// The sum of dC and t over the pieces; causal: over those behind each piece, relative to c at its
// end. What is given of the state of all keys (dsaved) counts as rows behind the last piece do.
struct JoinRowSums {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain join of row sums";

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    block.run([&](int t) {
      const Pieces pieces = Pieces::at<false>(p, index, t);
      if (pieces.l >= p.dim) return;
      if (p.causal) {
        scan(pieces);
      } else {
        add(pieces);
      }
    });
  }

 private:
  __device__ float& value_of(const Pieces& pieces, std::int64_t slot) const {
    return p.row_pieces.values[slot * p.state_size() + pieces.l * p.dim_v + pieces.c];
  }

  // dC and t of dsaved, t for the first column alone; nothing is read of channels without keys.
  struct Given {
    float value = 0, t = 0;
  };
  __device__ Given given(const Pieces& pieces) const {
    const std::int64_t pair = pieces.s * p.call.heads_k + pieces.hk;
    Given form;
    if (!p.dsaved.given() || p.total.m[pair * p.dim + pieces.l] == -kInfinity) return form;
    form.value = p.dsaved.value_at(pieces.s, pieces.hk, pieces.l, pieces.c);
    if (pieces.c != 0) return form;
    const float* const values = p.total.values + pair * p.state_size() + pieces.l * p.dim_v;
    for (int c = 0; c < p.dim_v; ++c) {
      form.t += values[c] * p.dsaved.value_at(pieces.s, pieces.hk, pieces.l, c);
    }
    form.t -= p.dsaved.lse_at(pieces.s, pieces.hk, pieces.l);
    return form;
  }

  __device__ void write_total(const Pieces& pieces, float value, float t) const {
    const std::int64_t pair = pieces.s * p.call.heads_k + pieces.hk;
    p.row_total.values[pair * p.state_size() + pieces.l * p.dim_v + pieces.c] = value;
    if (pieces.c == 0) p.row_total.s[pair * p.dim + pieces.l] = t;
  }

  __device__ void add(const Pieces& pieces) const {
    auto [value, t] = given(pieces);
    for (std::int64_t i = 0; i < pieces.count; ++i) {
      const std::int64_t slot = pieces.slot(p, i);
      value += value_of(pieces, slot);
      if (pieces.c == 0) t += p.row_pieces.s[slot * p.dim + pieces.l];
    }
    write_total(pieces, value, t);
  }

  __device__ void scan(const Pieces& pieces) const {
    auto [value, t] = given(pieces);  // of the pieces behind, relative to `end`
    float end = -kInfinity;           // c before the piece behind
    if (p.dsaved.given()) {
      end = p.total.m[(pieces.s * p.call.heads_k + pieces.hk) * p.dim + pieces.l];
    }
    for (std::int64_t i = pieces.count - 1; i >= 0; --i) {
      const std::int64_t slot = pieces.slot(p, i);
      const std::int64_t l = slot * p.dim + pieces.l;
      const float begin = log_mass(p.before.m[l], p.before.s[l]);
      const float decay = begin == -kInfinity ? 0.0F : exp2f(begin - end);
      const bool last = i == pieces.count - 1 && !p.dsaved.given();
      float& own = value_of(pieces, slot);
      const float added = own;
      own = value;
      value = last ? added : added + decay * value;
      if (pieces.c == 0) {
        float& own_t = p.row_pieces.s[l];
        const float added_t = own_t;
        own_t = t;
        t = last ? added_t : added_t + decay * t;
      }
      end = begin;
    }
    if (p.row_total.s != nullptr) write_total(pieces, value, t);
  }
};

// The gradient of the given state, from the sums of all rows and of dsaved: relative to c of all
// keys, or in causal calls to the given c itself.
struct StateGradient {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain state gradient";

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    block.run([&](int t) {
      const Pieces at = Pieces::at<false>(p, index, t);
      if (at.l >= p.dim) return;
      const std::int64_t pair = at.s * p.call.heads_k + at.hk;
      const float c = p.state.mass_at(at.s, at.hk, at.l);
      const bool empty = c == -kInfinity;
      const float share = empty      ? 0.0F
                          : p.causal ? 1.0F
                                     : exp2f(c - p.total.m[pair * p.dim + at.l]);
      const float* const g = p.row_total.values + pair * p.state_size() + at.l * p.dim_v;
      p.dstate.value_at(at.s, at.hk, at.l, at.c) = empty ? 0.0F : share * g[at.c];
      if (at.c != 0) return;
      float sum = -p.row_total.s[pair * p.dim + at.l];
      for (int column = 0; !empty && column < p.dim_v; ++column) {
        sum += p.state.value_at(at.s, at.hk, at.l, column) * g[column];
      }
      p.dstate.lse_at(at.s, at.hk, at.l) = empty ? 0.0F : share * sum;
    });
  }
};

}  // namespace lln::cuda::plain
