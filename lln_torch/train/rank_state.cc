// Exchanges between ranks at the start, after evaluations and before steps.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/rank_state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>

#include "lln/error.h"
#include "lln_torch/data/random.h"

namespace lln_torch {
namespace {

// Apart from the streams of data, which have seeds of their own.
constexpr std::uint64_t kRankStream = 1000;

}  // namespace

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
  at::Tensor shared = at::from_blob(values.data(), {size}, at::kDouble)
                          .to(group.device(), at::kDouble, false, true);
  group.broadcast(shared, 0);
  const at::Tensor host = shared.to(at::kCPU);
  const double* const read = host.const_data_ptr<double>();
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

void expect_same(const RankGroup& group, const NamedTensors& tensors, const char* what) {
  const auto own = static_cast<std::int64_t>(checksum(to_host(tensors)));
  const at::Tensor first =
      at::full({1}, own, at::TensorOptions().dtype(at::kLong).device(group.device()));
  group.broadcast(first, 0);
  const auto expected = first.item<std::int64_t>();
  if (own == expected) return;
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   fmt::format("{} of rank {} are not those of rank 0: checksum {:016x}, expected "
                               "{:016x}; ranks need one config, one version of the program and "
                               "the same files",
                               what, group.rank(), static_cast<std::uint64_t>(own),
                               static_cast<std::uint64_t>(expected)));
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
