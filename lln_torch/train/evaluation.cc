// The validation set once through a model.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/evaluation.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>

#include "lln/error.h"
#include "lln_torch/data/metrics.h"
#include "lln_torch/train/autocast.h"
#include "lln_torch/train/train_step.h"

namespace lln_torch {
namespace {

// What was predicted and what was right, over the whole set.
struct Collected {
  std::vector<std::int32_t> classes, labels;
  std::vector<float> scores, expected;
};

template <class T>
void append_values(const Tensor& values, std::vector<T>& list) {
  const Tensor host = values.to(at::kCPU, c10::CppTypeToScalarType<T>::value).contiguous();
  const T* const first = host.const_data_ptr<T>();
  list.insert(list.end(), first, first + host.numel());
}

void collect(const ModelOutput& output, Collected& all) {
  if (output.labels.is_floating_point()) {
    append_values(output.scores, all.scores);
    append_values(output.labels, all.expected);
    return;
  }
  // Of an embedding with labels there is one score, the cosine: related above a half.
  const Tensor classes = output.scores.dim() == 2 ? output.scores.argmax(1) : output.scores > 0.5;
  const Tensor counts = at::nonzero(output.labels != kIgnoredLabel).squeeze(1);
  append_values(classes.index_select(0, counts), all.classes);
  append_values(output.labels.index_select(0, counts), all.labels);
}

double metric_of(const std::string& name, const Collected& all) {
  return all.expected.empty() ? class_metric(name, all.classes, all.labels)
                              : score_metric(name, all.scores, all.expected);
}

}  // namespace

std::pair<Tensor, Tensor> random_states(const torch::Device& device) {
  const auto state_of = [](at::Generator generator) {
    const std::lock_guard guard(generator.mutex());
    return generator.get_state();
  };
  const Tensor cpu = state_of(at::detail::getDefaultCPUGenerator());
  if (!device.is_cuda()) return {cpu, Tensor()};
  return {cpu, state_of(at::globalContext().defaultGenerator(device))};
}

void set_random_states(const Tensor& cpu, const Tensor& cuda, const torch::Device& device) {
  const auto set_state = [](at::Generator generator, const Tensor& state) {
    const std::lock_guard guard(generator.mutex());
    generator.set_state(state);
  };
  set_state(at::detail::getDefaultCPUGenerator(), cpu);
  if (device.is_cuda() && cuda.defined()) {
    set_state(at::globalContext().defaultGenerator(device), cuda);
  }
}

SameRandomNumbers::SameRandomNumbers(const torch::Device& device) : device_(device) {
  std::tie(cpu_, cuda_) = random_states(device);
}

SameRandomNumbers::~SameRandomNumbers() { set_random_states(cpu_, cuda_, device_); }

bool is_better(const std::string& metric, double found, double best) {
  return metric == "loss" ? found < best : found > best;
}

std::optional<Evaluation> evaluate(Model& model, const Source& source, const torch::Device& device,
                                   const EvaluationOptions& options) {
  const at::NoGradGuard no_gradients;
  const SameRandomNumbers same(device);
  const bool training = model.is_training();
  model.eval();
  const std::int64_t all_rows = source.validation_rows();
  const std::int64_t rows = options.rows > 0 ? std::min(options.rows, all_rows) : all_rows;
  const Task& task = source.task();
  const bool only_loss = task.metrics == std::vector<std::string>{"loss"};
  Collected collected;
  double loss_sum = 0, count = 0;
  bool interrupted = false;
  for (std::int64_t first = 0; first < rows; first += options.batch) {
    if ((interrupted = options.interrupted())) break;
    const Batch batch = source.validation_batch(first, std::min(options.batch, rows - first));
    Context context;
    context.step = options.step;
    ModelOutput output;
    {
      const AutocastScope scope(device.type(), options.bf16);
      output = model.run(to_tensors(batch, device), context);
    }
    const double predictions = predictions_in(batch);
    loss_sum += output.loss.item<double>() * predictions;
    count += predictions;
    if (!only_loss) collect(output, collected);
  }
  model.train(training);
  if (interrupted) return std::nullopt;
  if (count == 0) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("{}: the validation set has nothing to predict", task.name));
  }
  Evaluation found{.loss = loss_sum / count, .rows = rows, .metrics = {}};
  for (const std::string& name : task.metrics) {
    found.metrics.emplace_back(name, name == "loss" ? found.loss : metric_of(name, collected));
  }
  return found;
}

}  // namespace lln_torch
