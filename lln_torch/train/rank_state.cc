// Exchanges between ranks at the start, after evaluations, at checkpoints and before steps.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/rank_state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lln/error.h"
#include "lln_torch/data/random.h"

namespace lln_torch {
namespace {

// Apart from the streams of data, which have seeds of their own.
constexpr std::uint64_t kRankStream = 1000;
// Enough to tell a corpus from another, and few enough to read pictures for.
constexpr std::int64_t kFingerprintRows = 32;

template <typename T>
void append_bytes(std::string& bytes, const std::vector<T>& values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Of names and words. The sum of its words changes with any one of them, in whatever order it is
// made.
std::int64_t sum_of_words(const NamedTensors& tensors) {
  const at::NoGradGuard no_gradients;
  std::vector<at::Tensor> sums;
  std::string names;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    const at::ScalarType words = tensor.element_size() == 8   ? at::kLong
                                 : tensor.element_size() == 4 ? at::kInt
                                 : tensor.element_size() == 2 ? at::kShort
                                                              : at::kByte;
    sums.push_back(tensor.contiguous().view(words).sum(at::kLong));
    names += name + '\n';
  }
  const at::Tensor host = at::stack(sums).to(at::kCPU);
  const std::string_view bytes(reinterpret_cast<const char*>(host.const_data_ptr()), host.nbytes());
  return static_cast<std::int64_t>(checksum_of_text(names + std::string(bytes)));
}

}  // namespace

std::string data_fingerprint(const Source& source, std::int64_t batch_rows) {
  const Batch rows = source.train_batch(0, batch_rows, 0, std::min(batch_rows, kFingerprintRows));
  std::string bytes;
  for (const TextRows* text : {&rows.text, &rows.second}) {
    append_bytes(bytes, text->ids);
    append_bytes(bytes, text->mask);
    append_bytes(bytes, text->segments);
  }
  append_bytes(bytes, rows.labels);
  append_bytes(bytes, rows.scores);
  const Task& task = source.task();
  return fmt::format(
      "{}, {} classes, vocabulary {}, at most {} tokens, {} rows for training and {} for "
      "validation, checksum {:016x} of the first {}",
      task.name, task.classes, task.vocabulary, task.max_tokens, source.steps_per_epoch(1),
      source.validation_rows(), checksum_of_text(bytes), rows.rows);
}

bool share_state(const RankGroup& group, RunState& state, bool flag) {
  // Counters are exact as doubles: a run has fewer than 2^53 steps.
  std::array<double, 10> values = {static_cast<double>(state.step),
                                   state.best ? 1.0 : 0.0,
                                   state.best.value_or(0),
                                   static_cast<double>(state.best_step),
                                   static_cast<double>(state.stale),
                                   static_cast<double>(state.evaluated_step),
                                   state.loss_sum,
                                   static_cast<double>(state.loss_count),
                                   state.seconds,
                                   flag ? 1.0 : 0.0};
  const auto size = static_cast<std::int64_t>(values.size());
  // In host memory: others may wait long for rank 0, which NCCL would not let them.
  group.broadcast(at::from_blob(values.data(), {size}, at::kDouble), 0);
  const std::array<double, 10>& read = values;
  state.step = static_cast<std::int64_t>(read[0]);
  state.best = read[1] > 0 ? std::optional<double>(read[2]) : std::nullopt;
  state.best_step = static_cast<std::int64_t>(read[3]);
  state.stale = static_cast<std::int64_t>(read[4]);
  state.evaluated_step = static_cast<std::int64_t>(read[5]);
  state.loss_sum = read[6];
  state.loss_count = static_cast<std::int64_t>(read[7]);
  state.seconds = read[8];
  return read[9] > 0;
}

void share_tensors(const RankGroup& group, const NamedTensors& tensors) {
  const at::NoGradGuard no_gradients;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    at::Tensor whole = tensor.to(group.device()).contiguous();
    group.broadcast(whole, 0);
    tensor.copy_(whole);
  }
}

void expect_same(const RankGroup& group, const NamedTensors& tensors, const std::string& what) {
  at::Tensor sums = at::zeros({group.size()}, at::kLong);
  std::int64_t* const values = sums.mutable_data_ptr<std::int64_t>();
  values[group.rank()] = sum_of_words(tensors);
  group.wait(group.begin_sum(sums));
  std::vector<int> others;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (values[rank] != values[0]) others.push_back(rank);
  }
  if (others.empty()) return;
  throw lln::Error(
      lln::ErrorCode::invalid_argument,
      fmt::format("{} of rank {} are not those of rank 0; ranks need one config, one version of "
                  "the program and the same files",
                  what, fmt::join(others, ", rank ")));
}

void average_running(const RankGroup& group, const torch::nn::Module& model) {
  const at::NoGradGuard no_gradients;
  std::vector<at::Tensor> running, flat;
  for (const at::Tensor& buffer : model.buffers()) {
    if (buffer.scalar_type() != at::kDouble) continue;
    running.push_back(buffer);
    flat.push_back(buffer.flatten());
  }
  if (running.empty()) return;
  at::Tensor sums = at::cat(flat);
  group.wait(group.begin_sum(sums));
  sums.div_(group.size());
  std::int64_t first = 0;
  for (const at::Tensor& buffer : running) {
    buffer.copy_(sums.narrow(0, first, buffer.numel()).view_as(buffer));
    first += buffer.numel();
  }
}

void seed_step(std::uint64_t seed, std::int64_t step, int rank) {
  Random random(seed, kRankStream + static_cast<std::uint64_t>(rank),
                static_cast<std::uint64_t>(step));
  at::manual_seed(random.bits());
}

}  // namespace lln_torch
