// Decoding. A state is two tensors of the caller: its memory, bytes, and the tokens that each
// sequence has seen, int64 [batch] in host memory; a state on a device counts in its own memory,
// and its second tensor has no elements. Every call resumes the core's object over them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lln_torch/binding/tensors.h"

namespace lln_torch::binding {

using Sizes = std::vector<std::int64_t>;  // batch, heads, heads_k, dim, dim_v

// In these calls `mix` is the weight of LLN where diag_weight is given.

// The memory of a state.
std::int64_t decode_bytes(const Sizes& sizes, const std::string& kind, const std::string& feature,
                          bool on_device);

// The rows of q, or a tensor without elements where there is no q.
Tensor decode_append(const Tensor& memory, const Tensor& tokens, const OptionalTensor& q,
                     const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
                     const OptionalTensor& beta, const OptionalTensor& mix,
                     const OptionalTensor& diag_weight, const OptionalTensor& lengths,
                     const Sizes& sizes, const std::string& kind, double fixed_mix,
                     const std::string& feature);
Tensor decode_step(const Tensor& memory, const Tensor& tokens, const Tensor& q, const Tensor& k,
                   const Tensor& v, const OptionalTensor& alpha, const OptionalTensor& beta,
                   const OptionalTensor& mix, const OptionalTensor& diag_weight, const Sizes& sizes,
                   const std::string& kind, double fixed_mix, const std::string& feature);
Tensor decode_read(const Tensor& memory, const Tensor& tokens, const Tensor& q,
                   const OptionalTensor& alpha, const OptionalTensor& mix,
                   const OptionalTensor& diag_weight, const Sizes& sizes, const std::string& kind,
                   double fixed_mix, const std::string& feature);
// One sequence, or all where it is negative.
void decode_reset(const Tensor& memory, const Tensor& tokens, std::int64_t sequence,
                  const Sizes& sizes, const std::string& kind, double fixed_mix,
                  const std::string& feature);
void decode_merge(const Tensor& memory, const Tensor& tokens, const Tensor& later,
                  const Tensor& later_tokens, const Sizes& sizes, const std::string& kind,
                  double fixed_mix, const std::string& feature);
// int64 [batch] in host memory; waits for a device.
Tensor decode_tokens(const Tensor& memory, const Tensor& tokens, const Sizes& sizes,
                     const std::string& kind, double fixed_mix, const std::string& feature);
// Bytes in host memory, and back.
Tensor decode_save(const Tensor& memory, const Tensor& tokens, const Sizes& sizes,
                   const std::string& kind, double fixed_mix, const std::string& feature);
void decode_load(const Tensor& memory, const Tensor& tokens, const Tensor& bytes,
                 const Sizes& sizes, const std::string& kind, double fixed_mix,
                 const std::string& feature);

}  // namespace lln_torch::binding
