// Attention over one piece of a sequence (docs/pieces.md): calls that take the state of keys
// elsewhere, and give that of theirs. Results go into tensors that the caller made, so that parts
// of a call, as some of its heads, can be done apart.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lln_torch/binding/attention.h"
#include "lln_torch/binding/matching.h"

namespace lln_torch::binding {

// A state or the gradient of one: key_lse [S, heads_k, 1, dim] and channel_values [S, heads_k, dim,
// dim_v], f32 (f64 with f64 tensors). Both are given, or none.
struct State {
  const OptionalTensor& key_lse;
  const OptionalTensor& channel_values;
};

// What is given of the rest of the sequence: the state of its keys, and where blocks of Diag are
// counted from, int32 or int64 [S], in tokens of the piece.
struct GivenOfRest {
  State state;
  const OptionalTensor& block_origins;
};

// (q, k, v, state) -> (o, saved). alpha and beta are tensors where the kind needs them.
void piece_forward(const Arguments& arguments, const GivenOfRest& rest, const Options& options,
                   const Tensor& o, const State& saved);

struct PieceGradients {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  // Where they are wanted.
  const OptionalTensor& alpha;
  const OptionalTensor& beta;
  const OptionalTensor& mix;
  const OptionalTensor& lln_weight;
  const OptionalTensor& diag_weight;
  State state;
};
// (g, dsaved) -> `gradients`.
void piece_backward(const Tensor& g, const State& dsaved, const Arguments& arguments,
                    const GivenOfRest& rest, const Options& options,
                    const PieceGradients& gradients);

// alpha [S, heads] and beta [S, heads_k] from moments f64 [S, heads, 3] and [S, heads_k, 3] in host
// memory: count, mean and squared deviations. In host memory, f64 where `wide`.
Scales match_joined(const Tensor& q_moments, const Tensor& k_moments, std::int64_t dim,
                    const std::string& mode, bool causal, const std::string& feature, bool wide);
// The same moments into running ones, f64 [2, heads_k, 3], contiguous, in host memory.
void update_joined(const Tensor& running, const Tensor& q_moments, const Tensor& k_moments,
                   std::int64_t dim, double decay);

}  // namespace lln_torch::binding
