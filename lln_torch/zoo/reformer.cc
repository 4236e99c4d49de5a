// Reformer: queries are keys, random rotations hash them into buckets, tokens sorted by bucket are
// cut into chunks, and a chunk attends to itself and the one before it. Rounds with other rotations
// are joined by the sums of their exponentials.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/random_plan.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// A token is its own nearest key, which says nothing: it looks at itself only where it sees no
// other.
constexpr double kSelfScore = -5e4;
constexpr double kReformerHidden = std::numeric_limits<float>::lowest();

// Scores are q_i . q_j / |q_j|, of the size of q . k / sqrt D.
class ReformerAttention : public ProjectedAttention {
 public:
  ReformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options, {.shared_qk = true}),
        chunk_(options.integer("chunk", 64, 1, 1 << 20)) {
    const std::int64_t rounds = options.integer("rounds", 2, 1, 1 << 10);
    // As many buckets as chunks of the longest sequence: their number must not move with padding.
    const std::int64_t chunks = (config.max_tokens + chunk_ - 1) / chunk_;
    const std::int64_t buckets =
        options.integer("buckets", std::max<std::int64_t>(2, chunks + chunks % 2), 2, 1 << 20);
    if (buckets % 2 != 0) options.refuse("buckets", "an even number");
    rotations_ = register_buffer(
        "rotations", at::randn({config.heads, rounds, channels(), buckets / 2},
                               plan_generator(config, 0), at::TensorOptions(at::kFloat)));
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor&, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const Tensor order = sorted_places(q, key_mask);  // [batch, heads, rounds, tokens]
    const std::int64_t tokens = q.size(2), chunk = std::min(chunk_, tokens);
    const std::int64_t before = tokens > chunk ? 1 : 0;
    const auto sorted = [&](const Tensor& x) {
      const Tensor each = x.unsqueeze(2).expand({-1, -1, order.size(2), -1, -1});
      return in_blocks(each.gather(3, order.unsqueeze(-1).expand_as(each)), 3, chunk);
    };
    const Tensor rows = sorted(q);  // [batch, heads, rounds, chunks, chunk, channels]
    const Tensor unit = rows / rows.norm(2, -1, true).clamp_min(1e-12);
    const Tensor keys = with_neighbours(unit, 3, before, 0);
    const Tensor values = with_neighbours(sorted(zero_padding(v, key_mask)), 3, before, 0);
    const Tensor scores = masked(at_least_f32(at::matmul(rows, keys.transpose(-1, -2))), order,
                                 key_mask, chunk, before);
    const Tensor sums = scores.logsumexp(-1, true);
    const Tensor weights = (scores - sums).exp().to(values.scalar_type());

    const Tensor unsort = order.argsort(3, false).unsqueeze(-1);
    const auto in_order = [&](const Tensor& x) {
      const Tensor all = x.flatten(3, 4).narrow(3, 0, tokens);
      return all.gather(3, unsort.expand({-1, -1, -1, -1, all.size(-1)}));
    };
    const Tensor share = at::softmax(in_order(sums), 2);  // of the rounds
    return (share * in_order(at::matmul(weights, values))).sum(2).to(v.scalar_type());
  }

 private:
  // Places by (bucket, place), tokens that do not count last. The bucket is argmax [x R; -x R].
  Tensor sorted_places(const Tensor& q, const Tensor& key_mask) const {
    const at::NoGradGuard no_gradients;
    const WithoutAutocast exact;
    const Tensor x = at_least_f32(q).unsqueeze(2);
    const Tensor turned = at::matmul(x, rotations_.to(x.scalar_type()));
    Tensor buckets = at::cat({turned, -turned}, -1).argmax(-1);
    if (key_mask.defined()) {
      buckets = buckets.masked_fill(key_mask.logical_not().unsqueeze(1).unsqueeze(1),
                                    2 * rotations_.size(3));
    }
    return std::get<1>(buckets.sort(true, 3, false));
  }

  // scores [batch, heads, rounds, chunks, chunk, keys]
  Tensor masked(const Tensor& scores, const Tensor& order, const Tensor& key_mask,
                std::int64_t chunk, std::int64_t before) const {
    // Places count from 1: 0 is what in_blocks and with_neighbours fill up with.
    const Tensor place = order + 1;
    Tensor key_place = place;
    if (key_mask.defined()) {
      const Tensor counts = key_mask.unsqueeze(1).unsqueeze(1).expand_as(order).gather(3, order);
      key_place = place.masked_fill(counts.logical_not(), 0);
    }
    const Tensor row = in_blocks(place, 3, chunk).unsqueeze(-1);
    const Tensor column =
        with_neighbours(in_blocks(key_place, 3, chunk), 3, before, 0).unsqueeze(-2);
    Tensor hidden = column.eq(0);
    if (config().causal) hidden = hidden.logical_or(column.gt(row));
    return scores.masked_fill(row.eq(column), kSelfScore).masked_fill(hidden, kReformerHidden);
  }

  std::int64_t chunk_;
  Tensor rotations_;  // [heads, rounds, channels, buckets / 2]
};

std::shared_ptr<Attention> make_reformer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<ReformerAttention>(config, options);
}

}  // namespace

ZooEntry reformer_entry() {
  return {.name = "reformer",
          .summary = "q = k hashed by random rotations, sorted; chunks see themselves and the last",
          .cost = "time rounds N (c + log N) D, memory rounds N (c + D)",
          .parameters = "no key projection; the buffer rotations [H, rounds, D, buckets / 2]",
          .padding = "sorted last, masked keys",
          .causal = true,
          .takes_diag = true,
          .make = make_reformer};
}

}  // namespace lln_torch
