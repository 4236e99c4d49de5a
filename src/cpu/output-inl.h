// Where rows of o come together: the weights of the two parts, the block-diagonal part added to the
// LLN part, and the store to the caller's tensor, which takes place inside the products where it is
// f32. Shared by the forward kernels.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_OUTPUT_INL_H_
#undef LLN_CPU_OUTPUT_INL_H_
#else
#define LLN_CPU_OUTPUT_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"
#include "cpu/softmax_pairs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

class OutputRows {
 public:
  // `pairs`: the block-diagonal part by products of bf16 pairs.
  OutputRows(const Call& call, const Dims& dims, bool pairs = false)
      : call_(call),
        p_(call.problem),
        dims_(dims),
        lln_weight_(PartWeight::of_lln(call)),
        diag_weight_(PartWeight::of_diag(call)),
        per_channel_(lln_weight_.per_channel() || diag_weight_.per_channel()),
        direct_(call.out.o.dtype == DType::f32 && dims.dv % kLanes == 0 && !per_channel_),
        pairs_(pairs) {}

  Rows rows(const QueryHead& head) const {
    return rows_of(call_.out.o, head.sequence->batch, head.h, head.sequence->q_begin);
  }

  // Channels that products write.
  std::int64_t width() const { return direct_ ? dims_.dv : dims_.dvp; }

  // Where the rows of a range are made.
  Product target(const QueryHead& head, Range range, const ForwardTiles& tiles) const {
    if (!direct_) return {tiles.rows, dims_.dvp};
    const Rows o = rows(head);
    return {floats_of(o, range.begin), leading_dim(o)};
  }

  // Multiplies factors of rows with the weight of the LLN part, where rows carry it.
  void weigh_lln(const QueryHead& head, Range range, float* factor) const {
    if (p_.kind != Kind::lln_diag || per_channel_) return;
    for (std::int64_t i = 0; i < range.size(); ++i) {
      factor[i] *= head.row_weight(lln_weight_, range.begin + i);
    }
  }

  // After the LLN part, if there is one, has been made in `target`: adds the block-diagonal part
  // (or softmax) and stores the rows.
  void finish(const KeyHead& keys, const QueryHead& head, Range range, const Product& target,
              const ForwardTiles& tiles) const {
    if (p_.kind != Kind::lln) add_diag(keys, head, range, target, tiles);
    if (direct_) return;
    store_tile(rows(head), range.size(), range.begin, tiles.rows, dims_.dvp);
  }

 private:
  void add_diag(const KeyHead& keys, const QueryHead& head, Range range, Product target,
                const ForwardTiles& tiles) const {
    const ScoreHead scores = head.scores(call_, keys, dims_, tiles.scores[0]);
    const auto weight = [&](std::int64_t row) { return head.row_weight(diag_weight_, row); };
    if (per_channel_) target = {tiles.diag, dims_.dvp};
    target.accumulate = p_.has_lln() && !per_channel_;
    target.row_factor = nullptr;
    for_each_block(scores, range, [&](Range part, const Block& block) HWY_ATTR {
      const std::int64_t first = part.begin - range.begin;
      const Product to = target.below(first);
      if (pairs_ && softmax_rows_pairs(scores, part, block.keys, weight, to, width())) return;
      softmax_rows(scores, part, block.keys, weight, to, width(), tiles.spare + first * dims_.dvp);
    });
    if (!per_channel_) return;
    head.load_channels(lln_weight_, dims_, tiles.lln_channel);
    head.load_channels(diag_weight_, dims_, tiles.diag_channel);
    for (std::int64_t i = 0; i < range.size(); ++i) {
      float* const row = tiles.rows + i * dims_.dvp;
      add_part(row, row, tiles.lln_channel, head.row_weight(lln_weight_, range.begin + i),
               dims_.dvp, false);
      add_part(row, tiles.diag + i * dims_.dvp, tiles.diag_channel, 1.0F, dims_.dvp, true);
    }
  }

  const Call& call_;
  const Problem& p_;
  const Dims& dims_;
  PartWeight lln_weight_, diag_weight_;
  bool per_channel_;
  bool direct_;
  bool pairs_;
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
