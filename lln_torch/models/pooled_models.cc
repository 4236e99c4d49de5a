// Models that see a row as one vector: classes, scores, and pairs of rows (dual encoders).
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cmath>

#include "lln_torch/models/heads.h"
#include "lln_torch/parallel/pieces.h"
#include "lln_torch/parallel/sum_over_ranks.h"

namespace lln_torch {

namespace {

// Sums over pieces are what all ranks go on with, each with its own gradient of them.
Tensor pool_pieces(const Tensor& x, const Tensor& mask, const std::string& pooling,
                   const Pieces& pieces) {
  if (pooling == "cls") {
    const bool here = pieces.offset() == 0 && x.size(1) > 0;
    return sum_over_ranks(here ? x.select(1, 0) : x.narrow(1, 0, 0).sum(1), pieces.group());
  }
  if (!mask.defined()) {
    return sum_over_ranks(x.sum(1), pieces.group()) / static_cast<double>(pieces.whole());
  }
  const Tensor counts = mask.unsqueeze(2);
  const Tensor sum = at::where(counts, x, at::zeros({}, x.options())).sum(1);
  const Tensor all =
      sum_over_ranks(at::cat({sum, counts.sum(1).to(sum.scalar_type())}, 1), pieces.group());
  const std::int64_t dim = x.size(2);
  return all.narrow(1, 0, dim) / all.narrow(1, dim, 1).clamp_min(1);
}

}  // namespace

Tensor pool_tokens(const Tensor& x, const Tensor& mask, const std::string& pooling,
                   const Pieces* pieces) {
  if (pieces != nullptr) return pool_pieces(x, mask, pooling, *pieces);
  if (pooling == "cls") return x.select(1, 0);
  if (!mask.defined()) return x.mean(1);
  const Tensor counts = mask.unsqueeze(2);
  const Tensor sum = at::where(counts, x, at::zeros({}, x.options())).sum(1);
  return sum / counts.sum(1).clamp_min(1);
}

PooledHead::PooledHead(const BodyConfig& body, const HeadConfig& config, std::int64_t inputs,
                       std::int64_t outputs)
    : kind_(config.head), dropout_(body.dropout) {
  std::int64_t width = inputs;
  if (kind_ != "linear") {
    width = kind_ == "mlp" ? body.feedforward : body.dim;
    hidden_ = register_module("hidden", torch::nn::Linear(inputs, width));
    init_linear(*hidden_, body.init_std);
  }
  output_ = register_module("output", torch::nn::Linear(width, outputs));
  init_linear(*output_, body.init_std);
}

Tensor PooledHead::forward(const Tensor& x) {
  Tensor hidden = drop(x, dropout_, is_training());
  if (!hidden_.is_empty()) {
    hidden = kind_ == "mlp" ? hidden_(hidden).relu() : hidden_(hidden).tanh();
    hidden = drop(hidden, dropout_, is_training());
  }
  return output_(hidden).to(at::kFloat);
}

namespace {

// A body for ids or for pixels, and pooling.
class PooledModel : public Model {
 public:
  PooledModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention)
      : pooling_(head.pooling) {
    if (body.patch > 0) {
      image_ = register_module("body", std::make_shared<ImageBody>(body, attention));
    } else {
      text_ = register_module("body", std::make_shared<TextBody>(body, attention));
    }
  }

 protected:
  Tensor pooled(const TensorBatch& batch, Context& context) {
    if (image_) return pool_tokens(image_->forward(batch.pixels, context), {}, pooling_);
    return pooled_text(batch.ids, batch.mask, batch.segments, context);
  }

  // Both texts of a pair, through one body; at once where their rows have one length.
  std::pair<Tensor, Tensor> pooled_pair(const TensorBatch& batch, Context& context) {
    if (batch.ids.sizes() != batch.second_ids.sizes() ||
        batch.mask.defined() != batch.second_mask.defined()) {
      return {pooled_text(batch.ids, batch.mask, {}, context),
              pooled_text(batch.second_ids, batch.second_mask, {}, context)};
    }
    const Tensor mask = batch.mask.defined() ? at::cat({batch.mask, batch.second_mask}) : Tensor();
    const Tensor both = pooled_text(at::cat({batch.ids, batch.second_ids}), mask, {}, context);
    const std::int64_t rows = batch.ids.size(0);
    return {both.narrow(0, 0, rows), both.narrow(0, rows, rows)};
  }

