// Decoding token by token. One key changes every channel's average by C += (e/s)(v - C), and a row
// is a weighted sum of averages, so both happen in one pass over the state: the row's weights need
// nothing but (m, s), which are updated first. Exponents are in units of log2 (math/state.h).
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_DECODE_INL_H_
#undef LLN_CPU_DECODE_INL_H_
#else
#define LLN_CPU_DECODE_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"
#include "math/state.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

static_assert(kStatePad == kPad);

HWY_INLINE DecodeShape decode_shape(const Problem& p) {
  return {p.dim, p.dim_v, p.has_diag() ? p.diag_block : 0};
}

// Takes a key with exponents u[dp] into (m, s); share = e/s is its part of the new averages. The
// reference is raised only by keys that exceed it by kReferenceSlack; s is at least 1 then.
HWY_INLINE void add_mass(const Dims& dims, const float* HWY_RESTRICT u, const KeySet& set,
                         float* HWY_RESTRICT share) {
  for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
    const auto real =
        hn::FirstN(kTag, static_cast<std::size_t>(std::clamp<std::int64_t>(dims.d - l, 0, kLanes)));
    const Vec x = hn::IfThenElse(real, hn::Load(kTag, u + l), hn::Set(kTag, kNegInf));
    const Vec m = hn::Load(kTag, set.m + l);
    Vec s = hn::Load(kTag, set.s + l);
    const auto above = hn::Gt(x, hn::Add(m, hn::Set(kTag, kReferenceSlack)));
    const Vec raised = hn::IfThenElse(above, x, m);
    if (!hn::AllFalse(kTag, above)) {
      s = hn::Mul(s, exp2(hn::Sub(m, raised)));
      hn::Store(raised, kTag, set.m + l);
    }
    const Vec e = exp2(hn::Sub(x, raised));
    s = hn::Add(s, e);
    hn::Store(s, kTag, set.s + l);
    hn::Store(hn::Div(e, s), kTag, share + l);
  }
}

// The weights of a row with exponents a[dp], the softmax over channels of a + c, in two parts: of
// the keys in `all`, which replace a, and of those in `recent`. They are 2^(a + m - high) s,
// normalised: no logarithm of s is taken, and s between 1 and a few times the number of keys costs
// no range.
HWY_INLINE void mass_weights(const Dims& dims, const DecodeSlot& slot, float* HWY_RESTRICT a,
                             float* HWY_RESTRICT recent) {
  Vec top = hn::Set(kTag, kLowest);
  for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
    const Vec x = hn::Load(kTag, a + l);
    const Vec old = hn::Add(x, hn::Load(kTag, slot.all.m + l));
    const Vec young = hn::Add(x, hn::Load(kTag, slot.recent.m + l));
    top = hn::Max(top, hn::Max(old, young));
    hn::Store(old, kTag, a + l);
    hn::Store(young, kTag, recent + l);
  }
  const Vec high = hn::Set(kTag, reduce_max(top));
  Vec sum = hn::Zero(kTag);
  for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
    const Vec old =
        hn::Mul(exp2(hn::Sub(hn::Load(kTag, a + l), high)), hn::Load(kTag, slot.all.s + l));
    const Vec young =
        hn::Mul(exp2(hn::Sub(hn::Load(kTag, recent + l), high)), hn::Load(kTag, slot.recent.s + l));
    sum = hn::Add(sum, hn::Add(old, young));
    hn::Store(old, kTag, a + l);
    hn::Store(young, kTag, recent + l);
  }
  const float inverse = 1.0F / reduce_sum(sum);
  scale_row(a, dims.dp, inverse);
  scale_row(recent, dims.dp, inverse);
}

