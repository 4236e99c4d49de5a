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
#include "lln_torch/zoo/log_features.h"
#include "lln_torch/zoo/precision.h"

namespace lln_torch {
namespace {

constexpr double kLeastScale = 1e-3, kLargestScale = 1e3;
// With so many sequences and heads at most a pass over short keys leaves much of a device free for
// other work: half of the 132 multiprocessors of an H200. A guess, not measured.
constexpr std::int64_t kHeadsOfShortPass = 64;
constexpr std::int64_t kMostFeatures = 256;  // channels of q and k that the core takes

// [heads, channels, features]: random rotations side by side, the last one cut, so that features
// are as large as channels. Drawn as torch draws parameters.
Tensor draw_rotations(std::int64_t heads, std::int64_t channels, std::int64_t features) {
  const std::int64_t blocks = (features + channels - 1) / channels;
  const auto [orthogonal, upper] =
      at::linalg_qr(at::randn({heads, blocks, channels, channels}, at::kDouble));
  // The signs make Q uniform over rotations; without them it depends on the algorithm.
  const Tensor q = orthogonal * upper.diagonal(0, -2, -1).sign().unsqueeze(-2);
  const Tensor all = q.permute({0, 2, 1, 3}).reshape({heads, channels, blocks * channels});
  return all.narrow(-1, 0, features).to(at::kFloat).contiguous();
}

// x [batch, heads, tokens, channels] times a matrix of each head: one product a head over all
// tokens of the batch, without a copy of x as it comes from a projection.
Tensor times_of_head(const Tensor& x, const Tensor& matrices) {
  const Tensor rows = x.transpose(0, 1).reshape({x.size(1), x.size(0) * x.size(2), x.size(3)});
  return at::bmm(rows, matrices)
      .view({x.size(1), x.size(0), x.size(2), matrices.size(2)})
      .transpose(0, 1);
}

// Less the mean over the tokens that count, of each head and channel.
Tensor centred(const Tensor& k, const Tensor& key_mask) {
  const Tensor numbers = at_least_f32(k);
  Tensor mean;
  if (key_mask.defined()) {
    const Tensor count = key_mask.sum(1).clamp_min(1).view({-1, 1, 1, 1});
    mean = zero_padding(numbers, key_mask).sum(2, true) / count;
  } else {
    mean = numbers.mean(2, true);
  }
  return (numbers - mean).to(k.scalar_type());
}

// The scales that running moments say, [heads] each. Nothing of q and k is read but their shape.
std::pair<Tensor, Tensor> running_scales(const Tensor& running, std::int64_t channels) {
  const Tensor q =
      at::zeros({1, running.size(1), 1, channels}, running.options().dtype(at::kFloat));
  const auto [alpha, beta] =
      match_moments(q, q, {.mode = "ema", .running = running.to(at::kDouble)});
  return {alpha.squeeze(0), beta.squeeze(0)};
}

}  // namespace

Tensor carrying(const Tensor& x, const Tensor& scale) {
  const Tensor one = scale / scale.detach();
  return x * one.to(x.scalar_type()).view({1, -1, 1, 1});
}

LlnAttention::LlnAttention(const AttentionConfig& config, const Settings& options,
                           std::string feature)
    : ProjectedAttention(config, options), feature_(std::move(feature)) {
  const bool one_map = !feature_.empty();
  features_ = channels();
  read_feature(options);
  if (one_map) return;
  read_variants(options);
  read_matching(options);
}

void LlnAttention::read_feature(const Settings& options) {
  if (feature_.empty()) {
    feature_ = options.choice("feature", "exp", {"exp", "elu", "relu", "softplus", "power"});
  }
  if (feature_ == "power") {
    feature_ = fmt::format("power{}", options.number("power", 2, 0.1, 16));
  }
}

void LlnAttention::read_variants(const Settings& options) {
  centred_keys_ = options.flag("centred_keys", false);
  const std::int64_t wide = options.integer("wide", 0, 0, kMostFeatures);
  two_sided_ = options.flag("two_sided", false);
  const bool contrast = options.choice("chain", "none", {"none", "contrast"}) == "contrast";
  const auto needs_all = [&](bool asked, const char* key, const char* off) {
    if (!asked || !config().causal) return;
    options.refuse(key, fmt::format("{}: it is for bidirectional attention alone", off));
  };
  needs_all(centred_keys_, "centred_keys", "false");
  needs_all(wide != 0, "wide", "0");
  needs_all(two_sided_, "two_sided", "false");
  needs_all(contrast, "chain", "\"none\"");
  if (wide != 0) {
    features_ = wide;
    wide_ = register_parameter("wide", draw_rotations(config().heads, channels(), wide));
  }
  if (two_sided_) features_ *= 2;
  if (two_sided_ && features_ > kMostFeatures) {
    options.refuse("two_sided", fmt::format("false with {} features of one side: {} in all at most",
                                            features_ / 2, kMostFeatures));
  }
  if (contrast) chain_ = register_parameter("chain", at::zeros({config().heads}));
}

bool LlnAttention::varied() const {
  return centred_keys_ || two_sided_ || wide_.defined() || chain_.defined();
}

LlnAttention::Projected LlnAttention::mapped(const Projected& projected,
                                             const Tensor& key_mask) const {
  Projected all = projected;
  if (centred_keys_) all.k = centred(all.k, key_mask);
  for (Tensor* x : {&all.q, &all.k}) {
    if (wide_.defined()) *x = times_of_head(*x, wide_);
    if (two_sided_) *x = at::cat({*x, -*x}, -1);
  }
  return all;
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
  if (matching_ == "ema") return running_scales(running_, features_);
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

bool LlnAttention::matches_each_call() const {
  return matching_ != "none" && matching_ != "learned" && matching_ != "frozen" &&
         matching_ != "ema";
}

AttentionCall LlnAttention::call(const Tensor& key_mask) const {
  AttentionCall call{.causal = config().causal, .feature = feature_, .key_mask = key_mask};
  if (matching_ == "none") {
    call.fixed_alpha = call.fixed_beta = 1;
  } else if (matches_each_call()) {
    call.matching = matching_;
  } else {
    std::tie(call.alpha, call.beta) = fixed_scales();
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
    update_joined(running, moments.q, moments.k, features_, ema_decay_);
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
  AttentionCall step = call(key_mask);
  Projected inputs = mapped({q, k, v}, key_mask);
  if (features_outside(q, context)) {
    inputs.q = log_features(feature_, inputs.q, step.alpha);
    inputs.k = log_features(feature_, inputs.k, step.beta);
    step.feature = "exp";
    step.alpha = step.beta = Tensor();
    step.fixed_alpha = step.fixed_beta = 1;
  } else if (scales_outside(q, context)) {
    inputs.q = carrying(inputs.q, step.alpha);
    inputs.k = carrying(inputs.k, step.beta);
    step.alpha = step.alpha.detach();
    step.beta = step.beta.detach();
  }
  if (!chain_.defined()) return run_call(inputs, step, context);
  if (!step.alpha.defined() && !step.fixed_alpha) {  // matched once for both steps
    std::tie(step.alpha, step.beta) = match(inputs.q, inputs.k, step);
  }
  const Tensor once = run_call(inputs, step, context);
  const Tensor twice = attention(inputs.q, inputs.k, once, step);
  const Tensor share = at::sigmoid(at_least_f32(chain_)).view({1, -1, 1, 1});
  return (once + share * (once - twice)).to(once.scalar_type());
}

bool LlnAttention::features_outside(const Tensor& q, const Context& context) const {
  return feature_ != "exp" && q.is_cuda() && q.element_size() == 2 && context.pieces == nullptr;
}

bool LlnAttention::scales_outside(const Tensor& q, const Context& context) const {
  return matching_ == "learned" && q.is_cuda() && q.scalar_type() == at::kHalf &&
         context.pieces == nullptr && at::GradMode::is_enabled();
}

LlnAttention::Beside LlnAttention::begin_beside(const Projected& projected, const Tensor& key_mask,
                                                const Context& context) {
  const auto& [q, k, v] = projected;
  Beside beside;
  if (varied() || feature_ != "exp" || config().causal || context.pieces != nullptr ||
      matching_ == "learned") {
    return beside;
  }
  const std::int64_t tokens = q.size(2), numbers_of_state = channels() * (channels() + 1);
  if (at::GradMode::is_enabled() && numbers_of_state > tokens &&
      q.size(0) * q.size(1) <= kHeadsOfShortPass) {
    beside.state_again = std::make_shared<StateAgain>();
  }
  if (!matches_each_call()) return beside;
  const auto options = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  beside.alpha = at::empty({q.size(0), q.size(1)}, options);
  beside.beta = at::empty({k.size(0), k.size(1)}, options);
  beside.work.emplace(q.device());
  beside.work->run([&] {
    match_into(beside.alpha, beside.beta, q, k,
               {.mode = matching_, .tokens = {.key_mask = key_mask}});
  });
  return beside;
}

Tensor LlnAttention::attend_both(const Projected& projected, const Beside& beside, const Tensor& x,
                                 const Tensor& key_mask, Context& context) {
  // Diag is of q and k as they are.
  if (varied() || features_outside(projected.q, context) || scales_outside(projected.q, context)) {
    return ProjectedAttention::attend_both(projected, beside, x, key_mask, context);
  }
  AttentionCall both = call(key_mask);
  if (beside.alpha.defined()) {
    both.alpha = beside.alpha;
    both.beta = beside.beta;
  }
  both.state_again = beside.state_again;
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
  if (varied()) {
    const at::NoGradGuard no_graph;
    const Projected inputs = mapped({observation.q, observation.k, {}}, observation.key_mask);
    observation.q = inputs.q;
    observation.k = inputs.k;
  }
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

constexpr const char* kMatchingParameters = "none; matching = learned: 2 H, wide: dim F, chain: H";
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
