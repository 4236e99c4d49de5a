// Backward of a chunk of rows and of a chunk of keys: the bidirectional LLN part, the
// block-diagonal part beside it, and the gradients of the weights that join them.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_BACKWARD_PARTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_BACKWARD_PARTS_INL_H_
#undef LLN_CPU_BACKWARD_PARTS_INL_H_
#else
#define LLN_CPU_BACKWARD_PARTS_INL_H_
#endif

#include "cpu/diag_backward-inl.h"
#include "cpu/lln_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// dk = dv = 0 for the keys outside the valid range of the sequence.
HWY_INLINE void zero_unused_keys(const Call& call, const Dims& dims, const KeyHead& keys,
                                 float* zeros) {
  const Sequence& seq = *keys.sequence;
  const Rows dk = rows_of(call.grads.dk, seq.batch, keys.head_k, seq.k_begin);
  const Rows dv = rows_of(call.grads.dv, seq.batch, keys.head_k, seq.k_begin);
  std::fill(zeros, zeros + std::max(dims.dp, dims.dvp), 0.0F);
  for (std::int64_t j = 0; j < seq.k_tokens; ++j) {
    if (seq.valid(j)) {
      if (seq.mask == nullptr) j = seq.key_end - 1;
      continue;
    }
    store_row(dk, j, zeros);
    store_row(dv, j, zeros);
  }
}

// sum + a * b, lane by lane.
HWY_INLINE Vec product_sum(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                           std::int64_t width, Vec sum) {
  for (std::int64_t l = 0; l < width; l += kLanes) {
    sum = hn::MulAdd(hn::Load(kTag, a + l), hn::Load(kTag, b + l), sum);
  }
  return sum;
}

class BackwardParts : public DiagBackward {
 public:
  // `pairs`: the states that rows() and keys() are given are words of bf16 pairs, and so are the
  // products of the LLN part.
  BackwardParts(const Call& call, const Dims& dims, bool pairs = false)
      : DiagBackward(call, dims), lln_weight_(PartWeight::of_lln(call)), pairs_(pairs) {}

  const ParameterRequest& request() const { return request_; }
  const PartWeight& lln_weight() const { return lln_weight_; }
  bool wants_lln_channels() const { return request_.lln && lln_weight_.per_channel(); }
  bool has_slope() const { return p_.has_lln() && p_.feature != Feature::exp; }

  // g of some rows as the LLN part sees it: where the caller has it, or in tiles.g.
  Operand lln_g(const QueryHead& head, Range rows, const BackwardTiles& tiles) const {
    const Sequence& seq = *head.sequence;
    const ConstRows g = rows_of(call_.grads.g, seq.batch, head.h, seq.q_begin);
    if (in_place(g) && !lln_weight_.per_channel()) {
      return {floats_of(g, rows.begin), leading_dim(g), g.width};
    }
    load_g(head, rows, &lln_weight_, tiles.lln_channel, tiles.g);
    return {tiles.g, dims_.dvp, dims_.dvp};
  }

  void load_channels(const QueryHead& head, const BackwardTiles& tiles) const {
    head.load_channels(lln_weight_, dims_, tiles.lln_channel);
    head.load_channels(diag_weight_, dims_, tiles.diag_channel);
  }

  // Bidirectional: dq of a segment of rows, and the segment's part of dC and t.
  void rows(const KeyHead& keys, std::int64_t h, Range segment, const GradientState* state,
            const QuerySums& sums, const RowSums* row_sums, const BackwardTiles& tiles) const {
    const QueryHead head(call_, keys, h);
    const Sequence& seq = *keys.sequence;
    const Rows dq = rows_of(call_.grads.dq, seq.batch, h, seq.q_begin);
    load_channels(head, tiles);
    const RowWeights weights(head, dims_, state == nullptr ? State{} : state->state,
                             tiles.shifted_c);
    const Grid chunks(segment, seq.block_origin, dims_.chunk);
    for (std::int64_t i = 0; i < chunks.count(); ++i) {
      const Range next = i + 1 < chunks.count() ? chunks[i + 1] : Range{};
      if (state != nullptr) {
        if (pairs_) {
          lln_rows<Pairs>(head, chunks[i], next, weights, *state, sums, *row_sums, dq, tiles);
        } else {
          lln_rows<Floats>(head, chunks[i], next, weights, *state, sums, *row_sums, dq, tiles);
        }
      }
      if (p_.kind != Kind::lln && !adds_dq_to_rows_) {
        diag_rows(keys, head, chunks[i], row_sums, tiles);
      }
      if (!stores_dq_directly(dq)) finish_rows(head, chunks[i], dq, row_sums, tiles);
    }
  }

