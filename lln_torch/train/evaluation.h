// A model on the validation set of its task.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lln_torch/models/model.h"
#include "lln_torch/train/sequence_cut.h"

namespace lln_torch {

struct EvaluationOptions {
  std::int64_t rows = 0;  // the first so many; 0: all
  std::int64_t batch = 32;
  bool bf16 = false;
  std::int64_t step = 0;  // of the training that the model is at
  std::function<bool()> interrupted = [] { return false; };
  // Tokens of rows are spread over its ranks, which all evaluate until one is interrupted.
  const SequenceCut* cut = nullptr;
};

struct Evaluation {
  double loss = 0;  // mean over all that is predicted
  std::int64_t rows = 0;
  // Those of the task, in its order, "loss" among them where the task names it.
  std::vector<std::pair<std::string, double>> metrics;
};

// Nothing of it is random, and the generators of random numbers are left as they were, as is the
// mode of the model. None where `interrupted` said true.
std::optional<Evaluation> evaluate(Model& model, const Source& source, const torch::Device& device,
                                   const EvaluationOptions& options);

// Whether `found` is better than `best` in the metric of that name.
bool is_better(const std::string& metric, double found, double best);

// Restores torch's generators of random numbers at its end.
class SameRandomNumbers {
 public:
  explicit SameRandomNumbers(const torch::Device& device);
  ~SameRandomNumbers();
  SameRandomNumbers(const SameRandomNumbers&) = delete;
  SameRandomNumbers& operator=(const SameRandomNumbers&) = delete;

 private:
  torch::Device device_;
  Tensor cpu_, cuda_;
};

// States of the generators of the CPU and of the device: tensors of bytes, the second undefined on
// a CPU.
std::pair<Tensor, Tensor> random_states(const torch::Device& device);
void set_random_states(const Tensor& cpu, const Tensor& cuda, const torch::Device& device);

}  // namespace lln_torch
