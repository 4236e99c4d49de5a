// Moments of each call, merged into those of the calls before.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/calibration.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include "lln/error.h"
#include "lln_torch/binding/matching.h"
#include "lln_torch/ops/handles.h"

namespace lln_torch {
namespace {

// count, mean and squared deviations, [sequences, heads, 3] in host memory.
at::Tensor moments_tensor(const char* name, const at::Tensor& x, const at::Tensor& lengths,
                          const at::Tensor& mask, const at::Tensor& cu_seqlens) {
  return from_binding(binding::head_moments(
      to_binding(name, with_contiguous_channels(x.defined() ? x.detach() : x)),
      to_binding_optional("key_lengths", lengths), to_binding_optional("key_mask", mask),
      to_binding_optional("cu_seqlens", cu_seqlens)));
}

// Adds the heads of `found` to `pool`; heads that share an entry of it are one set of numbers.
void pool_heads(const at::Tensor& found, std::vector<lln::Moments>& pool) {
  const std::int64_t heads = found.size(1);
  const std::int64_t shared = heads / static_cast<std::int64_t>(pool.size());
  const auto* number = found.const_data_ptr<double>();
  for (std::int64_t s = 0; s < found.size(0); ++s) {
    for (std::int64_t h = 0; h < heads; ++h, number += 3) {
      lln::Moments& sum = pool[static_cast<std::size_t>(h / shared)];
      sum = lln::merge(sum, {number[0], number[1], number[2]});
    }
  }
}

}  // namespace

void LayerCalibration::take(const at::Tensor& q, const at::Tensor& k, const TokenChoice& tokens) {
  const at::Tensor& cu_k = tokens.cu_seqlens_k.defined() ? tokens.cu_seqlens_k : tokens.cu_seqlens;
  const at::Tensor of_k = moments_tensor("k", k, tokens.key_lengths, tokens.key_mask, cu_k);
  const at::Tensor none;
  const bool self = !tokens.cross && !tokens.query_mask.defined() && q.defined() && q.dim() == 4 &&
                    q.size(2) == k.size(2);
  const at::Tensor of_q =
      moments_tensor("q", q, self ? tokens.key_lengths : none,
                     self ? tokens.key_mask : tokens.query_mask, tokens.cu_seqlens);
  const std::int64_t heads = q.size(1);
  const std::int64_t heads_k = k.size(1);
  const bool first = pooled_.k.empty();
  const auto expected_k = first ? heads_k : static_cast<std::int64_t>(pooled_.k.size());
  const std::int64_t expected = first ? heads : pooled_.heads;
  const std::int64_t dim = first ? k.size(3) : pooled_.dim;
  if (heads != expected || heads_k != expected_k || q.size(3) != dim || k.size(3) != dim ||
      heads_k == 0 || heads % heads_k != 0) {
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        fmt::format("calibration of a layer: q has {} heads of {} channels and k {} of {}, "
                    "expected {} and {} of {}, as many channels in both, and heads that are a "
                    "multiple of the key heads",
                    heads, q.size(3), heads_k, k.size(3), expected, expected_k, dim));
  }
  if (first) {
    pooled_.heads = heads;
    pooled_.dim = dim;
    pooled_.q.resize(static_cast<std::size_t>(heads_k));
    pooled_.k.resize(static_cast<std::size_t>(heads_k));
  }
  pool_heads(of_q, pooled_.q);
  pool_heads(of_k, pooled_.k);
  pooled_.sequences += of_k.select(1, 0).select(-1, 0).gt(0).sum().item<std::int64_t>();
}

lln::CalibratedLayer LayerCalibration::layer(const std::string& name, const std::string& mode,
                                             std::vector<lln::ClampedHead>* clamped) const {
  lln::CalibratedLayer found = lln::calibrate(pooled_, lln::parse_matching(mode), clamped);
  found.name = name;
  return found;
}

std::pair<at::Tensor, at::Tensor> scale_tensors(const lln::CalibratedLayer& layer,
                                                at::Device device) {
  const auto tensor = [&](const std::vector<float>& numbers) {
    return at::tensor(numbers, at::kFloat).to(device);
  };
  return {tensor(layer.alpha), tensor(layer.beta)};
}

}  // namespace lln_torch