  // Bidirectional: dk and dv of a segment of keys.
  void keys(const KeyHead& keys, Range segment, const GradientState* state, double* beta_sum,
            const BackwardTiles& tiles) const {
    const Sequence& seq = *keys.sequence;
    const Rows dk = rows_of(call_.grads.dk, seq.batch, keys.head_k, seq.k_begin);
    const Rows dv = rows_of(call_.grads.dv, seq.batch, keys.head_k, seq.k_begin);
    const bool direct = seq.mask == nullptr && stores_directly(dk) && stores_directly(dv);
    const Grid chunks(segment, seq.block_origin, dims_.chunk);
    for (std::int64_t i = 0; i < chunks.count(); ++i) {
      const Range next = i + 1 < chunks.count() ? chunks[i + 1] : Range{};
      std::int64_t n;
      if (state == nullptr) {
        n = keys.select(chunks[i], tiles.token);
      } else if (pairs_) {
        n = lln_keys<Pairs>(keys, chunks[i], next, *state, beta_sum, dk, dv, direct, tiles);
      } else {
        n = lln_keys<Floats>(keys, chunks[i], next, *state, beta_sum, dk, dv, direct, tiles);
      }
      if (p_.kind != Kind::lln) diag_keys(keys, chunks[i], tiles);
      if (!direct) finish_keys(keys, n, tiles.lln_d, tiles.lln_dv, tiles);
    }
  }

  // Stores dq, the sum of both parts, and the gradients of weights that belong to rows.
  void finish_rows(const QueryHead& head, Range chunk, const Rows& dq, const RowSums* sums,
                   const BackwardTiles& tiles) const {
    if (p_.kind == Kind::lln_diag) {
      add_scaled(tiles.lln_d, tiles.diag_d, chunk.size() * dims_.dp, 1.0F, true);
    }
    store_tile(dq, chunk.size(), chunk.begin, p_.has_lln() ? tiles.lln_d : tiles.diag_d, dims_.dp);
    if (p_.kind != Kind::lln_diag) return;
    const Sequence& seq = *head.sequence;
    for (std::int64_t i = 0; i < chunk.size(); ++i) {
      const float lln = tiles.row_dots[i];
      const float diag = tiles.row_dots[kMaxChunk + i];
      sums->lln() += static_cast<double>(lln);
      sums->diag() += static_cast<double>(diag);
      const std::int64_t token = seq.q_begin + chunk.begin + i;
      write_token_weights(seq.batch, head.h, token, lln, diag);
    }
  }

  // Stores dk and dv, the sums of both parts, at tiles.token.
  void finish_keys(const KeyHead& keys, std::int64_t n, float* lln_dk, float* lln_dv,
                   const BackwardTiles& tiles) const {
    const Sequence& seq = *keys.sequence;
    const Rows dk = rows_of(call_.grads.dk, seq.batch, keys.head_k, seq.k_begin);
    const Rows dv = rows_of(call_.grads.dv, seq.batch, keys.head_k, seq.k_begin);
    if (p_.kind == Kind::lln_diag) {
      add_scaled(lln_dk, tiles.diag_d, n * dims_.dp, 1.0F, true);
      add_scaled(lln_dv, tiles.diag_dv, n * dims_.dvp, 1.0F, true);
    }
    store_tile(dk, n, tiles.token, p_.has_lln() ? lln_dk : tiles.diag_d, dims_.dp);
    store_tile(dv, n, tiles.token, p_.has_lln() ? lln_dv : tiles.diag_dv, dims_.dvp);
  }

  // Whether gradients of the LLN part can be stored where the caller wants them: they are all of
  // it, or the rest is added there.
  bool stores_directly(const Rows& rows) const { return p_.kind == Kind::lln && in_place(rows); }

