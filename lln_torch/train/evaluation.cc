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

struct Sums {
  double loss = 0, count = 0;  // over all predictions so far
};

ModelOutput run_batch(Model& model, const Batch& batch, const torch::Device& device,
                      const EvaluationOptions& options, Sums& sums) {
  Context context;
  context.step = options.step;
  std::optional<SequenceCut::Part> piece;
  if (options.cut != nullptr) {
    piece.emplace(options.cut->cut(batch, device));
    context.pieces = &piece->pieces;
  }
  const AutocastScope scope(device.type(), options.bf16);
  ModelOutput output = model.run(piece ? piece->batch : to_tensors(batch, device), context);
  const double predictions = piece ? piece->predictions : predictions_in(batch);
  sums.loss += output.loss.item<double>() * predictions;
  sums.count += predictions;
  return output;
}

// All ranks go on, or none: one that has a signal ends it.
bool is_interrupted(const EvaluationOptions& options) {
  const bool here = options.interrupted();
  if (options.cut == nullptr) return here;
  const RankGroup& group = options.cut->group();
  const Tensor flag =
      at::full({1}, here ? 1 : 0, at::TensorOptions(at::kInt).device(group.device()));
  group.wait(group.begin_max(flag));
  return flag.item<int>() != 0;
}

// The lists of all ranks, one after the other.
void join_lists(const RankGroup& group, std::vector<std::int32_t>& list) {
  const auto own = static_cast<std::int64_t>(list.size());
  const auto options = at::TensorOptions(at::kLong).device(group.device());
  const Tensor sizes = group.gather(at::full({1}, own, options)).to(at::kCPU);
  const std::int64_t largest = sizes.max().item<std::int64_t>();
  list.resize(static_cast<std::size_t>(largest));
  const Tensor padded = at::from_blob(list.data(), {largest}, at::kInt).to(group.device());
  const Tensor all = group.gather(padded).to(at::kCPU);
  std::vector<std::int32_t> joined;
  for (std::int64_t rank = 0; rank < group.size(); ++rank) {
    append_values(all[rank].narrow(0, 0, sizes[rank].item<std::int64_t>()), joined);
  }
  list = std::move(joined);
}

// Of tokens each rank has seen some; of rows all have seen all.
void join_ranks(const SequenceCut& cut, Sums& sums, Collected& all) {
  const RankGroup& group = cut.group();
  Tensor both = at::tensor({sums.loss, sums.count}, at::kDouble).to(group.device());
  group.wait(group.begin_sum(both));
  both = both.to(at::kCPU);
  sums = {both[0].item<double>(), both[1].item<double>()};
  if (!cut.by_token()) return;
  join_lists(group, all.classes);
  join_lists(group, all.labels);
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
  Sums sums;
  bool interrupted = false;
  for (std::int64_t first = 0; first < rows; first += options.batch) {
    if ((interrupted = is_interrupted(options))) break;
    const Batch batch = source.validation_batch(first, std::min(options.batch, rows - first));
    const ModelOutput output = run_batch(model, batch, device, options, sums);
    if (!only_loss) collect(output, collected);
  }
  model.train(training);
  if (interrupted) return std::nullopt;
  if (options.cut != nullptr) join_ranks(*options.cut, sums, collected);
  if (sums.count == 0) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("{}: the validation set has nothing to predict", task.name));
  }
  Evaluation found{.loss = sums.loss / sums.count, .rows = rows, .metrics = {}};
  for (const std::string& name : task.metrics) {
    found.metrics.emplace_back(name, name == "loss" ? found.loss : metric_of(name, collected));
  }
  return found;
}

}  // namespace lln_torch
