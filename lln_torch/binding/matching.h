// Moments of q and k, alpha and beta from them, and the running moments of mode ema, which are a
// tensor f64 [2, heads_k, 3]: weight, mean and variance of each key head, of q and then of k.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "lln/moments.h"
#include "lln_torch/binding/tensors.h"

namespace lln_torch::binding {

struct Scales {
  Tensor alpha;  // [S, heads]
  Tensor beta;   // [S, heads_k]
};
// Into new tensors; `q` is that of `in`.
Scales match(const lln::MatchingInputs& in, const Tensor& q, const lln::MatchingOptions& options);

// The tensors that moments are taken of.
struct MatchingArguments {
  const Tensor& q;
  const Tensor& k;
  const OptionalTensor& key_lengths;
  const OptionalTensor& key_mask;
  const OptionalTensor& query_mask;
  const OptionalTensor& cu_seqlens;
  const OptionalTensor& cu_seqlens_k;
  bool cross = false;
};
// The same from tensors; `running` is for mode ema.
Scales match(const MatchingArguments& arguments, const OptionalTensor& running,
             const std::string& mode, bool causal);
// Into tensors of the caller; not of mode ema.
void match_into(const Scales& scales, const MatchingArguments& arguments, const std::string& mode);
void update_moments(const Tensor& running, const MatchingArguments& arguments, double decay);

// Throws lln::Error where `running` is not f64 [2, heads_k, 3], contiguous, on that device.
void check_running(const Tensor& running, std::int64_t heads_k, const lln::Device& device);
// Running moments in host memory, as the core's for one change; checked before.
void change_running(const Tensor& running, double decay,
                    const std::function<void(lln::RunningMoments&)>& change);

// f64 [S, heads, 3] in host memory: count, mean, and sum of squared deviations.
Tensor head_moments(const Tensor& x, const OptionalTensor& lengths, const OptionalTensor& mask,
                    const OptionalTensor& cu_seqlens);

}  // namespace lln_torch::binding