  // q or k as they are.
  void load_raw(const ConstRows& rows, Range range, float* out) const {
    load_tile(rows, range.size(), range.begin, out, dims_.dp);
  }

  // The gradients of per-token weights for a row without keys.
  void zero_token_weights(const Sequence& seq, std::int64_t h, std::int64_t row) const {
    write_token_weights(seq.batch, h, seq.q_begin + row, 0, 0);
  }

 private:
  void write_token_weights(std::int64_t batch, std::int64_t head, std::int64_t token, float lln,
                           float diag) const {
    if (lln_weight_.per_token()) {
      write_token(call_.grads.dmix, batch, head, token, lln - diag);
      write_token(call_.grads.dlln_weight, batch, head, token, lln);
    }
    if (diag_weight_.per_token()) {
      write_token(call_.grads.ddiag_weight, batch, head, token, diag);
    }
  }

  static void write_token(const View& out, std::int64_t batch, std::int64_t head,
                          std::int64_t token, float value) {
    if (!out.given()) return;
    static_cast<float*>(
        out.data)[batch * out.stride[0] + head * out.stride[1] + token * out.stride[2]] = value;
  }

  // The LLN part of a chunk of rows: dq, and the chunk's share of dC and t. `next` is the chunk
  // after it.
  template <class Words>
  void lln_rows(const QueryHead& head, Range chunk, Range next, const RowWeights& weights,
                const GradientState& s, const QuerySums& sums, const RowSums& row_sums,
                const Rows& dq, const BackwardTiles& tiles) const {
    const std::int64_t count = chunk.size();
    const Sequence& seq = *head.sequence;
    const ConstRows g_rows = rows_of(call_.grads.g, seq.batch, head.h, seq.q_begin);
    float* const slope = has_slope() ? tiles.slope : nullptr;
    float* const w = tiles.exponents;
    Ahead ahead(stream_of(head.q, next), stream_of(g_rows, next));
    weights.make(chunk, w, tiles.row_factor, slope, ahead);
    const Operand g = lln_g(head, chunk, tiles);
    if (wants_lln_channels()) {
      gemm(count, dims_.dvp, dims_.d, by_rows(w, dims_.dp), s.state.values, dims_.dvp,
           {tiles.lln_dv, dims_.dvp, false, tiles.row_factor});
      load_g(head, chunk, nullptr, nullptr, tiles.values);
      add_products(tiles.values, tiles.lln_dv, count, dims_, row_sums.lln_channel);
    }
    Left g_left = by_rows(g.data, g.ld);
    if constexpr (Words::kPerWord == 2) {
      join_columns<Words>(tiles.g, dims_.dvp, count, dims_.dvp, tiles.words);
      g_left = by_rows(tiles.words, dims_.dvp);
    }
    gemm<Words>(count, dims_.dp, dims_.dv / Words::kPerWord, g_left, s.transposed, dims_.dp,
                {tiles.dweights, dims_.dp}, &ahead);
    normalise_and_dot(count, dims_, w, tiles.dweights, tiles.row_factor, tiles.row_dots);
    if (request_.alpha) load_raw(head.q, chunk, tiles.raw);
    const bool weighted = p_.kind == Kind::lln_diag;
    for (std::int64_t i = 0; weighted && i < count; ++i) {
      tiles.row_weight[i] = head.row_weight(lln_weight_, chunk.begin + i);
    }
    ExponentGradient gradient{slope,      request_.alpha ? tiles.raw : nullptr,
                              head.alpha, tiles.lln_d,
                              dims_.dp,   whole_vectors(dims_.d)};
    if (stores_dq_directly(dq)) gradient.go_to(dq, chunk.begin);
    row_sums.alpha() +=
        static_cast<double>(row_gradient(count, dims_.dp, w, tiles.dweights, tiles.row_dots,
                                         weighted ? tiles.row_weight : nullptr, gradient, sums.t));
    Ahead ahead_of_dq(stream_of(dq, next), {});
    join_rows<Words>(w, dims_.dp, count, dims_.dp, w);
    join_rows<Words>(tiles.g, dims_.dvp, count, dims_.dvp, tiles.g);
    gemm<Words>(dims_.d, g.width, ceil_div(count, Words::kPerWord), by_columns(w, dims_.dp), g.data,
                g.ld, {sums.dvalues, dims_.dvp, true}, &ahead_of_dq);
  }

