// attention, forward and backward, on tensors of the stable ABI. Results are new tensors; what a
// call does not have (a state that the causal form does not save, gradients of arguments that were
// not given) comes back as a tensor without elements.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "lln/attention.h"
#include "lln_torch/binding/tensors.h"

namespace lln_torch::binding {

// The tensors of a call that all passes take.
struct Arguments {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const OptionalTensor& alpha;
  const OptionalTensor& beta;
  const OptionalTensor& mix;
  const OptionalTensor& lln_weight;
  const OptionalTensor& diag_weight;
  const OptionalTensor& key_lengths;
  const OptionalTensor& key_mask;
  const OptionalTensor& cu_seqlens;
  const OptionalTensor& cu_seqlens_k;
};

// `kind` and `feature` in the words of the core: lln, diag64, lln+diag64, softmax; exp, power2.
struct Options {
  const std::string& kind;
  bool causal = false;
  double fixed_mix = 0.5;
  const std::string& feature;
};
lln::AttentionOptions attention_options(const Options& options);

// Where alpha and beta come from that are no tensors: numbers, or the mode of matching.
struct ScaleSource {
  const std::string& matching;
  const OptionalTensor& query_mask;
  std::optional<double> alpha;
  std::optional<double> beta;
};

// The arguments as views, and how a call on them runs.
lln::AttentionInputs attention_inputs(const Arguments& arguments);
lln::Exec attention_exec(const Arguments& arguments);
void set_weights(const OptionalTensor& mix, const OptionalTensor& lln_weight,
                 const OptionalTensor& diag_weight, lln::AttentionInputs& in);

// Without anything for a backward pass.
Tensor attention(const Arguments& arguments, const Options& options, const ScaleSource& source);

struct Forward {
  Tensor o;
  Tensor key_lse;         // what the backward pass takes besides the arguments
  Tensor channel_values;  // likewise
  Tensor alpha;           // where it was made here: [S, heads] matched, [1, 1] of a number
  Tensor beta;
};
// keep_state: where the call has a state; without it a backward pass sums the keys again.
Forward forward(const Arguments& arguments, const Options& options, const ScaleSource& source,
                bool keep_state = true);

struct Wanted {
  bool scales = false;
  bool weights = false;
};
struct Gradients {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor alpha;
  Tensor beta;
  Tensor mix;
  Tensor lln_weight;
  Tensor diag_weight;
};
// `key_lse` and `channel_values` are those of the forward pass, or without elements both.
Gradients backward(const Tensor& g, const Arguments& arguments, const Tensor& key_lse,
                   const Tensor& channel_values, const Options& options, Wanted wanted);

}  // namespace lln_torch::binding