// One pass over kV vectors of the columns of both C: a value joins that of `recent` (kAdd), and
// kRows rows are summed, out[row] = weights[row] C.
template <bool kAdd, std::int64_t kV, std::int64_t kRows>
HWY_INLINE void pass_columns(const Dims& dims, const DecodeTiles& t, const DecodeSlot& slot,
                             std::int64_t column) {
  const std::int64_t d = dims.d, dp = dims.dp, dvp = dims.dvp;
  const float* HWY_RESTRICT old = slot.all.values + column;
  float* HWY_RESTRICT young = slot.recent.values + column;
  const float* HWY_RESTRICT share = t.share;
  Vec v[kV];
  Vec acc[kRows > 0 ? kRows : 1][kV];
  for (std::int64_t j = 0; j < kV; ++j) {
    if constexpr (kAdd) v[j] = hn::Load(kTag, t.value + column + j * kLanes);
    for (std::int64_t r = 0; r < kRows; ++r) acc[r][j] = hn::Zero(kTag);
  }
  for (std::int64_t l = 0; l < d; ++l, old += dvp, young += dvp) {
    Vec row[kV];
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kV; ++j) {
      row[j] = hn::Load(kTag, young + j * kLanes);
      if constexpr (kAdd) {
        row[j] = hn::MulAdd(hn::Set(kTag, share[l]), hn::Sub(v[j], row[j]), row[j]);
        hn::Store(row[j], kTag, young + j * kLanes);
      }
    }
    HWY_UNROLL(4)
    for (std::int64_t r = 0; r < kRows; ++r) {
      const Vec w_old = hn::Set(kTag, t.weights[r * dp + l]);
      const Vec w_young = hn::Set(kTag, t.recent_weights[r * dp + l]);
      HWY_UNROLL(4)
      for (std::int64_t j = 0; j < kV; ++j) {
        acc[r][j] = hn::MulAdd(w_old, hn::Load(kTag, old + j * kLanes), acc[r][j]);
        acc[r][j] = hn::MulAdd(w_young, row[j], acc[r][j]);
      }
    }
  }
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t j = 0; j < kV; ++j) {
      hn::Store(acc[r][j], kTag, t.lln + r * dvp + column + j * kLanes);
    }
  }
}

template <bool kAdd, std::int64_t kRows>
HWY_NOINLINE void pass_state(const Dims& dims, const DecodeTiles& t, const DecodeSlot& slot) {
  // As many accumulators as registers hold: 4 rows of 4 vectors of 32, of 2 vectors of 16.
  constexpr std::int64_t kV = HWY_TARGET == HWY_AVX3 ? 4 : 2;
  std::int64_t c = 0;
  for (; c + kV * kLanes <= dims.dvp; c += kV * kLanes) {
    pass_columns<kAdd, kV, kRows>(dims, t, slot, c);
  }
  for (; c < dims.dvp; c += kLanes) pass_columns<kAdd, 1, kRows>(dims, t, slot, c);
}

template <bool kAdd>
HWY_INLINE void pass_state(const Dims& dims, const DecodeTiles& t, std::int64_t rows,
                           const DecodeSlot& slot) {
  switch (rows) {
    case 0:
      if (kAdd) pass_state<kAdd, 0>(dims, t, slot);
      return;
    case 1:
      return pass_state<kAdd, 1>(dims, t, slot);
    case 2:
      return pass_state<kAdd, 2>(dims, t, slot);
    case 3:
      return pass_state<kAdd, 3>(dims, t, slot);
    default:
      return pass_state<kAdd, DecodeTiles::kRows>(dims, t, slot);
  }
}

// The update for values whose difference from C may overflow: (1 - share) C + share v, which lies
// between C and v however it is rounded.
HWY_NOINLINE inline void add_large_value(const Dims& dims, const DecodeTiles& t, float* values) {
  for (std::int64_t l = 0; l < dims.d; ++l) {
    const Vec share = hn::Set(kTag, t.share[l]);
    const Vec keep = hn::Set(kTag, 1.0F - t.share[l]);
    for (std::int64_t e = 0; e < dims.dvp; e += kLanes) {
      float* const at = values + l * dims.dvp + e;
      const Vec c = hn::Load(kTag, at);
      const Vec v = hn::Load(kTag, t.value + e);
      const Vec mixed = hn::MulAdd(keep, c, hn::Mul(share, v));
      const Vec between = hn::Min(hn::Max(mixed, hn::Min(c, v)), hn::Max(c, v));
      hn::Store(hn::IfThenElse(hn::Eq(mixed, mixed), between, mixed), kTag, at);
    }
  }
}