 private:
  Tensor pooled_text(const Tensor& ids, const Tensor& mask, const Tensor& segments,
                     Context& context) {
    return pool_tokens(text_->forward(ids, mask, segments, context), mask, pooling_,
                       context.pieces);
  }

  std::string pooling_;
  std::shared_ptr<TextBody> text_;
  std::shared_ptr<ImageBody> image_;
};

class ClassModel : public PooledModel {
 public:
  ClassModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention,
             std::int64_t classes)
      : PooledModel(body, head, attention) {
    head_ = register_module("head", std::make_shared<PooledHead>(body, head, body.dim, classes));
  }

  ModelOutput run(const TensorBatch& batch, Context& context) override {
    ModelOutput output;
    output.scores = head_->forward(pooled(batch, context));
    output.labels = batch.labels;
    output.loss = mean_cross_entropy(output.scores, batch.labels);
    return output;
  }

 private:
  std::shared_ptr<PooledHead> head_;
};

class ScoreModel : public PooledModel {
 public:
  ScoreModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention)
      : PooledModel(body, head, attention) {
    head_ = register_module("head", std::make_shared<PooledHead>(body, head, body.dim, 1));
  }

  ModelOutput run(const TensorBatch& batch, Context& context) override {
    ModelOutput output;
    output.scores = head_->forward(pooled(batch, context)).squeeze(1);
    output.labels = batch.scores;
    output.loss = at::mse_loss(output.scores, batch.scores);
    return output;
  }

 private:
  std::shared_ptr<PooledHead> head_;
};

// Long Range Arena's retrieval: a network over [a, b, a * b, a - b].
class MatchedPairModel : public PooledModel {
 public:
  MatchedPairModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention,
                   std::int64_t classes)
      : PooledModel(body, head, attention) {
    head_ =
        register_module("head", std::make_shared<PooledHead>(body, head, 4 * body.dim, classes));
  }

  ModelOutput run(const TensorBatch& batch, Context& context) override {
    const auto [a, b] = pooled_pair(batch, context);
    ModelOutput output;
    output.scores = head_->forward(at::cat({a, b, a * b, a - b}, 1));
    output.labels = batch.labels;
    output.loss = mean_cross_entropy(output.scores, batch.labels);
    return output;
  }

 private:
  std::shared_ptr<PooledHead> head_;
};

// The cosine of two vectors, held against a similarity in [0, score_range], or as the evidence for
// a label of 0 or 1 with a learned scale and offset.
class EmbeddingModel : public PooledModel {
 public:
  EmbeddingModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention,
                 bool labelled)
      : PooledModel(body, head, attention), score_range_(head.score_range) {
    if (labelled) {
      log_scale_ = register_parameter("log_scale", at::full({}, std::log(10.0), at::kFloat));
      offset_ = register_parameter("offset", at::zeros({}));
    }
  }

  ModelOutput run(const TensorBatch& batch, Context& context) override {
    const auto [a, b] = pooled_pair(batch, context);
    ModelOutput output;
    output.scores = at::cosine_similarity(a.to(at::kFloat), b.to(at::kFloat), 1);
    if (log_scale_.defined()) {
      output.labels = batch.labels;
      const Tensor evidence = output.scores * log_scale_.exp() + offset_;
      output.loss = at::binary_cross_entropy_with_logits(evidence, batch.labels.to(at::kFloat));
    } else {
      output.labels = batch.scores;
      output.loss = at::mse_loss(output.scores, batch.scores / score_range_);
    }
    return output;
  }

 private:
  double score_range_;
  Tensor log_scale_, offset_;
};

}  // namespace

std::shared_ptr<Model> make_pooled_model(const BodyConfig& body, const HeadConfig& head,
                                         const Settings& attention, const Task& task) {
  switch (task.kind) {
    case TaskKind::score:
      return std::make_shared<ScoreModel>(body, head, attention);
    case TaskKind::matched_pair:
      return std::make_shared<MatchedPairModel>(body, head, attention, task.classes);
    case TaskKind::embedding:
      return std::make_shared<EmbeddingModel>(body, head, attention, task.classes > 0);
    default:
      return std::make_shared<ClassModel>(body, head, attention, task.classes);
  }
}

}  // namespace lln_torch
