// What stands on a body: pooling, the small networks that predict, and the models that join them
// with a loss. make_model chooses among them by the task.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <string>

#include "lln_torch/models/body.h"
#include "lln_torch/models/model.h"

namespace lln_torch {

// The part of a config that chooses among heads; see make_model.cc for the keys.
struct HeadConfig {
  std::string pooling = "mean";   // or "cls": the first token
  std::string head = "linear";    // "mlp" (a hidden layer, ReLU), "pooler" (dim, tanh: BERT's)
  bool tied_output = false;       // the output of words is the embedding of tokens
  bool output_transform = false;  // linear, GELU and norm before it, as BERT has them
  // On a CUDA device the output of words is computed for this share of the tokens, plus six
  // standard deviations, however many are predicted: a captured step has fixed shapes.
  double predicted_share = 1;
  double score_range = 1;  // scores are divided by it before a cosine is held against them
};

// x [rows, tokens, dim] -> [rows, dim]: the mean over tokens that count, or the first token. Of the
// whole rows, on all ranks, where the tokens are pieces of them.
Tensor pool_tokens(const Tensor& x, const Tensor& mask, const std::string& pooling,
                   const Pieces* pieces = nullptr);

// Rows of x [rows, tokens, dim] whose label is to be predicted, with their labels.
struct Predicted {
  Tensor x;       // [predicted, dim]
  Tensor labels;  // [predicted], kIgnoredLabel in places that are left over
};
// With `places` 0 as many as there are, which a device must be asked for; otherwise that many.
Predicted pick_predicted(const Tensor& x, const Tensor& labels, std::int64_t places);
// The number of places for a share of the tokens of every row, and at least one of each row.
std::int64_t predicted_places(std::int64_t rows, std::int64_t tokens, double share);

// Mean cross entropy over labels that are not ignored, 0 where all are.
Tensor mean_cross_entropy(const Tensor& scores, const Tensor& labels);

// From dim to the scores of all tokens of a vocabulary.
class WordHead : public torch::nn::Module {
 public:
  WordHead(const BodyConfig& body, const HeadConfig& config);
  // `tied` is the embedding [vocabulary, dim], used where the config says so.
  Tensor forward(const Tensor& x, const Tensor& tied);

 private:
  HeadConfig config_;
  torch::nn::Linear transform_{nullptr}, output_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  Tensor bias_;  // of tied words
};

// From a pooled vector to `outputs` numbers.
class PooledHead : public torch::nn::Module {
 public:
  PooledHead(const BodyConfig& body, const HeadConfig& config, std::int64_t inputs,
             std::int64_t outputs);
  Tensor forward(const Tensor& x);

 private:
  std::string kind_;
  double dropout_;
  torch::nn::Linear hidden_{nullptr}, output_{nullptr};
};

// Predicts tokens: hidden ones, or with a causal body those that follow.
class WordModel : public Model {
 public:
  WordModel(const BodyConfig& body, const HeadConfig& head, const Settings& attention);
  ModelOutput run(const TensorBatch& batch, Context& context) override;
  TextBody& body() { return *body_; }
  // x [.., dim] of the body -> [.., vocabulary].
  Tensor word_scores(const Tensor& x);

 private:
  double share_;
  std::shared_ptr<TextBody> body_;
  std::shared_ptr<WordHead> head_;
};

// Models that predict one thing of a row (classes, score) or of two (matched_pair, embedding).
std::shared_ptr<Model> make_pooled_model(const BodyConfig& body, const HeadConfig& head,
                                         const Settings& attention, const Task& task);

}  // namespace lln_torch
