// The causal backward of one segment, leaf by leaf from the last to the first. In the letters of
// docs/theory.md, with (c0, C0) the state before the leaf, r its reference, Z the log mass of a
// row:
//
//   W0 = 2^(a + c0 - Z), Y = 2^(a + r - Z), E = 2^(u - r), P = tril(Y E^T), S = tril(g v^T - delta)
//   da = W0 * (g C0^T - delta) + Y * (S E)
//   du = E * (S^T Y) + 2^(u - c1) * (v G^T - T),    dv = P^T g + 2^(u - c1) G
//   [G, T] <- 2^(c0 - c1) [G, T] + W0^T [g, delta]
//
// [G, T] gathers the rows after the leaf relative to c1, the state after it; every factor is <= 1.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_CAUSAL_LEAF_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_CAUSAL_LEAF_BACKWARD_INL_H_
#undef LLN_CPU_CAUSAL_LEAF_BACKWARD_INL_H_
#else
#define LLN_CPU_CAUSAL_LEAF_BACKWARD_INL_H_
#endif

#include "cpu/backward_parts-inl.h"
#include "cpu/causal-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// What a walk writes. dq needs nothing from later segments, dk and dv do.
enum class LeafOutputs { all, rows, keys };

struct SegmentBoundary {
  const State& before;      // keys before the segment
  const float* c_end;       // c after the segment; null where nothing comes after it
  const QuerySums* beyond;  // [G, T] of what comes after the segment relative to c_end, or null
};

class CausalLeafBackward {
 public:
  CausalLeafBackward(const Call& call, const Dims& dims, const BackwardParts& parts,
                     const KeyHead& keys, LeafOutputs outputs, const BackwardTiles& tiles,
                     const CausalTiles& causal, const CausalGradientTiles& gradient,
                     const RowSums* row_sums, double* beta_sum)
      : call_(call),
        dims_(dims),
        parts_(parts),
        keys_(keys),
        rows_(outputs != LeafOutputs::keys),
        columns_(outputs != LeafOutputs::rows),
        tiles_(tiles),
        t_(causal),
        grad_(gradient),
        row_sums_(row_sums),
        beta_sum_(beta_sum),
        dk_(rows_of(call.grads.dk, keys.sequence->batch, keys.head_k, keys.sequence->k_begin)),
        dv_(rows_of(call.grads.dv, keys.sequence->batch, keys.head_k, keys.sequence->k_begin)) {}

  // Leaves in gradient.later the [G, T] of the segment's rows relative to boundary.before.c.
  void walk_back(Range segment, const SegmentBoundary& boundary) const {
    if (rows_) {
      for (std::int64_t g = 0; g < dims_.group; ++g) row_sums_[g].reset(dims_);
    }
    if (columns_) *beta_sum_ = 0;
    chunk_starts(dims_, keys_, segment, boundary.before, t_, grad_.starts.data());
    std::fill(grad_.later.t, grad_.later.t + dims_.dp, 0.0F);
    std::fill(grad_.later.dvalues, grad_.later.dvalues + dims_.state(), 0.0F);
    if (boundary.c_end != nullptr) {
      std::copy(boundary.c_end, boundary.c_end + dims_.dp, grad_.later_c);
    }
    bool has_later = boundary.c_end != nullptr;
    const Grid chunks = chunks_of(dims_, keys_, segment);
    for (std::int64_t i = chunks.count() - 1; i >= 0; --i) {
      const Range chunk = chunks[i];
      load_chunk_keys(dims_, keys_, chunk, parts_.has_slope() ? grad_.key_slope : nullptr, t_);
      for_each_leaf<true>(dims_, {0, chunk.size()}, grad_.starts[static_cast<std::size_t>(i)], t_,
                          0, [&](const Leaf& leaf, const State& before) HWY_ATTR {
                            backward_leaf(leaf, chunk, before, boundary, has_later);
                            has_later = true;
                          });
      if (columns_ && !stores_keys_directly(chunk)) finish_chunk_keys(chunk);
    }
  }

