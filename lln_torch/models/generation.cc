// The memories of layers, and the choice of a token.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/models/generation.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lln/error.h"
#include "lln_torch/ops/decode.h"
#include "lln_torch/zoo/lln.h"

namespace lln_torch {
namespace {

// LLN and LLN+Diag: the core's state. Two weights that do not sum to 1 need the two parts apart,
// each in a state of its own.
class StateMemory : public LayerMemory {
 public:
  StateMemory(LlnAttention& attention, std::int64_t rows, const at::Device& device)
      : attention_(attention) {
    const bool apart = attention.diag() == "scales";
    std::tie(options_.alpha, options_.beta) = attention.fixed_scales();
    options_.batch = rows;
    options_.heads = attention.config().heads;
    options_.dim = attention.channels();
    options_.feature = attention.feature();
    options_.device = device;
    options_.diag_block = apart ? 0 : attention.diag_block();
    states_.emplace_back(options_);
    if (apart) {
      options_.diag_block = attention.diag_block();
      options_.fixed_mix = 0;
      states_.emplace_back(options_);
    }
  }

  Tensor attend(const Tensor& x, Context& context) override {
    const auto [q, k, v] = attention_.project(x, context);
    const ProjectedAttention::PartWeights weights = attention_.diag_block() == 0
                                                        ? ProjectedAttention::PartWeights{}
                                                        : attention_.part_weights(x);
    Tensor o;
    if (states_.size() == 1) {
      o = extend(states_[0], q, k, v, weights.far);
    } else {
      o = weights.far.unsqueeze(1) * extend(states_[0], q, k, v, {}) +
          weights.near.unsqueeze(1) * extend(states_[1], q, k, v, {});
    }
    return attention_.project_output(o.to(x.scalar_type()));
  }

  std::int64_t bytes() const override {
    return std::accumulate(states_.begin(), states_.end(), std::int64_t{0},
                           [](std::int64_t sum, const DecodeState& s) { return sum + s.bytes(); });
  }

 private:
  static Tensor extend(DecodeState& state, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& mix) {
    return q.size(2) == 1 ? state.step(q, k, v, mix) : state.append(q, k, v, mix);
  }

  LlnAttention& attention_;
  DecodeOptions options_;
  std::vector<DecodeState> states_;
};

// Softmax and softmax+diag: all keys and values, in memory that doubles when it is full.
class KeyValueMemory : public LayerMemory {
 public:
  explicit KeyValueMemory(ProjectedAttention& attention) : attention_(attention) {}

  Tensor attend(const Tensor& x, Context& context) override {
    const auto [q, k, v] = attention_.project(x, context);
    const std::int64_t first = tokens_;
    keep(k, v);
    const Tensor keys = keys_.narrow(2, 0, tokens_), values = values_.narrow(2, 0, tokens_);
    const Tensor key = at::arange(tokens_, x.options().dtype(at::kLong));  // [keys]
    const Tensor row = key.narrow(0, first, q.size(2)).unsqueeze(1);       // [rows, 1]
    const Tensor past = key.le(row);
    Tensor o = at::scaled_dot_product_attention(q, keys, values, past, 0.0, false,
                                                attention_.score_scale());
    if (const std::int64_t block = attention_.diag_block(); block > 0) {
      const Tensor begin = at::floor_divide(row, block) * block;
      const Tensor inside = past.logical_and(key.ge(begin));
      const Tensor near = at::scaled_dot_product_attention(q, keys, values, inside);
      o = join(o, near, attention_.part_weights(x));
    }
    return attention_.project_output(o.to(x.scalar_type()));
  }

  std::int64_t bytes() const override {
    return keys_.defined() ? static_cast<std::int64_t>(keys_.nbytes() + values_.nbytes()) : 0;
  }

 private:
  static Tensor join(const Tensor& far, const Tensor& near,
                     const ProjectedAttention::PartWeights& weights) {
    if (!weights.far.defined()) return 0.5 * (far + near);
    const std::int64_t axis = weights.far.dim() == 2 ? 1 : -1;
    const Tensor share = weights.far.unsqueeze(axis);
    return share * far + (weights.near.defined() ? weights.near.unsqueeze(axis) : 1 - share) * near;
  }

