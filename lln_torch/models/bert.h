// Encoders out of HuggingFace's folders of BERT-type models (config.json, model.safetensors,
// vocab.txt), and sentence embeddings as sentence-transformers computes them. The attention can be
// replaced by any of the zoo that has the same four projections.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "lln_torch/data/tokenizer.h"
#include "lln_torch/models/body.h"

namespace lln_torch {

// config.json of a folder; throws lln::Error (io) where it is of another kind of model.
BodyConfig read_bert_config(const std::string& folder);

// Weights of model.safetensors (names of BertModel, with or without "bert."; heads of tasks are
// left out). Parameters that only the replaced attention has keep their first values.
void load_bert_weights(TextBody& body, const std::string& folder);

class SentenceEncoder {
 public:
  // `attention` is the table [attention] of a config; an empty one gives softmax, as trained.
  SentenceEncoder(const std::string& folder, const Settings& attention,
                  const torch::Device& device = at::kCPU);

  // One row for each text, [texts, dim] of f32 on the CPU: the mean over tokens (or the first
  // token, where the folder says so), of length 1 unless the folder has a modules.json without
  // Normalize. Texts of more than max_tokens lose their ends.
  // Rows are computed `batch` at a time, those of similar length together; which ones does not
  // change a result beyond rounding.
  Tensor embed(std::span<const std::string> texts, std::int64_t batch = 32,
               Observer* observer = nullptr);

  const BodyConfig& config() const { return body_->config(); }
  const std::string& attention_name() const { return attention_name_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  std::int64_t max_tokens() const { return max_tokens_; }
  void set_max_tokens(std::int64_t most);
  TextBody& body() { return *body_; }

 private:
  Tensor embed_rows(std::span<const EncodedRow* const> rows, Observer* observer);

  std::string attention_name_;
  std::shared_ptr<TextBody> body_;
  std::unique_ptr<Tokenizer> tokenizer_;
  torch::Device device_;
  std::int64_t max_tokens_ = 0;
  std::string pooling_ = "mean";
  bool normalized_ = true;
};

// Rows of length 1; rows of zeros stay.
Tensor unit_rows(const Tensor& x);
// Cosines of all pairs of rows.
Tensor cosines(const Tensor& embeddings);

}  // namespace lln_torch
