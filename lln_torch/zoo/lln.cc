// Where alpha and beta come from in each mode, and the one op that does the rest.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/lln.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lln/calibration.h"
#include "lln/error.h"
#include "lln_torch/ops/matching.h"
#include "lln_torch/ops/pieces.h"
#include "lln_torch/parallel/sequence_attention.h"

namespace lln_torch {
namespace {

constexpr double kLeastScale = 1e-3, kLargestScale = 1e3;

// The scales that running moments say, [heads] each. Nothing of q and k is read but their shape.
std::pair<Tensor, Tensor> running_scales(const Tensor& running, std::int64_t channels) {
  const Tensor q =
      at::zeros({1, running.size(1), 1, channels}, running.options().dtype(at::kFloat));
  const auto [alpha, beta] =
      match_moments(q, q, {.mode = "ema", .running = running.to(at::kDouble)});
  return {alpha.squeeze(0), beta.squeeze(0)};
}

}  // namespace

LlnAttention::LlnAttention(const AttentionConfig& config, const Settings& options,
                           std::string feature)
    : ProjectedAttention(config, options), feature_(std::move(feature)) {
  const bool one_map = !feature_.empty();
  read_feature(options);
  if (!one_map) read_matching(options);
}

void LlnAttention::read_feature(const Settings& options) {
  if (feature_.empty()) {
    feature_ = options.choice("feature", "exp", {"exp", "elu", "relu", "softplus", "power"});
  }
  if (feature_ == "power") {
    feature_ = fmt::format("power{}", options.number("power", 2, 0.1, 16));
  }
}

void LlnAttention::read_matching(const Settings& options) {
  const bool exponential = feature_ == "exp";
  std::vector<std::string> modes = {"none", "learned", "frozen"};
  if (exponential) modes.insert(modes.begin(), "ema");
  // The rest read the whole sequence.
  if (exponential && !config().causal) {
    modes.insert(modes.begin(), {"per_head", "exact", "entropy", "paper"});
  }
  matching_ = options.choice("matching", modes.front(), modes);
  const auto per_head = [&](double value) { return at::full({config().heads}, value); };
  if (matching_ == "ema") {
    ema_decay_ = options.number("ema_decay", 0.99, 0, 1);
    running_ = register_buffer("running", new_running_moments(config().heads));
  }
  if (matching_ != "learned" && matching_ != "frozen") return;
  const std::string calibration = matching_ == "frozen" ? options.text("calibration", "") : "";
  if (!calibration.empty()) return read_calibration(calibration);
  const double alpha = options.number("alpha", 2, kLeastScale, kLargestScale);
  const double beta = options.number("beta", 2, kLeastScale, kLargestScale);
  if (matching_ == "learned") {
    log_alpha_ = register_parameter("log_alpha", per_head(alpha).log());
    log_beta_ = register_parameter("log_beta", per_head(beta).log());
  } else {
    alpha_ = register_buffer("alpha", per_head(alpha));
    beta_ = register_buffer("beta", per_head(beta));
  }
}

void LlnAttention::read_calibration(const std::string& file) {
  const lln::CalibratedLayer layer =
      lln::load_calibration(file).layer(fmt::format("layer.{}", config().layer));
  alpha_ = register_buffer("alpha", at::ones({config().heads}));
  beta_ = register_buffer("beta", at::ones({config().heads}));
  const auto scales = [](const std::vector<float>& values) { return at::tensor(values); };
  set_frozen_scales(scales(layer.alpha), scales(layer.beta));
}

std::pair<Tensor, Tensor> LlnAttention::fixed_scales() const {
  if (matching_ == "learned") return {log_alpha_.exp(), log_beta_.exp()};
  if (matching_ == "frozen") return {alpha_, beta_};
  if (matching_ == "ema") return running_scales(running_, channels());
  if (matching_ == "none") {
    const Tensor ones =
        at::ones({config().heads}, parameters().front().options().dtype(at::kFloat));
    return {ones.detach(), ones.detach()};
  }
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   fmt::format("matching \"{}\" takes alpha and beta from the whole sequence; "
                               "none, ema, learned and frozen have them before it",
                               matching_));
}

void LlnAttention::set_frozen_scales(const Tensor& alpha, const Tensor& beta) {
  if (matching_ != "frozen") {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("matching is \"{}\", expected \"frozen\"", matching_));
  }
  for (const Tensor* scale : {&alpha, &beta}) {
    if (scale->dim() == 1 && scale->size(0) == config().heads) continue;
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("a scale has shape [{}], expected [{}], one for each head",
                                 fmt::join(scale->sizes(), ", "), config().heads));
  }
  const at::NoGradGuard no_graph;
  alpha_.copy_(alpha);
  beta_.copy_(beta);
}