  void keep(const Tensor& k, const Tensor& v) {
    const std::int64_t more = k.size(2);
    const std::int64_t room = keys_.defined() ? keys_.size(2) : 0;
    if (tokens_ + more > room) {
      std::vector<std::int64_t> shape = k.sizes().vec();
      shape[2] = std::max<std::int64_t>(2 * room, tokens_ + more);
      Tensor keys = at::empty(shape, k.options()), values = at::empty(shape, v.options());
      if (tokens_ > 0) {
        keys.narrow(2, 0, tokens_).copy_(keys_.narrow(2, 0, tokens_));
        values.narrow(2, 0, tokens_).copy_(values_.narrow(2, 0, tokens_));
      }
      keys_ = keys;
      values_ = values;
    }
    keys_.narrow(2, tokens_, more).copy_(k);
    values_.narrow(2, tokens_, more).copy_(v);
    tokens_ += more;
  }

  ProjectedAttention& attention_;
  Tensor keys_, values_;  // [rows, heads, room, channels]
  std::int64_t tokens_ = 0;
};

bool is_softmax(const Attention& attention) {
  const auto* projected = dynamic_cast<const ProjectedAttention*>(&attention);
  return projected != nullptr &&
         std::string_view(find_attention(projected->config().name).name).starts_with("softmax");
}

WordModel& causal_model(Model& model) {
  auto* words = dynamic_cast<WordModel*>(&model);
  if (words == nullptr || !words->body().config().causal) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     "the model predicts no next token: expected a decoder (task lm)");
  }
  return *words;
}

}  // namespace

Generation::Generation(Model& model, std::int64_t rows) : model_(causal_model(model)), rows_(rows) {
  const at::NoGradGuard no_grad;
  Stack& stack = model_.body().stack();
  const at::Device device = model_.body().token_weight().device();
  for (std::int64_t number = 0; number < stack.size(); ++number) {
    Attention& attention = stack.layer(number).attention();
    if (auto* lln = dynamic_cast<LlnAttention*>(&attention)) {
      memories_.push_back(std::make_unique<StateMemory>(*lln, rows, device));
    } else if (is_softmax(attention)) {
      memories_.push_back(
          std::make_unique<KeyValueMemory>(dynamic_cast<ProjectedAttention&>(attention)));
      memory_kind_ = "keys and values";
    } else {
      memories_.clear();
      memory_kind_ = "whole row";
      return;
    }
  }
}

Tensor Generation::append(const Tensor& ids) {
  if (ids.dim() != 2 || ids.size(0) != rows_ || ids.size(1) < 1) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("expected ids [{}, tokens] with at least one token", rows_));
  }
  const at::NoGradGuard no_grad;
  Context context;
  Tensor x;
  if (memories_.empty()) {
    seen_ = seen_.defined() ? at::cat({seen_, ids}, 1) : ids;
    x = model_.body().forward(seen_, {}, {}, context);
  } else {
    x = model_.body().continue_rows(ids, tokens_, memories_, context);
  }
  tokens_ += ids.size(1);
  return model_.word_scores(x.select(1, x.size(1) - 1)).to(at::kFloat);
}

std::int64_t Generation::most_tokens() const {
  const BodyConfig& config = model_.body().config();
  return memories_.empty() || config.positions == "learned" ? config.max_tokens : 0;
}

std::int64_t Generation::bytes() const {
  std::int64_t sum = seen_.defined() ? static_cast<std::int64_t>(seen_.nbytes()) : 0;
  for (const auto& memory : memories_) sum += memory->bytes();
  return sum;
}

std::int64_t sample_token(const Tensor& scores, const SamplingOptions& options,
                          std::mt19937_64& random) {
  const Tensor host = scores.to(at::kCPU, at::kFloat).contiguous();
  const float* score = host.const_data_ptr<float>();
  std::vector<std::int64_t> order(static_cast<std::size_t>(host.numel()));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const bool greedy = options.temperature <= 0;
  const std::size_t kept = greedy              ? 1
                           : options.top_k > 0 ? std::min(order.size(), std::size_t(options.top_k))
                                               : order.size();
  // Of equal scores the smaller id comes first.
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      return score[a] != score[b] ? score[a] > score[b] : a < b;
                    });
  if (greedy) return order.front();
  std::vector<double> sums;
  double sum = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    sum += std::exp((double{score[order[i]]} - double{score[order[0]]}) / options.temperature);
    sums.push_back(sum);
  }
  // 53 random bits: std::uniform_real_distribution may differ between libraries.
  const double at = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
  const auto found = std::upper_bound(sums.begin(), sums.end(), at);
  return order[std::min<std::size_t>(static_cast<std::size_t>(found - sums.begin()), kept - 1)];
}

}  // namespace lln_torch