// The keys of one head of one call, one at a time, and rows that read the state after them.
class DecodeHead {
 public:
  DecodeHead(const Call& call, const Dims& dims, const KeyHead& keys, const DecodeTiles& tiles)
      : call_(call),
        dims_(dims),
        keys_(keys),
        t_(tiles),
        shape_(decode_shape(call.problem)),
        slot_(shape_.slot(call.state, keys.index * call.problem.heads_k + keys.head_k)),
        tokens_(call.tokens_before[static_cast<std::size_t>(keys.index)]),
        lln_weight_(PartWeight::of_lln(call)),
        diag_weight_(PartWeight::of_diag(call)) {
    std::fill(t_.lln_channel, t_.lln_channel + dims_.dvp, 1.0F);
    std::fill(t_.diag_channel, t_.diag_channel + dims_.dvp, 1.0F);
  }

  // Token `i` of the call, the next one of its sequence; and its rows where the call has rows.
  void add(std::int64_t i) {
    if (tokens_ % kRecentTokens == 0) fold(shape_, slot_);
    load_exponents(keys_.k, 1, i, keys_.feature, keys_.power, keys_.beta, t_.key, dims_.dp,
                   nullptr);
    load_tile(keys_.v, 1, i, t_.value, dims_.dvp);
    add_mass(dims_, t_.key, slot_.recent, t_.share);
    store_in_block(i, tokens_++);
    const std::int64_t rows = call_.in.q.given() ? dims_.group : 0;
    bool add = true;
    if (largest_magnitude(t_.value, dims_.dvp) > kLargeValue) {
      add_large_value(dims_, t_, slot_.recent.values);
      add = false;
    }
    for (std::int64_t first = 0; first < rows || add; first += DecodeTiles::kRows) {
      read_rows(i, 1, {first, std::min(rows, first + DecodeTiles::kRows)}, add);
      add = false;
    }
  }

  // Rows [0, count) of every query head of the group, which see all tokens so far.
  void read(std::int64_t count) {
    if (tokens_ == 0) return zero_rows({0, count});
    const std::int64_t rows = dims_.group * count;
    for (std::int64_t first = 0; first < rows; first += DecodeTiles::kRows) {
      read_rows(0, count, {first, std::min(rows, first + DecodeTiles::kRows)}, false);
    }
  }

