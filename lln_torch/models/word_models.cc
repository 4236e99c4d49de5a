// Models that predict tokens: masked ones (encoders) and the next ones (decoders). Only rows that
// have a label are multiplied with the vocabulary, which is most of the work of a small model.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <cmath>

#include "lln_torch/models/heads.h"

namespace lln_torch {

std::int64_t predicted_places(std::int64_t rows, std::int64_t tokens, double share) {
  const std::int64_t all = rows * tokens;
  if (share >= 1 || all == 0) return all;
  // A row where chance chooses no token predicts one all the same: in short rows that is many.
  const double n = static_cast<double>(tokens);
  const double mean = static_cast<double>(rows) * (n * share + std::pow(1 - share, n));
  const double bound = mean + 6 * std::sqrt(mean * (1 - share)) + 1;
  return std::min(all, static_cast<std::int64_t>(std::ceil(bound)));
}

Predicted pick_predicted(const Tensor& x, const Tensor& labels, std::int64_t places) {
  const Tensor rows = x.reshape({-1, x.size(-1)});
  const Tensor flat = labels.reshape({-1});
  if (places == 0) {
    const Tensor chosen = at::nonzero(flat != kIgnoredLabel).squeeze(1);
    return {rows.index_select(0, chosen), flat.index_select(0, chosen)};
  }
  if (places >= flat.size(0)) return {rows, flat};
  // The number of a label among those that count is its place; all others share one more place,
  // which is cut off. No shape depends on the labels.
  const Tensor counts = flat != kIgnoredLabel;
  const Tensor place = at::where(counts, counts.cumsum(0) - 1, places).clamp_max(places);
  const at::TensorOptions options = flat.options();
  const Tensor source = at::zeros({places + 1}, options)
                            .scatter(0, place, at::arange(flat.size(0), options))
                            .narrow(0, 0, places);
  const Tensor picked =
      at::full({places + 1}, kIgnoredLabel, options).scatter(0, place, flat).narrow(0, 0, places);
  return {rows.index_select(0, source), picked};
}

Tensor mean_cross_entropy(const Tensor& scores, const Tensor& labels) {
  const Tensor sum = at::cross_entropy_loss(scores.to(at::kFloat), labels, /*weight=*/{},
                                            at::Reduction::Sum, kIgnoredLabel);
  return sum / (labels != kIgnoredLabel).sum().clamp_min(1);
}

WordHead::WordHead(const BodyConfig& body, const HeadConfig& config) : config_(config) {
  if (config.output_transform) {
    transform_ = register_module("transform", torch::nn::Linear(body.dim, body.dim));
    norm_ = register_module(
        "norm",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({body.dim}).eps(body.norm_epsilon)));
    init_linear(*transform_, body.init_std);
  }
  if (config.tied_output) {
    bias_ = register_parameter("bias", at::zeros({body.vocabulary}));
  } else {
    output_ = register_module("output", torch::nn::Linear(body.dim, body.vocabulary));
    init_linear(*output_, body.init_std);
  }
}

Tensor WordHead::forward(const Tensor& x, const Tensor& tied) {
  Tensor input = x;
  if (!transform_.is_empty()) input = norm_(at::gelu(transform_(input)));
  return config_.tied_output ? at::linear(input, tied, bias_) : output_(input);
}

WordModel::WordModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention)
    : share_(head.predicted_share) {
  body_ = register_module("body", std::make_shared<TextBody>(body, attention));
  head_ = register_module("head", std::make_shared<WordHead>(body, head));
}

ModelOutput WordModel::run(const TensorBatch& batch, Context& context) {
  const Tensor x = body_->forward(batch.ids, batch.mask, batch.segments, context);
  const std::int64_t places =
      x.device().is_cpu() ? 0 : predicted_places(batch.ids.size(0), batch.ids.size(1), share_);
  const Predicted predicted = pick_predicted(x, batch.labels, places);
  ModelOutput output;
  output.scores = word_scores(predicted.x);
  output.labels = predicted.labels;
  output.loss = mean_cross_entropy(output.scores, output.labels);
  return output;
}

Tensor WordModel::word_scores(const Tensor& x) { return head_->forward(x, body_->token_weight()); }

}  // namespace lln_torch
