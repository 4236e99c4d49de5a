// The update, and the few scalars that tell of it.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/train_step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "lln/error.h"
#include "lln_torch/train/autocast.h"

namespace lln_torch {
namespace {

using BatchMember = Tensor TensorBatch::*;
constexpr std::array<BatchMember, 8> kBatchMembers = {
    &TensorBatch::ids,        &TensorBatch::mask,        &TensorBatch::segments,
    &TensorBatch::second_ids, &TensorBatch::second_mask, &TensorBatch::pixels,
    &TensorBatch::labels,     &TensorBatch::scores};

bool same_form(const TensorBatch& a, const TensorBatch& b) {
  return std::all_of(kBatchMembers.begin(), kBatchMembers.end(), [&](BatchMember member) {
    const Tensor& x = a.*member;
    const Tensor& y = b.*member;
    return x.defined() == y.defined() && (!x.defined() || x.sizes() == y.sizes());
  });
}

double counted_tokens(const TextRows& text) {
  if (text.mask.empty()) return static_cast<double>(text.ids.size());
  return static_cast<double>(std::count(text.mask.begin(), text.mask.end(), 1));
}

}  // namespace

double tokens_in(const Batch& batch) {
  return counted_tokens(batch.text) + counted_tokens(batch.second);
}

double predictions_in(const Batch& batch) {
  if (batch.labels.empty()) return static_cast<double>(batch.rows);
  return static_cast<double>(batch.labels.size()) -
         static_cast<double>(std::count(batch.labels.begin(), batch.labels.end(), kIgnoredLabel));
}

TrainStep::TrainStep(Model& model, Optimizer& optimizer, const StepOptions& options,
                     const torch::Device& device, GradientExchange* exchange,
                     const SequenceCut* cut)
    : model_(model),
      optimizer_(optimizer),
      options_(options),
      device_(device),
      exchange_(exchange),
      cut_(cut) {
  if (options.cuda_graph && exchange != nullptr) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     "train.cuda_graph = true: a step of several ranks is not captured");
  }
  if (options.cuda_graph && device.is_cuda()) graph_ = std::make_unique<StepGraph>();
  const auto scalar = at::TensorOptions().dtype(at::kFloat).device(device);
  for (Tensor* made : {&rate_, &loss_, &norm_, &skip_, &bad_loss_, &bad_norm_, &stop_}) {
    *made = at::zeros({}, scalar);
  }
  loss_sum_ = at::zeros({}, scalar.dtype(at::kDouble));
  step_ = at::zeros({}, scalar.dtype(at::kLong));
  bad_step_ = at::full({}, -1, scalar.dtype(at::kLong));
}

TrainStep::Inputs TrainStep::make_inputs(const std::vector<Batch>& parts) const {
  Inputs inputs;
  std::vector<double> predictions;
  for (const Batch& part : parts) {
    if (cut_ != nullptr) {
      SequenceCut::Part piece = cut_->cut(part, device_);
      inputs.parts.push_back(std::move(piece.batch));
      inputs.pieces.push_back(std::move(piece.pieces));
      predictions.push_back(piece.predictions);
    } else {
      // Also where it predicts nothing: it moves the running values of attentions, and heads give
      // it a loss of 0.
      inputs.parts.push_back(to_tensors(part, device_));
      predictions.push_back(predictions_in(part));
    }
    inputs.predictions += predictions.back();
  }
  for (const double count : predictions) {
    // Only all ranks together know how many predictions there are: they divide at the end.
    const double share = exchange_ != nullptr     ? count
                         : inputs.predictions > 0 ? count / inputs.predictions
                                                  : 0;
    inputs.shares.push_back(
        at::full({}, share, at::TensorOptions().dtype(at::kFloat).device(device_)));
  }
  return inputs;
}

void TrainStep::run(const std::vector<Batch>& parts, std::int64_t step, double learning_rate,
                    bool stop) {
  // What attentions draw at random they draw on the host, which no graph repeats.
  for (const auto& module : model_.modules(/*include_self=*/false)) {
    if (auto* const attention = dynamic_cast<Attention*>(module.get())) attention->begin_step(step);
  }
  rate_.fill_(learning_rate);
  step_.fill_(step);
  Inputs inputs = make_inputs(parts);
  inputs.stop = stop;
  if (graph_ == nullptr) {
    update(inputs, step);
    return;
  }
  if (!captured_) captured_ = inputs;
  bool same = inputs.parts.size() == captured_->parts.size();
  for (std::size_t i = 0; same && i < inputs.parts.size(); ++i) {
    same = same_form(inputs.parts[i], captured_->parts[i]);
  }
  if (!same) {  // rows of another length, or with padding
    update(inputs, step);
    return;
  }
  for (std::size_t i = 0; i < inputs.parts.size(); ++i) {
    for (const BatchMember member : kBatchMembers) {
      Tensor& fixed = captured_->parts[i].*member;
      if (fixed.defined()) fixed.copy_(inputs.parts[i].*member);
    }
    captured_->shares[i].copy_(inputs.shares[i]);
  }
  graph_->run([&] { update(*captured_, step); });
}

void TrainStep::update(const Inputs& inputs, std::int64_t step) {
  optimizer_.zero_gradients();
  loss_.zero_();
  for (std::size_t i = 0; i < inputs.parts.size(); ++i) {
    Context context;
    context.step = step;
    context.side_work = options_.side_work;
    if (!inputs.pieces.empty()) context.pieces = &inputs.pieces[i];
    Tensor loss;
    {
      const AutocastScope scope(device_.type(), options_.bf16);
      loss = model_.run(inputs.parts[i], context).loss.to(at::kFloat);
    }
    if (inputs.parts.size() > 1 || exchange_ != nullptr) loss = loss * inputs.shares[i];
    loss_.add_(loss.detach());
    if (exchange_ != nullptr && i + 1 == inputs.parts.size()) {
      exchange_->begin(loss_, inputs.predictions, inputs.stop);
    }
    loss.backward();
  }
  if (exchange_ != nullptr) {
    const GradientExchange::Totals totals = exchange_->finish();
    loss_.copy_(totals.loss);
    stop_.add_(totals.stop);
  }
  norm_.copy_(optimizer_.clip(options_.clip));
  note_faults();
  optimizer_.update(rate_, skip_);
}

void TrainStep::note_faults() {
  const at::NoGradGuard no_gradients;
  const Tensor bad = at::isfinite(loss_).logical_and_(at::isfinite(norm_)).logical_not_();
  const Tensor first = bad.logical_and(skip_ == 0);
  bad_step_.copy_(at::where(first, step_, bad_step_));
  bad_loss_.copy_(at::where(first, loss_, bad_loss_));
  bad_norm_.copy_(at::where(first, norm_, bad_norm_));
  skip_.copy_(at::maximum(skip_, bad.to(at::kFloat)));
  loss_sum_.add_(loss_.to(at::kDouble));
}

StepSums TrainStep::take() {
  StepSums sums;
  const Tensor read =
      at::stack({loss_sum_, norm_.to(at::kDouble), bad_step_.to(at::kDouble),
                 bad_loss_.to(at::kDouble), bad_norm_.to(at::kDouble), stop_.to(at::kDouble)})
          .to(at::kCPU);
  const double* const values = read.const_data_ptr<double>();
  sums.loss = values[0];
  sums.gradient_norm = values[1];
  if (values[2] >= 0) sums.bad_step = static_cast<std::int64_t>(values[2]);
  sums.bad_loss = values[3];
  sums.bad_gradient_norm = values[4];
  sums.stop = values[5] > 0;
  loss_sum_.zero_();
  return sums;
}

}  // namespace lln_torch
