// Block-diagonal softmax attention: the near part of every combination, and an attention by itself,
// the control of every experiment with LLN+Diag.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/attention.h"
#include "lln_torch/parallel/sequence_attention.h"
#include "lln_torch/zoo/attention.h"

namespace lln_torch {
namespace {

class DiagAttention : public ProjectedAttention {
 public:
  DiagAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options, {.takes_diag = false}),
        block_(options.integer("diag_block", kDiagBlock, 1, kLargestDiagBlock)) {}
  std::int64_t piece_unit() const override { return block_; }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context& context) override {
    if (context.pieces != nullptr) {
      return attention(q, k, v, {.diag_block = block_, .causal = config().causal, .fixed_mix = 0},
                       *context.pieces);
    }
    return block_diagonal(q, k, v, key_mask, block_, config().causal);
  }
  void describe(Observation& observation) const override {
    observation.kind = "diag" + std::to_string(block_);
  }

 private:
  std::int64_t block_;
};

std::shared_ptr<Attention> make_diag(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<DiagAttention>(config, options);
}

}  // namespace

Tensor block_diagonal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                      std::int64_t block, bool causal) {
  return attention(q, k, v,
                   {.diag_block = block, .causal = causal, .fixed_mix = 0, .key_mask = key_mask});
}

ZooEntry diag_entry() {
  return {.name = "diag",
          .summary = "softmax attention inside blocks of diag_block tokens (64), nothing across",
          .cost = "time N b D, memory N D",
          .parameters = "none",
          .padding = "masked keys; blocks are counted from the first token that counts",
          .causal = true,
          .takes_diag = false,
          .make = make_diag};
}

}  // namespace lln_torch
