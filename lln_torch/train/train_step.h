// One update of a model: forward, backward, clipping and optimiser over the parts of a batch, of
// which other ranks may have some. Whether a loss or gradient was finite is kept on the device and
// looked at when the caller asks, so that a step never waits for one; an update that is not finite,
// and all after it, changes nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lln_torch/models/model.h"
#include "lln_torch/parallel/gradient_exchange.h"
#include "lln_torch/train/cuda_graph.h"
#include "lln_torch/train/optimizer.h"
#include "lln_torch/train/sequence_cut.h"

namespace lln_torch {

struct StepOptions {
  bool bf16 = false;
  double clip = 1;  // 0: none
  // Steps whose batch has the shape of the first are replayed from a CUDA graph.
  bool cuda_graph = false;
  bool side_work = false;  // Context::side_work
};

// What was summed since the last call of TrainStep::take().
struct StepSums {
  double loss = 0;           // sum over steps
  double gradient_norm = 0;  // of the last step, before clipping
  // The first step whose loss or gradient was not finite.
  std::optional<std::int64_t> bad_step;
  double bad_loss = 0, bad_gradient_norm = 0;
  bool stop = false;  // a rank asked for it
};

// How many predictions the mean of a batch's loss is over: parts of a batch count by it.
double predictions_in(const Batch& batch);
// Tokens that count, of both texts of pairs; 0 where rows are images.
double tokens_in(const Batch& batch);

class TrainStep {
 public:
  // All outlive this object. With an exchange the batch is spread over its ranks: then loss, norm,
  // faults and the update are the same on each. With a cut, which needs an exchange, tokens of rows
  // are spread, too.
  TrainStep(Model& model, Optimizer& optimizer, const StepOptions& options,
            const torch::Device& device, GradientExchange* exchange = nullptr,
            const SequenceCut* cut = nullptr);

  // `parts`, one at least, together are the batch of `step`, or this rank's share of it; the loss
  // is the mean over all that the batch predicts. `stop`: this rank wants to end, and the sums of
  // all will say so.
  void run(const std::vector<Batch>& parts, std::int64_t step, double learning_rate,
           bool stop = false);
  StepSums take();  // waits for the device

 private:
  // What one step reads, in the same memory at each step where it is captured.
  struct Inputs {
    std::vector<TensorBatch> parts;
    std::vector<Pieces> pieces;  // of each part where its tokens are spread, otherwise none
    std::vector<Tensor> shares;  // of the loss of each part
    double predictions = 0;
    bool stop = false;
  };
  Inputs make_inputs(const std::vector<Batch>& parts) const;
  void update(const Inputs& inputs, std::int64_t step);
  void note_faults();

  Model& model_;
  Optimizer& optimizer_;
  StepOptions options_;
  torch::Device device_;
  GradientExchange* exchange_;
  const SequenceCut* cut_;
  std::unique_ptr<StepGraph> graph_;
  std::optional<Inputs> captured_;
  // Scalars on the device.
  Tensor rate_, step_, loss_, loss_sum_, norm_, skip_, bad_step_, bad_loss_, bad_norm_, stop_;
};

}  // namespace lln_torch
