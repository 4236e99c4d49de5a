// Running moments live in a tensor and are taken to the core's form for one call; in host memory
// that is a copy of a few numbers, on a device a view, so that nothing waits.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/matching.h"

#include <array>
#include <vector>

#include "lln/error.h"
#include "lln_torch/binding/exec.h"

namespace lln_torch::binding {
namespace {

lln::MatchingInputs matching_inputs(const MatchingArguments& a) {
  return {.q = view4("q", a.q),
          .k = view4("k", a.k),
          .key_lengths = index_view("key_lengths", a.key_lengths),
          .key_mask = mask_view("key_mask", a.key_mask),
          .query_mask = mask_view("query_mask", a.query_mask),
          .cu_seqlens_q = index_view("cu_seqlens", a.cu_seqlens),
          .cu_seqlens_k = index_view("cu_seqlens_k", a.cu_seqlens_k),
          .cross = a.cross};
}

lln::DeviceRunningMoments running_on_device(const Tensor& running, double decay) {
  const lln::Shape shape{1, 2, running.size(1), 3};
  return {.decay = decay,
          .heads = {running.data_ptr(), lln::DType::f64, device_of(running), shape,
                    lln::contiguous_stride(shape)}};
}

lln::RunningMoments running_on_host(const Tensor& running, double decay) {
  const auto heads = static_cast<std::size_t>(running.size(1));
  const auto* number = static_cast<const double*>(running.data_ptr());
  lln::RunningMoments moments{.decay = decay};
  if (number[0] == 0 && number[3 * heads] == 0) return moments;  // before the first step
  for (auto* list : {&moments.q, &moments.k}) {
    for (std::size_t h = 0; h < heads; ++h, number += 3) {
      list->push_back({number[0], number[1], number[2]});
    }
  }
  return moments;
}

void store_running(const lln::RunningMoments& moments, const Tensor& running) {
  auto* number = static_cast<double*>(running.data_ptr());
  for (const auto* list : {&moments.q, &moments.k}) {
    for (const lln::RunningMoments::Head& head : *list) {
      *number++ = head.weight;
      *number++ = head.mean;
      *number++ = head.variance;
    }
  }
}

void match_views(const Scales& scales, const lln::MatchingInputs& in, const Tensor& q,
                 const lln::MatchingOptions& options) {
  lln::Exec exec = exec_for(q, 2 * q.numel());
  const Workspace workspace(q, exec, [&] { return lln::matching_workspace_bytes(in); });
  lln::match_moments(in, {scale_view("alpha", scales.alpha), scale_view("beta", scales.beta)},
                     options, exec);
}

}  // namespace

void check_running(const Tensor& running, std::int64_t heads_k, const lln::Device& device) {
  if (running.scalar_type() == ScalarType::Double && running.is_contiguous() &&
      running.dim() == 3 && running.size(0) == 2 && running.size(1) == heads_k &&
      running.size(2) == 3 && device_of(running) == device) {
    return;
  }
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   "running must be float64 [2, heads of k, 3], contiguous, where k is");
}

Scales match(const MatchingArguments& a, const OptionalTensor& running, const std::string& mode,
             bool causal) {
  const lln::MatchingInputs in = matching_inputs(a);
  lln::MatchingOptions options{.mode = lln::parse_matching(mode), .causal = causal};
  lln::RunningMoments host;
  lln::DeviceRunningMoments device;
  if (running) {
    check_running(*running, a.k.size(1), device_of(a.k));
    if (a.q.is_cpu()) {
      host = running_on_host(*running, 0);
      options.running = &host;
    } else {
      device = running_on_device(*running, 0);
      options.running_on_device = &device;
    }
  }
  return match(in, a.q, options);
}

void update_moments(const Tensor& running, const MatchingArguments& a, double decay) {
  const lln::MatchingInputs in = matching_inputs(a);
  check_running(running, a.k.size(1), device_of(a.k));
  lln::Exec exec = exec_for(a.q, 2 * a.q.numel());
  const Workspace workspace(a.q, exec, [&] { return lln::matching_workspace_bytes(in); });
  if (a.q.is_cpu()) {
    change_running(running, decay,
                   [&](lln::RunningMoments& heads) { lln::update_moments(heads, in, exec); });
  } else {
    lln::update_moments(running_on_device(running, decay), in, exec);
  }
}

void change_running(const Tensor& running, double decay,
                    const std::function<void(lln::RunningMoments&)>& change) {
  lln::RunningMoments moments = running_on_host(running, decay);
  change(moments);
  store_running(moments, running);
}

Tensor head_moments(const Tensor& x, const OptionalTensor& lengths, const OptionalTensor& mask,
                    const OptionalTensor& cu_seqlens) {
  const lln::MomentsInputs in{.x = view4("x", x),
                              .lengths = index_view("lengths", lengths),
                              .mask = mask_view("mask", mask),
                              .cu_seqlens = index_view("cu_seqlens", cu_seqlens)};
  const std::int64_t sequences = sequence_count(in.x, in.cu_seqlens);
  std::vector<lln::Moments> moments(static_cast<std::size_t>(sequences * x.size(1)));
  lln::head_moments(in, moments, exec_for(x, x.numel()));
  Tensor out =
      new_host_tensor(std::array{sequences, x.size(1), std::int64_t{3}}, ScalarType::Double);
  auto* number = static_cast<double*>(out.data_ptr());
  for (const lln::Moments& m : moments) {
    *number++ = m.count;
    *number++ = m.mean;
    *number++ = m.m2;
  }
  return out;
}

void match_into(const Scales& scales, const MatchingArguments& a, const std::string& mode) {
  match_views(scales, matching_inputs(a), a.q, {.mode = lln::parse_matching(mode)});
}

Scales match(const lln::MatchingInputs& in, const Tensor& q, const lln::MatchingOptions& options) {
  const ScalarType type = scalar_type(wide_type(in.q.dtype));
  const std::int64_t sequences = sequence_count(in.q, in.cu_seqlens_q);
  Scales scales{new_tensor(q, std::array{sequences, in.q.shape[1]}, type),
                new_tensor(q, std::array{sequences, in.k.shape[1]}, type)};
  match_views(scales, in, q, options);
  return scales;
}

}  // namespace lln_torch::binding
