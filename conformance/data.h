// The data of a case: inputs that are the same on every machine, outputs filled with NaN, and the
// views that the API takes. Owns all of its memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "conformance/cases.h"
#include "conformance/tensor.h"

namespace lln::conformance {

// Standard normal number that depends on nothing but its arguments.
double normal_number(std::uint64_t seed, std::uint64_t index);

// One sequence of a case as the plain evaluation sees it.
struct SequenceRows {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0, q_tokens = 0;
  std::int64_t k_begin = 0, k_tokens = 0;
  std::int64_t first_valid = 0;     // k_tokens when there is none
  std::int64_t block_origin = 0;    // first_valid, where the problem has no block_origins
  std::vector<std::uint8_t> valid;  // [k_tokens]
};

struct Inputs {
  Tensor q, k, v, g;
  Tensor alpha, beta;
  Tensor mix, lln_weight, diag_weight;
  Tensor state_lse, state_values;    // of keys elsewhere, where the problem has a state
  Tensor dsaved_lse, dsaved_values;  // in its backward: the gradient of the state of all keys
  std::vector<std::int32_t> key_lengths;
  std::vector<std::uint8_t> key_mask;  // [batch, tokens_k]
  std::vector<std::int64_t> cu_seqlens_q, cu_seqlens_k;
  std::vector<std::int64_t> block_origins;  // [sequences]
  std::vector<SequenceRows> sequences;

  AttentionInputs views() const;
};

// The values are those of the case's own dtype whatever `dtype` they are stored in, so that the f64
// reference sees exactly what a kernel of a smaller type sees.
Inputs make_inputs(const Case& c, DType dtype);

TensorSet make_outputs(const Case& c, const Inputs& in, DType dtype);
AttentionOutputs forward_views(TensorSet& outputs);
AttentionGradients backward_views(TensorSet& outputs, const Inputs& in);

}  // namespace lln::conformance