 private:
  void backward_leaf(const Leaf& leaf, Range chunk, const State& before,
                     const SegmentBoundary& boundary, bool has_later) const {
    const std::int64_t count = leaf.rows.size();
    const bool direct = stores_keys_directly(chunk);
    Product dv{grad_.dv + leaf.rows.begin * dims_.dvp, dims_.dvp};
    if (direct) dv = {floats_of(dv_, chunk.begin + leaf.rows.begin), leading_dim(dv_)};
    if (leaf.has_keys) {
      make_relative(dims_, leaf, t_);
      transpose(t_.values + leaf.rows.begin * dims_.dvp, dims_.dvp, count, dims_.dvp,
                grad_.values_transposed, padded(count));
    } else if (columns_) {
      std::fill_n(grad_.dv + leaf.rows.begin * dims_.dvp, count * dims_.dvp, 0.0F);
      std::fill_n(grad_.dk + leaf.rows.begin * dims_.dp, count * dims_.dp, 0.0F);
    }
    const bool from_later = columns_ && has_later && leaf.has_keys;
    if (from_later) from_later_rows(leaf, boundary, direct ? dims_.dv : dims_.dvp, dv);
    if (has_later) decay_later(before);
    std::copy(before.c, before.c + dims_.dp, grad_.later_c);
    transpose(before.values, dims_.dvp, dims_.dp, dims_.dvp, grad_.start_transposed, dims_.dp);
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      dv.accumulate = from_later || g > 0;
      backward_rows(QueryHead(call_, keys_, keys_.head_k * dims_.group + g), leaf, chunk, before,
                    dv, row_sums_[g]);
    }
    if (columns_ && leaf.has_keys) finish_leaf_keys(leaf, chunk, from_later, direct);
  }

  // Whether dk and dv of the LLN part are all there is, and go where the caller wants them.
  bool stores_keys_directly(Range chunk) const {
    const Sequence& seq = *keys_.sequence;
    return call_.problem.kind == Kind::lln && in_place(dk_) && in_place(dv_) &&
           seq.mask == nullptr && chunk.end <= seq.key_end;
  }

  // What all later rows send here: dv = 2^(u - c1) G, and in grad_.dk and grad_.later_factor what
  // becomes dk = 2^(u - r) 2^(r - c1) (v G^T - T).
  void from_later_rows(const Leaf& leaf, const SegmentBoundary& boundary, std::int64_t width,
                       const Product& dv) const {
    const QuerySums& all = boundary.beyond == nullptr ? grad_.later : grad_.all_later;
    if (boundary.beyond != nullptr) {
      HWY_ALIGN float keep[kMaxDim];
      decay_factors(dims_, grad_.later_c, boundary.c_end, keep);
      for (std::int64_t l = 0; l < dims_.dp; ++l) {
        const Vec factor = hn::Set(kTag, keep[l]);
        for (std::int64_t e = l * dims_.dvp; e < (l + 1) * dims_.dvp; e += kLanes) {
          const Vec own = hn::Load(kTag, grad_.later.dvalues + e);
          const Vec sum = hn::MulAdd(factor, hn::Load(kTag, boundary.beyond->dvalues + e), own);
          hn::Store(sum, kTag, all.dvalues + e);
        }
        all.t[l] = grad_.later.t[l] + keep[l] * boundary.beyond->t[l];
      }
    }
    transpose(all.dvalues, dims_.dvp, dims_.dp, dims_.dvp, grad_.all_later_transposed, dims_.dp);
    const std::int64_t count = leaf.rows.size();
    // 2^(u - c1) = E 2^(r - c1), with factors of at most 1.
    for (std::int64_t l = 0; l < dims_.dp; l += kLanes) {
      const Vec c = hn::Load(kTag, grad_.later_c + l);
      const auto empty = hn::Eq(c, hn::Set(kTag, kNegInf));  // padding and channels without a key
      const Vec factor =
          hn::IfThenZeroElse(empty, exp2(hn::Sub(hn::Load(kTag, t_.reference + l), c)));
      hn::Store(factor, kTag, grad_.later_factor + l);
      hn::Store(hn::Load(kTag, all.t + l), kTag, grad_.later_t + l);
      for (std::int64_t i = 0; i < count; ++i) {
        const Vec e = hn::Load(kTag, t_.relative + i * dims_.dp + l);
        hn::Store(hn::Mul(e, factor), kTag, grad_.decayed + i * dims_.dp + l);
      }
    }
    gemm(count, width, dims_.d, by_rows(grad_.decayed, dims_.dp), all.dvalues, dims_.dvp, dv);
    gemm(count, dims_.dp, dims_.dv, by_rows(t_.values + leaf.rows.begin * dims_.dvp, dims_.dvp),
         grad_.all_later_transposed, dims_.dp, {grad_.dk + leaf.rows.begin * dims_.dp, dims_.dp});
  }

  // [G, T] relative to c0 instead of c1.
  void decay_later(const State& before) const {
    HWY_ALIGN float keep[kMaxDim];
    decay_factors(dims_, before.c, grad_.later_c, keep);
    for (std::int64_t l = 0; l < dims_.dp; ++l) {
      grad_.later.t[l] *= keep[l];
      scale_row(grad_.later.dvalues + l * dims_.dvp, dims_.dvp, keep[l]);
    }
  }

  // One query head. `dv` is set or, where it accumulates, added to; so are the products for dk.
  void backward_rows(const QueryHead& head, const Leaf& leaf, Range chunk, const State& before,
                     const Product& dv, const RowSums& row_sums) const {
    const std::int64_t count = leaf.rows.size();
    const std::int64_t ld = padded(count);
    const Range rows{chunk.begin + leaf.rows.begin, chunk.begin + leaf.rows.end};
    const float* const v = t_.values + leaf.rows.begin * dims_.dvp;
    float* const slope = parts_.has_slope() ? tiles_.slope : nullptr;
    parts_.load_channels(head, tiles_);
    make_weights(dims_, head, rows.begin, leaf, before, slope, t_);
    const Operand g = parts_.lln_g(head, rows, tiles_);
    gemm(count, dims_.dp, dims_.dv, by_rows(g.data, g.ld), grad_.start_transposed, dims_.dp,
         {tiles_.dweights, dims_.dp});
    if (leaf.has_keys) {
      lower_product(count, dims_.dv, g.data, g.ld, grad_.values_transposed, grad_.dproducts,
                    nullptr);
    }
    normalise_rows(leaf);
    if (rows_ && parts_.wants_lln_channels()) {
      channel_sums(head, leaf, rows, before, v, row_sums);
    }
    const Sequence& seq = *keys_.sequence;
    const Rows dq = rows_of(call_.grads.dq, seq.batch, head.h, seq.q_begin);
    const bool dq_is_done = parts_.stores_directly(dq);
    if (rows_) row_gradients(head, leaf, rows, slope, dq_is_done ? &dq : nullptr, row_sums);
    const bool weighted = call_.problem.kind == Kind::lln_diag;
    for (std::int64_t i = 0; weighted && i < count; ++i) {
      const float weight = head.row_weight(parts_.lln_weight(), rows.begin + i);
      scale_row(t_.prefix_weights + i * dims_.dp, dims_.dp, weight);
      if (!leaf.has_keys) continue;
      scale_row(t_.chunk_weights + i * dims_.dp, dims_.dp, weight);
      scale_row(t_.products + i * ld, ld, weight);
    }
    if (columns_ && leaf.has_keys) {
      multiply_lower_transposed(count, dims_.dp, grad_.dproducts, t_.chunk_weights, dims_.dp,
                                {grad_.key_products, dims_.dp, head.h % dims_.group > 0});
      multiply_lower_transposed(count, g.width, t_.products, g.data, g.ld, dv);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      add_scaled(grad_.later.t, t_.prefix_weights + i * dims_.dp, dims_.dp, tiles_.row_dots[i],
                 true);
    }
    gemm(dims_.d, g.width, count, by_columns(t_.prefix_weights, dims_.dp), g.data, g.ld,
         {grad_.later.dvalues, dims_.dvp, true});
    if (rows_ && weighted) parts_.diag_rows(keys_, head, rows, &row_sums, tiles_);
    if (rows_ && !dq_is_done) parts_.finish_rows(head, rows, dq, &row_sums, tiles_);
  }

  // W0, Y and P of the rows as probabilities, their delta in row_dots, and S from g v^T.
  void normalise_rows(const Leaf& leaf) const {
    const std::int64_t count = leaf.rows.size();
    const std::int64_t ld = padded(count);
    RowVectors partial;
    for (std::int64_t i = 0; i < count; ++i) {
      scale_row(t_.prefix_weights + i * dims_.dp, dims_.dp, t_.prefix_factor[i]);
      Vec sum = product_sum(t_.prefix_weights + i * dims_.dp, tiles_.dweights + i * dims_.dp,
                            dims_.dp, hn::Zero(kTag));
      if (leaf.has_keys) {
        scale_row(t_.chunk_weights + i * dims_.dp, dims_.dp, t_.chunk_factor[i]);
        scale_row(t_.products + i * ld, ld, t_.chunk_factor[i]);
        sum = product_sum(t_.products + i * ld, grad_.dproducts + i * ld, ld, sum);
      }
      partial.set(i, sum);
    }
    partial.sum(count, tiles_.row_dots);
    for (std::int64_t i = 0; leaf.has_keys && i < count; ++i) {
      const Vec delta = hn::Set(kTag, tiles_.row_dots[i]);
      for (std::int64_t j = 0; j <= i; j += kLanes) {
        float* const s = grad_.dproducts + i * ld + j;
        const auto below = hn::FirstN(kTag, static_cast<std::size_t>(std::min(kLanes, i + 1 - j)));
        hn::Store(hn::IfThenElseZero(below, hn::Sub(hn::Load(kTag, s), delta)), kTag, s);
      }
    }
  }

  // Sums of g * LLN per channel: the rows themselves are needed here, g . LLN is not enough.
  void channel_sums(const QueryHead& head, const Leaf& leaf, Range rows, const State& before,
                    const float* v, const RowSums& row_sums) const {
    const std::int64_t count = rows.size();
    gemm(count, dims_.dvp, dims_.d, by_rows(t_.prefix_weights, dims_.dp), before.values, dims_.dvp,
         tiles_.lln_dv, dims_.dvp, false);
    if (leaf.has_keys) {
      gemm(count, dims_.dvp, count, by_rows(t_.products, padded(count)), v, dims_.dvp,
           tiles_.lln_dv, dims_.dvp, true);
    }
    parts_.load_g(head, rows, nullptr, nullptr, tiles_.values);
    add_products(tiles_.values, tiles_.lln_dv, count, dims_, row_sums.lln_channel);
  }

  // dq = W0 (g C0^T - delta) + Y (S E) of the LLN part, in tiles.lln_d or where it goes, and the
  // sum for dalpha.
  void row_gradients(const QueryHead& head, const Leaf& leaf, Range rows, const float* slope,
                     const Rows* dq, const RowSums& row_sums) const {
    const std::int64_t count = rows.size();
    const std::int64_t dp = dims_.dp;
    if (leaf.has_keys) {
      multiply_lower(count, dp, grad_.dproducts, t_.relative, dp, {grad_.row_products, dp});
    }
    const bool alpha = parts_.request().alpha;
    if (alpha) parts_.load_raw(head.q, rows, tiles_.raw);
    ExponentGradient gradient{slope, alpha ? tiles_.raw : nullptr, head.alpha, tiles_.lln_d,
                              dp,    whole_vectors(dims_.d)};
    if (dq != nullptr) gradient.go_to(*dq, rows.begin);
    const Vec scale = hn::Set(kTag, head.alpha);
    Vec raw_sum = hn::Zero(kTag);
    for (std::int64_t i = 0; i < count; ++i) {
      const Vec delta = hn::Set(kTag, tiles_.row_dots[i]);
      const Vec weight = hn::Set(kTag, head.row_weight(parts_.lln_weight(), rows.begin + i));
      for (std::int64_t l = 0; l < gradient.width; l += kLanes) {
        const std::int64_t at = i * dp + l;
        Vec x = hn::Mul(hn::Load(kTag, t_.prefix_weights + at),
                        hn::Sub(hn::Load(kTag, tiles_.dweights + at), delta));
        if (leaf.has_keys) {
          x = hn::MulAdd(hn::Load(kTag, t_.chunk_weights + at),
                         hn::Load(kTag, grad_.row_products + at), x);
        }
        gradient.store(i, l, dp, hn::Mul(x, weight), scale, raw_sum);
      }
    }
    if (alpha) row_sums.alpha() += static_cast<double>(reduce_sum(raw_sum));
  }

  // dk = E (S^T Y + what later rows sent) of the LLN part of a leaf, in grad_.dk or where it goes,
  // and the sum for dbeta.
  void finish_leaf_keys(const Leaf& leaf, Range chunk, bool from_later, bool direct) const {
    const std::int64_t count = leaf.rows.size();
    const std::int64_t dp = dims_.dp;
    const Range tokens{chunk.begin + leaf.rows.begin, chunk.begin + leaf.rows.end};
    const bool beta = parts_.request().beta;
    if (beta) parts_.load_raw(keys_.k, tokens, tiles_.raw);
    float* const sent = grad_.dk + leaf.rows.begin * dp;
    ExponentGradient gradient{parts_.has_slope() ? grad_.key_slope + leaf.rows.begin * dp : nullptr,
                              beta ? tiles_.raw : nullptr,
                              keys_.beta,
                              sent,
                              dp,
                              whole_vectors(dims_.d)};
    if (direct) gradient.go_to(dk_, tokens.begin);
    const Vec scale = hn::Set(kTag, keys_.beta);
    Vec raw_sum = hn::Zero(kTag);
    for (std::int64_t i = 0; i < count; ++i) {
      if (!keys_.sequence->valid(tokens.begin + i)) continue;
      for (std::int64_t l = 0; l < gradient.width; l += kLanes) {
        const std::int64_t at = i * dp + l;
        Vec x = hn::Load(kTag, grad_.key_products + at);
        if (from_later) {
          x = hn::MulAdd(hn::Load(kTag, grad_.later_factor + l),
                         hn::Sub(hn::Load(kTag, sent + at), hn::Load(kTag, grad_.later_t + l)), x);
        }
        x = hn::Mul(hn::Load(kTag, t_.relative + at), x);
        gradient.store(i, l, dp, x, scale, raw_sum);
      }
    }
    if (beta) *beta_sum_ += static_cast<double>(reduce_sum(raw_sum));
  }

  // Stores dk and dv of the valid keys of a chunk, both parts together.
  void finish_chunk_keys(Range chunk) const {
    if (call_.problem.kind == Kind::lln_diag) parts_.diag_keys(keys_, chunk, tiles_);
    const std::int64_t n =
        keys_.select({chunk.begin, std::min(chunk.end, keys_.sequence->key_end)}, tiles_.token);
    for (std::int64_t i = 0; i < n; ++i) {  // where some are not valid: the others move together
      const std::int64_t from = tiles_.token[i] - chunk.begin;
      if (from == i) continue;
      std::copy_n(grad_.dk + from * dims_.dp, dims_.dp, grad_.dk + i * dims_.dp);
      std::copy_n(grad_.dv + from * dims_.dvp, dims_.dvp, grad_.dv + i * dims_.dvp);
    }
    parts_.finish_keys(keys_, n, grad_.dk, grad_.dv, tiles_);
  }

  const Call& call_;
  const Dims& dims_;
  const BackwardParts& parts_;
  const KeyHead keys_;
  const bool rows_, columns_;
  const BackwardTiles& tiles_;
  const CausalTiles& t_;
  const CausalGradientTiles& grad_;
  const RowSums* row_sums_;  // one per query head of the group
  double* beta_sum_;
  const Rows dk_, dv_;
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
