// A model for a task: the body (encoder, ViT, decoder), the head that the task needs, and the loss.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lln_torch/data/batch.h"
#include "lln_torch/zoo/attention.h"

namespace lln_torch {

// A batch as tensors on the device of the model; what a task has not is undefined.
struct TensorBatch {
  Tensor ids;       // int64 [rows, tokens]
  Tensor mask;      // bool [rows, tokens], or undefined: all tokens count
  Tensor segments;  // int64 [rows, tokens]
  Tensor second_ids, second_mask;
  Tensor pixels;  // [rows, channels * height * width]: the model knows its images
  Tensor labels;  // int64 [rows] or [rows, tokens]
  Tensor scores;  // float [rows]
};

TensorBatch to_tensors(const Batch& batch, const torch::Device& device);

struct ModelOutput {
  Tensor loss;    // a scalar, mean over what is predicted
  Tensor scores;  // [rows, classes], [rows], or of masked and next tokens [predicted, vocabulary]
  // Of masked and next tokens: what `scores` are held against, [predicted], kIgnoredLabel in places
  // that are left over; other models repeat the labels or scores of the batch.
  Tensor labels;
};

class Model : public torch::nn::Module {
 public:
  virtual ModelOutput run(const TensorBatch& batch, Context& context) = 0;
};

// `model` and `attention` are the tables of those names of a config; keys are listed by
// docs/training.md. Parameters are initialised by torch's generator: seed it before.
std::shared_ptr<Model> make_model(const Settings& model, const Settings& attention,
                                  const Task& task);

// Parameters and buffers by name. Loading is strict: missing, unexpected and misshapen tensors are
// all named in one lln::Error, and the model is as it was. Tensors of 16 and 32 bits are read into
// whatever type the model has.
void save_weights(const torch::nn::Module& model, const std::string& path);
void load_weights(torch::nn::Module& model, const std::string& path);
// Only the body (names that begin with "body."), as strictly: a pretrained encoder under the head
// of another task.
void load_body(torch::nn::Module& model, const std::string& path);

}  // namespace lln_torch