  void zero_rows(Range rows) {
    std::fill(t_.lln, t_.lln + dims_.dvp, 0.0F);
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      const Rows o = rows_of_head(keys_.head_k * dims_.group + g);
      for (std::int64_t i = rows.begin; i < rows.end; ++i) store_row(o, i, t_.lln);
    }
  }

  // Tokens [begin, end) of the call, which have been summed elsewhere.
  void add_sums(Range tokens, const KeySums& sums) {
    const std::int64_t recent = (tokens_ + tokens.begin) % kRecentTokens;
    if (recent + tokens.size() > kRecentTokens) fold(shape_, slot_);
    const KeySet& set = slot_.recent;
    for (std::int64_t l = 0; l < dims_.d; ++l) {
      const JoinedMass joined = join_mass(set.m[l], set.s[l], sums.m[l], sums.s[l]);
      set.m[l] = joined.m;
      set.s[l] = joined.s;
      float* const row = set.values + l * dims_.dvp;
      add_scaled(row, row, dims_.dvp, joined.first, false);
      if (joined.second == 0) continue;
      add_scaled(row, sums.a + l * dims_.dvp, dims_.dvp,
                 joined.second / sums.s[l] / *sums.value_scale, true);
    }
  }

  // Both sets together, as the other kernels know a state.
  void copy_to(const State& state) const {
    const KeySet& all = slot_.all;
    const KeySet& recent = slot_.recent;
    std::fill(state.c, state.c + dims_.dp, kNegInf);
    std::fill(state.values + dims_.d * dims_.dvp, state.values + dims_.state(), 0.0F);
    for (std::int64_t l = 0; l < dims_.d; ++l) {
      const JoinedMass joined = join_mass(all.m[l], all.s[l], recent.m[l], recent.s[l]);
      if (joined.s != 0) state.c[l] = joined.m + std::log2(joined.s);
      float* const row = state.values + l * dims_.dvp;
      add_scaled(row, all.values + l * dims_.dvp, dims_.dvp, joined.first, false);
      add_scaled(row, recent.values + l * dims_.dvp, dims_.dvp, joined.second, true);
    }
  }

  // The running block when the first `count` tokens of the call have been added.
  void keep_block(std::int64_t count) {
    const std::int64_t tokens = tokens_ + count;
    const std::int64_t kept = std::min(count, shape_.block_tokens(tokens));
    for (std::int64_t i = 1; i <= kept; ++i) store_in_block(count - i, tokens - i);
  }

 private:
  Rows rows_of_head(std::int64_t h) const {
    return rows_of(call_.out.o, keys_.sequence->batch, h, keys_.sequence->q_begin);
  }

  // Token i of the call, which has this position in its sequence.
  void store_in_block(std::int64_t i, std::int64_t position) {
    if (shape_.block == 0) return;
    const std::int64_t at = position % shape_.block;
    load_tile(keys_.k, 1, i, slot_.block_k + at * dims_.dp, dims_.dp);
    load_tile(keys_.v, 1, i, slot_.block_v + at * dims_.dvp, dims_.dvp);
  }

  // Rows [begin, end) of group * count, those of a query head together: row r of head r / count is
  // first_row + r mod count. The new value joins C in the same pass (`add`).
  void read_rows(std::int64_t first_row, std::int64_t count, Range rows, bool add) {
    const auto head_of = [&](std::int64_t r) {
      return QueryHead(call_, keys_, keys_.head_k * dims_.group + r / count);
    };
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      float* const weights = t_.weights + (r - rows.begin) * dims_.dp;
      const std::int64_t row = first_row + r % count;
      head_of(r).load(dims_, {row, row + 1}, weights, nullptr);
      mass_weights(dims_, slot_, weights, t_.recent_weights + (r - rows.begin) * dims_.dp);
    }
    if (add) {
      pass_state<true>(dims_, t_, rows.size(), slot_);
    } else {
      pass_state<false>(dims_, t_, rows.size(), slot_);
    }
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      write_row(head_of(r), first_row + r % count, t_.lln + (r - rows.begin) * dims_.dvp);
    }
  }

  void write_row(const QueryHead& head, std::int64_t row, float* lln) {
    if (shape_.block > 0) {
      read_block(head, row);
      if (lln_weight_.per_channel()) head.load_channels(lln_weight_, dims_, t_.lln_channel);
      if (diag_weight_.per_channel()) head.load_channels(diag_weight_, dims_, t_.diag_channel);
      add_part(lln, lln, t_.lln_channel, head.row_weight(lln_weight_, row), dims_.dvp, false);
      add_part(lln, t_.diag, t_.diag_channel, head.row_weight(diag_weight_, row), dims_.dvp, true);
    }
    store_row(rows_of_head(head.h), row, lln);
  }

  // t.diag[dvp] = softmax(q k^T / sqrt(d)) v over the running block.
  void read_block(const QueryHead& head, std::int64_t row) {
    const std::int64_t keys = shape_.block_tokens(tokens_);
    const float scale = kLog2E / std::sqrt(static_cast<float>(dims_.d));
    load_tile(head.q, 1, row, t_.query, dims_.dp, scale);
    RowVectors partial;
    for (std::int64_t begin = 0; begin < keys; begin += kMaxChunk) {
      const std::int64_t count = std::min(kMaxChunk, keys - begin);
      const float* k = slot_.block_k + begin * dims_.dp;
      for (std::int64_t j = 0; j < count; ++j, k += dims_.dp) {
        Vec dot = hn::Zero(kTag);
        for (std::int64_t l = 0; l < dims_.dp; l += kLanes) {
          dot = hn::MulAdd(hn::Load(kTag, t_.query + l), hn::Load(kTag, k + l), dot);
        }
        partial.set(j, dot);
      }
      partial.sum(count, t_.scores + begin);
    }
    const float high = max_score(t_.scores, keys);
    const float sum = exponentiate(t_.scores, keys, padded(keys), high);
    scale_row(t_.scores, padded(keys), inverse_or_zero(sum));
    gemm(1, dims_.dvp, keys, by_rows(t_.scores, padded(keys)), slot_.block_v, dims_.dvp, t_.diag,
         dims_.dvp, false);
  }

  const Call& call_;
  const Dims& dims_;
  const KeyHead& keys_;
  const DecodeTiles& t_;
  DecodeShape shape_;
  DecodeSlot slot_;
  std::int64_t tokens_;  // of the sequence so far
  PartWeight lln_weight_, diag_weight_;
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
