// Backward of the block-diagonal part, and of the softmax operation: its rows, its keys, and the
// statistics that a block needs where it is larger than a tile. Shared by the bidirectional and the
// causal kernel.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_DIAG_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_DIAG_BACKWARD_INL_H_
#undef LLN_CPU_DIAG_BACKWARD_INL_H_
#else
#define LLN_CPU_DIAG_BACKWARD_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"
#include "cpu/softmax_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// total[c] += sum over rows of a * b.
HWY_INLINE void add_products(const float* a, const float* b, std::int64_t rows, const Dims& dims,
                             double* total) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t c = 0; c < dims.dv; ++c) {
      total[c] +=
          static_cast<double>(a[i * dims.dvp + c]) * static_cast<double>(b[i * dims.dvp + c]);
    }
  }
}

class DiagBackward {
 public:
  DiagBackward(const Call& call, const Dims& dims)
      : call_(call),
        p_(call.problem),
        dims_(dims),
        request_(call),
        diag_weight_(PartWeight::of_diag(call)),
        adds_dq_to_rows_(p_.kind == Kind::lln_diag && !p_.causal && p_.diag_block <= dims.chunk &&
                         call.grads.dq.dtype == DType::f32 && dims.d % kLanes == 0 &&
                         !request_.lln && !request_.diag) {}

  float* row_lse = nullptr;  // [batch, heads, tokens] of the softmax operation
  float* row_delta = nullptr;

