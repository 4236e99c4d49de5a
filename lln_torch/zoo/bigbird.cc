// BigBird: blocks of tokens see their window of three blocks, the global blocks at the front and a
// few random blocks, in one softmax; global blocks see everything. The random plan is drawn once
// for each layer and head. Only blocks that are seen are computed.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/random_plan.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// int64 [heads, blocks, random]: for every block that many different ones that neither its window
// nor the global blocks hold, -1 where there are no more.
Tensor bigbird_plan(const AttentionConfig& config, std::int64_t blocks, std::int64_t global,
                    std::int64_t random) {
  const at::Generator generator = plan_generator(config, 0);
  Tensor plan = at::full({config.heads, blocks, random}, -1, at::kLong);
  auto entries = plan.accessor<std::int64_t, 3>();
  for (std::int64_t head = 0; head < config.heads; ++head) {
    for (std::int64_t i = 0; i < blocks; ++i) {
      const Tensor order = at::randperm(blocks, generator, at::TensorOptions(at::kLong));
      const auto candidates = order.accessor<std::int64_t, 1>();
      std::int64_t found = 0;
      for (std::int64_t at = 0; at < blocks && found < random; ++at) {
        const std::int64_t j = candidates[at];
        if (j >= global && std::abs(i - j) > 1) entries[head][i][found++] = j;
      }
    }
  }
  return plan;
}

class BigBirdAttention : public ProjectedAttention {
 public:
  BigBirdAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        block_(options.integer("block", 64, 1, 1 << 20)),
        global_(options.integer("global_blocks", 2, 0, 1 << 20)) {
    const std::int64_t random = options.integer("random_blocks", 3, 0, 1 << 10);
    const std::int64_t blocks = (config.max_tokens + block_ - 1) / block_;
    plan_ = register_buffer("plan", bigbird_plan(config, blocks, global_, random));
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const std::int64_t tokens = q.size(2);
    check_tokens(config(), tokens);
    const Alignment alignment(key_mask);
    const Tensor rows = alignment.to_front(q), keys = alignment.to_front(k);
    const Tensor values = alignment.to_front(zero_padding(v, key_mask));
    const Tensor& counts = alignment.key_mask();
    const std::int64_t first = std::min(global_ * block_, tokens);
    std::vector<Tensor> parts;
    if (first > 0) {
      parts.push_back(full_attention(rows.narrow(2, 0, first), keys, values, counts));
    }
    if (first < tokens) parts.push_back(sparse_rows(rows, keys, values, counts));
    return alignment.back(parts.size() == 1 ? parts.front() : at::cat(parts, 2));
  }

 private:
  // The rows behind the global blocks.
  Tensor sparse_rows(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& counts) {
    const std::int64_t tokens = q.size(2);
    const Tensor row_blocks = in_blocks(q, 2, block_);
    const std::int64_t blocks = row_blocks.size(2), rest = blocks - global_;
    const Tensor plan =  // [heads, rest, random]; Module::to converts integers too
        plan_.narrow(1, global_, rest).to(at::kLong);
    const Tensor mask = seen_tokens(counts, plan, tokens, q);
    const Tensor o = block_attention(row_blocks.narrow(2, global_, rest), seen_blocks(k, plan),
                                     seen_blocks(v, plan), mask);
    return o.flatten(2, 3).narrow(2, 0, tokens - global_ * block_);
  }

  // The blocks of the plan: x [batch, heads or 1, blocks, ..] -> [batch, heads, rest, random, ..]
  static Tensor random_blocks(const Tensor& x, const Tensor& plan) {
    const std::int64_t heads = plan.size(0);
    const Tensor head = at::arange(x.size(1) == 1 ? 1 : heads, plan.options()).view({-1, 1, 1});
    return x.index({at::indexing::Slice(), head, plan.clamp(0, x.size(2) - 1)});
  }

  // x [batch, heads, tokens, channels] -> [batch, heads, rest, keys, channels]: window, global and
  // random blocks.
  Tensor seen_blocks(const Tensor& x, const Tensor& plan) const {
    const Tensor all = in_blocks(x, 2, block_);
    const std::int64_t rest = plan.size(1);
    const Tensor window = with_neighbours(all, 2, 1, 1).narrow(2, global_, rest);
    const Tensor front = all.narrow(2, 0, global_).flatten(2, 3).unsqueeze(2);
    return at::cat(
        {window, front.expand({-1, -1, rest, -1, -1}), random_blocks(all, plan).flatten(3, 4)}, 3);
  }

  // bool [batch or 1, heads, rest, 1, keys]: which of seen_blocks() count, none of them twice.
  Tensor seen_tokens(const Tensor& counts, const Tensor& plan, std::int64_t tokens,
                     const Tensor& like) const {
    const auto options = like.options().dtype(at::kBool);
    const std::int64_t heads = plan.size(0), rest = plan.size(1);
    const Tensor real = counts.defined() ? counts : at::ones({1, tokens}, options);
    const Tensor all = in_blocks(real, 1, block_).unsqueeze(1);  // [batch or 1, 1, blocks, block]
    // The window of the first of these blocks reaches into the global ones.
    Tensor local = all.clone();
    local.narrow(2, 0, global_).fill_(false);
    const Tensor window = with_neighbours(local, 2, 1, 1).narrow(2, global_, rest);
    const Tensor front = all.narrow(2, 0, global_).flatten(2, 3).unsqueeze(2);
    const Tensor planned = plan.ge(0).logical_and(plan.lt(all.size(2))).unsqueeze(-1);
    const Tensor random = random_blocks(all, plan).logical_and(planned).flatten(3, 4);
    const std::int64_t batch = real.size(0);
    return at::cat({window.expand({batch, heads, -1, -1}), front.expand({batch, heads, rest, -1}),
                    random.expand({batch, heads, -1, -1})},
                   3)
        .unsqueeze(3);
  }

  std::int64_t block_, global_;
  Tensor plan_;
};

std::shared_ptr<Attention> make_bigbird(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<BigBirdAttention>(config, options);
}

}  // namespace

ZooEntry bigbird_entry() {
  return {.name = "bigbird",
          .summary = "softmax over 3 blocks of 64, the first global_blocks (2), random_blocks (3)",
          .cost = "time N b (3 + g + r) D, memory N D (3 + g + r)",
          .parameters = "none; the buffer plan [H, max_tokens / b, r]",
          .padding = "masked keys; blocks are counted from the first token that counts",
          .causal = false,
          .takes_diag = true,
          .make = make_bigbird};
}

}  // namespace lln_torch