AttentionCall LlnAttention::call(const Tensor& key_mask) const {
  AttentionCall call{.causal = config().causal, .feature = feature_, .key_mask = key_mask};
  if (matching_ == "none") {
    call.fixed_alpha = call.fixed_beta = 1;
  } else if (matching_ == "learned" || matching_ == "frozen" || matching_ == "ema") {
    std::tie(call.alpha, call.beta) = fixed_scales();
  } else {
    call.matching = matching_;
  }
  return call;
}

void LlnAttention::update_running(const Tensor& q, const Tensor& k, const Tensor& key_mask,
                                  const Context& context) {
  if (matching_ != "ema" || !is_training()) return;
  const at::NoGradGuard no_graph;
  // A model that was moved to another type has its running moments in that type.
  Tensor running = running_.to(at::kDouble);
  if (context.pieces != nullptr) {
    const PieceMoments moments = join_moments(q, k, *context.pieces);
    running = running.to(at::kCPU);
    update_joined(running, moments.q, moments.k, channels(), ema_decay_);
  } else {
    update_moments(running, q, k, {.key_mask = key_mask}, ema_decay_);
  }
  if (!running.is_same(running_)) running_.copy_(running);
}

Tensor LlnAttention::run_call(const Projected& projected, const AttentionCall& call,
                              const Context& context) {
  const auto& [q, k, v] = projected;
  Tensor o;
  if (context.pieces != nullptr) {
    AttentionCall of_piece = call;
    of_piece.key_mask = Tensor();  // the pieces have it
    o = attention(q, k, v, of_piece, *context.pieces);
  } else {
    o = attention(q, k, v, call);
  }
  update_running(q, k, call.key_mask, context);
  return o;
}

Tensor LlnAttention::attend(const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& key_mask, Context& context) {
  return run_call({q, k, v}, call(key_mask), context);
}

Tensor LlnAttention::attend_both(const Projected& projected, const Tensor& x,
                                 const Tensor& key_mask, Context& context) {
  AttentionCall both = call(key_mask);
  if (diag_block() == 0) return run_call(projected, both, context);
  both.diag_block = diag_block();
  const PartWeights weights = part_weights(x);
  if (weights.near.defined()) {
    both.lln_weight = weights.far;
    both.diag_weight = weights.near;
  } else {
    both.mix = weights.far;
  }
  return run_call(projected, both, context);
}

void LlnAttention::describe(Observation& observation) const {
  observation.kind = feature_ == "exp" ? "lln" : feature_;
  const AttentionCall settings = call(observation.key_mask);
  if (settings.alpha.defined()) {
    observation.alpha = settings.alpha.detach().unsqueeze(0);
    observation.beta = settings.beta.detach().unsqueeze(0);
  } else if (settings.fixed_alpha) {
    const auto [alpha, beta] = fixed_scales();
    observation.alpha = alpha.unsqueeze(0);
    observation.beta = beta.unsqueeze(0);
  } else {
    const at::NoGradGuard no_graph;
    std::tie(observation.alpha, observation.beta) = match(observation.q, observation.k, settings);
  }
}

namespace {

std::shared_ptr<Attention> make_lln(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LlnAttention>(config, options);
}

constexpr const char* kMatchingParameters = "none; matching = learned: 2 H";
constexpr const char* kLlnPadding = "masked keys; padding is not in the moments";

}  // namespace

ZooEntry lln_entry() {
  return {.name = "lln",
          .summary = "sum_l exp(alpha q_l + beta k_l), rows normalised; alpha, beta by matching",
          .cost = "time N D^2, memory N D",
          .parameters = kMatchingParameters,
          .padding = kLlnPadding,
          .causal = true,
          .takes_diag = true,
          .make = make_lln};
}

ZooEntry lln_diag_entry() {
  return {.name = "lln+diag",
          .summary = "w lln + (1 - w) diag in one pass; w = 0.5, learned or gated",
          .cost = "time N D^2 + N b D, memory N D",
          .parameters = "as lln; diag = learned: dim, scales: 2 dim, gate: H dim + H",
          .padding = "as lln; blocks are counted from the first token that counts",
          .causal = true,
          .takes_diag = true,
          .make = make_lln};
}

}  // namespace lln_torch