  // g of some rows, times the weights of the channels where a part has those.
  void load_g(const QueryHead& head, Range rows, const PartWeight* weight, const float* channel,
              float* out) const {
    const Sequence& seq = *head.sequence;
    load_tile(rows_of(call_.grads.g, seq.batch, head.h, seq.q_begin), rows.size(), rows.begin, out,
              dims_.dvp);
    if (weight == nullptr || !weight->per_channel()) return;
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      float* const row = out + i * dims_.dvp;
      for (std::int64_t c = 0; c < dims_.dvp; c += kLanes) {
        hn::Store(hn::Mul(hn::Load(kTag, row + c), hn::Load(kTag, channel + c)), kTag, row + c);
      }
    }
  }

  // dq of the block-diagonal part (or softmax) in tiles.diag_d[chunk, dp]; g . Diag in row_dots.
  void diag_rows(const KeyHead& keys, const QueryHead& head, Range chunk, const RowSums* sums,
                 const BackwardTiles& tiles) const {
    const ScoreTiles& t = tiles.scores[0];
    const ScoreHead scores = head.scores(call_, keys, dims_, t);
    const bool channels = request_.diag && diag_weight_.per_channel();
    for_each_block(scores, chunk, [&](Range rows, const Block& block) HWY_ATTR {
      const std::int64_t offset = rows.begin - chunk.begin;
      load_g(head, rows, &diag_weight_, tiles.diag_channel, t.g);
      softmax_backward_rows(
          scores, rows, block.keys,
          [&](std::int64_t row) { return head.row_weight(diag_weight_, row); },
          tiles.diag_d + offset * dims_.dp,
          channels ? tiles.diag_dv + offset * dims_.dvp : nullptr);
      for (std::int64_t i = 0; i < rows.size(); ++i) {
        tiles.row_dots[kMaxChunk + offset + i] = t.row_delta[i];
        if (row_lse == nullptr) continue;
        row_lse[statistics_index(head, rows.begin + i)] = t.row_max[i];
        row_delta[statistics_index(head, rows.begin + i)] = t.row_delta[i];
      }
    });
    if (channels) {
      load_g(head, chunk, nullptr, nullptr, tiles.values);
      add_products(tiles.values, tiles.diag_dv, chunk.size(), dims_, sums->diag_channel);
    }
  }

  // dk[n, dp] and dv[n, dvp] of the block-diagonal part for the valid keys of a chunk, summed over
  // the query heads of the group, in tiles.diag_d and tiles.diag_dv.
  void diag_keys(const KeyHead& keys, Range chunk, const BackwardTiles& tiles) const {
    const Sequence& seq = *keys.sequence;
    const ScoreTiles& t = tiles.scores[0];
    const QueryHead first(call_, keys, keys.head_k * dims_.group);
    std::int64_t offset = 0;
    for_each_block(
        first.scores(call_, keys, dims_, t), chunk, [&](Range part, const Block& block) HWY_ATTR {
          const ScoreHead any = first.scores(call_, keys, dims_, t);
          if (spans_tiles(p_)) block_statistics(keys, block, tiles);
          const std::int64_t n = load_keys(any, {part.begin, std::min(part.end, seq.key_end)},
                                           /*values_transposed=*/true);
          float* const dk = tiles.diag_d + offset * dims_.dp;
          float* const dv = tiles.diag_dv + offset * dims_.dvp;
          std::fill(dk, dk + n * dims_.dp, 0.0F);
          std::fill(dv, dv + n * dims_.dvp, 0.0F);
          offset += n;
          if (n == 0) return;
          Range rows = block.rows;
          if (p_.causal) rows.begin = std::max(rows.begin, part.begin);
          for (std::int64_t h = first.h; h < first.h + dims_.group; ++h) {
            diag_keys_of_head(keys, QueryHead(call_, keys, h), rows, n, tiles, dk, dv);
          }
          for (std::int64_t i = 0; i < n; ++i) scale_row(dk + i * dims_.dp, dims_.dp, kLn2);
        });
  }

  // Before the first task: no worker has the statistics of a block.
  void forget_blocks(std::vector<BackwardTiles>& tiles) const {
    for (BackwardTiles& t : tiles) {
      if (t.block != nullptr) t.block[0] = -1;
    }
  }

 protected:
  const Call& call_;
  const Problem& p_;
  const Dims& dims_;
  ParameterRequest request_;
  PartWeight diag_weight_;
  // The keys of a diagonal block see all of its scores and their gradients, so that dq of the block
  // can be made there too, two products less than with a pass of its own; but it is then added to
  // what the LLN part has stored, which only f32 allows, and g . Diag is known too late for the
  // gradients of weights.
  const bool adds_dq_to_rows_;

 private:
  std::int64_t statistics_index(const QueryHead& head, std::int64_t row) const {
    const Sequence& seq = *head.sequence;
    return (seq.batch * p_.heads + head.h) * p_.tokens + seq.q_begin + row;
  }

  void diag_keys_of_head(const KeyHead& keys, const QueryHead& head, Range rows, std::int64_t n,
                         const BackwardTiles& tiles, float* dk, float* dv) const {
    const ScoreTiles& t = tiles.scores[0];
    const ScoreHead scores = head.scores(call_, keys, dims_, t);
    if (diag_weight_.per_channel()) {
      head.load_channels(diag_weight_, dims_, tiles.diag_channel);
    }
    for (std::int64_t r = rows.begin; r < rows.end; r += dims_.chunk) {
      const Range tile{r, std::min(rows.end, r + dims_.chunk)};
      load_g(head, tile, &diag_weight_, tiles.diag_channel, t.g);
      const float* lse = row_lse == nullptr ? nullptr : row_lse + statistics_index(head, r);
      const float* delta = row_lse == nullptr ? nullptr : row_delta + statistics_index(head, r);
      if (spans_tiles(p_)) {
        lse = tiles.block_lse + block_index(head, r - tiles.block[1]);
        delta = tiles.block_delta + block_index(head, r - tiles.block[1]);
      }
      if (lse != nullptr) {
        std::copy(lse, lse + tile.size(), t.row_max);
        std::copy(delta, delta + tile.size(), t.row_delta);
      }
      const Sequence& seq = *keys.sequence;
      const Rows dq = rows_of(call_.grads.dq, seq.batch, head.h, seq.q_begin);
      softmax_backward_keys(
          scores, {tile, lse == nullptr, adds_dq_to_rows_ ? &dq : nullptr}, n,
          [&](std::int64_t row) { return head.row_weight(diag_weight_, row); }, dk, dv);
    }
  }

  std::int64_t block_index(const QueryHead& head, std::int64_t row) const {
    return head.h % dims_.group * std::min(p_.diag_block, p_.tokens) + row;
  }

  // Softmax statistics of all rows of a block, for the query heads of the group. Kept until another
  // block is asked for: a worker takes the keys of a block in order.
  void block_statistics(const KeyHead& keys, const Block& block, const BackwardTiles& tiles) const {
    const std::int64_t pair = keys.index * p_.heads_k + keys.head_k;
    if (tiles.block[0] == pair && tiles.block[1] == block.rows.begin) return;
    tiles.block[0] = pair;
    tiles.block[1] = block.rows.begin;
    const ScoreTiles& t = tiles.scores[0];
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      const QueryHead head(call_, keys, keys.head_k * dims_.group + g);
      head.load_channels(diag_weight_, dims_, tiles.diag_channel);
      const ScoreHead scores = head.scores(call_, keys, dims_, t);
      for (std::int64_t r = block.rows.begin; r < block.rows.end; r += dims_.chunk) {
        const Range rows{r, std::min(block.rows.end, r + dims_.chunk)};
        Range visible_keys = block.keys;
        if (p_.causal) visible_keys.end = std::min(visible_keys.end, rows.end);
        load_g(head, rows, &diag_weight_, tiles.diag_channel, t.g);
        softmax_statistics(scores, rows, visible_keys);
        const std::int64_t at = block_index(head, r - block.rows.begin);
        std::copy(t.row_max, t.row_max + rows.size(), tiles.block_lse + at);
        std::copy(t.row_delta, t.row_delta + rows.size(), tiles.block_delta + at);
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
