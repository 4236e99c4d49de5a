// Embeddings of ids, positions and segments before the layers: encoders and decoders.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/init.h>

#include "lln/error.h"
#include "lln_torch/models/body.h"
#include "lln_torch/parallel/pieces.h"

namespace lln_torch {
namespace {

torch::nn::Embedding make_embedding(std::int64_t rows, const BodyConfig& config) {
  torch::nn::Embedding embedding(rows, config.dim);
  torch::nn::init::normal_(embedding->weight, 0, config.init_std);
  return embedding;
}

void check_tokens(std::int64_t tokens, const BodyConfig& config) {
  if (tokens <= config.max_tokens) return;
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   fmt::format("a row of {} tokens, but the model takes at most {} (the setting "
                               "model.max_tokens)",
                               tokens, config.max_tokens));
}

}  // namespace

TextBody::TextBody(const BodyConfig& config, const Settings& attention) : config_(config) {
  tokens_ = register_module("tokens", make_embedding(config.vocabulary, config));
  if (config.positions == "learned") {
    positions_ = register_module("positions", make_embedding(config.max_tokens, config));
  }
  if (config.segments > 0) {
    segments_ = register_module("segments", make_embedding(config.segments, config));
  }
  if (config.embedding_norm) {
    embedding_norm_ = register_module(
        "embedding_norm",
        torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.dim}).eps(config.norm_epsilon)));
  }
  stack_ = register_module("stack", std::make_shared<Stack>(config, attention));
}

Tensor TextBody::embed(const Tensor& ids, const Tensor& segments, std::int64_t first) {
  // What is the same in all rows is added once, before it meets them.
  Tensor shared;
  if (!positions_.is_empty()) shared = positions_->weight.narrow(0, first, ids.size(1));
  if (!segments_.is_empty() && !segments.defined()) {
    const Tensor segment = segments_->weight.select(0, 0);
    shared = shared.defined() ? shared + segment : segment;
  }
  Tensor x = tokens_(ids);
  if (shared.defined()) x = x + shared;
  if (!segments_.is_empty() && segments.defined()) x = x + segments_(segments);
  if (!embedding_norm_.is_empty()) x = embedding_norm_(x);
  return drop(x, config_.dropout, is_training());
}

Tensor TextBody::forward(const Tensor& ids, const Tensor& mask, const Tensor& segments,
                         Context& context) {
  const Pieces* const pieces = context.pieces;
  const std::int64_t first = pieces != nullptr ? pieces->offset() : 0;
  check_tokens(pieces != nullptr ? pieces->whole() : ids.size(1), config_);
  return stack_->forward(embed(ids, segments, first), mask, context, first);
}

Tensor TextBody::continue_rows(const Tensor& ids, std::int64_t first, const LayerMemories& memories,
                               Context& context) {
  // Without a table of positions there is no last one.
  if (!positions_.is_empty()) check_tokens(first + ids.size(1), config_);
  return stack_->forward(embed(ids, {}, first), {}, context, first, memories);
}

}  // namespace lln_torch