  // dk and dv of the LLN part for the valid keys of a chunk, in tiles or (`direct`) where the
  // caller wants them; returns how many keys there are.
  template <class Words>
  std::int64_t lln_keys(const KeyHead& keys, Range chunk, Range next, const GradientState& s,
                        double* beta_sum, const Rows& dk, const Rows& dv, bool direct,
                        const BackwardTiles& tiles) const {
    float* const slope = has_slope() ? tiles.slope : nullptr;
    const std::int64_t n = keys.select(chunk, tiles.token);
    float* const kn = tiles.exponents;
    Ahead ahead(stream_of(keys.k, next), stream_of(keys.v, next));
    key_weights(keys, n, tiles.token, s.state.c, slope, kn, ahead);
    Operand v{tiles.values, dims_.dvp, dims_.dvp};
    if constexpr (Words::kPerWord == 2) {
      copy_words(keys.v, n, tiles.token, tiles.values, dims_.dvp);
    } else {
      v = keys.values(dims_, chunk, n, tiles.token, tiles.values);
    }
    gemm<Words>(n, dims_.dp, dims_.dv / Words::kPerWord, by_rows(v.data, v.ld), s.dtransposed,
                dims_.dp, {tiles.dweights, dims_.dp}, &ahead);
    if (request_.beta) load_tile(keys.k, n, tiles.token, tiles.raw, dims_.dp);
    ExponentGradient gradient{slope,     request_.beta ? tiles.raw : nullptr,
                              keys.beta, tiles.lln_d,
                              dims_.dp,  whole_vectors(dims_.d)};
    if (direct) gradient.go_to(dk, chunk.begin);
    *beta_sum +=
        static_cast<double>(key_gradient(n, dims_.dp, kn, tiles.dweights, s.sums.t, gradient));
    Ahead ahead_of_gradients(stream_of(dk, next), stream_of(dv, next));
    join_columns<Words>(kn, dims_.dp, n, dims_.dp, kn);
    gemm<Words>(n, direct ? dims_.dv : dims_.dvp, dims_.d / Words::kPerWord, by_rows(kn, dims_.dp),
                s.sums.dvalues, dims_.dvp,
                direct ? Product{floats_of(dv, chunk.begin), leading_dim(dv)}
                       : Product{tiles.lln_dv, dims_.dvp},
                &ahead_of_gradients);
    return n;
  }

  bool stores_dq_directly(const Rows& dq) const { return adds_dq_to_rows_ || stores_directly(dq); }

  // kn[n, dp] = 2^(u - c), the weights of keys in the state. At most 1, since c is their sum.
  void key_weights(const KeyHead& keys, std::int64_t n, Tokens token, const float* c, float* slope,
                   float* kn, Ahead& ahead) const {
    HWY_ALIGN float unused[kMaxDim];
    if (are_exponents(keys.k, keys.feature) && all_within(c, keys.k.width, kLargestReference)) {
      return weigh_keys({keys.k, log2_scale(keys.beta)}, n, token, c, kn, dims_.dp, unused, ahead);
    }
    load_exponents(keys.k, n, token, keys.feature, keys.power, keys.beta, kn, dims_.dp, slope);
    for (std::int64_t l = 0; l < dims_.dp; l += kLanes) {
      // Padding channels have c = -inf and exponents 0; any finite weight will do for them.
      const auto real = hn::FirstN(
          kTag, static_cast<std::size_t>(std::clamp<std::int64_t>(dims_.d - l, 0, kLanes)));
      const Vec shift = hn::IfThenElseZero(real, hn::Load(kTag, c + l));
      for (std::int64_t i = 0; i < n; ++i) {
        float* const x = kn + i * dims_.dp + l;
        hn::Store(exp2(hn::Sub(hn::Load(kTag, x), shift)), kTag, x);
      }
    }
  }

  PartWeight lln_weight_;
  bool pairs_;
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
