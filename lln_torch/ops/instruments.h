// The instruments on tensors: how attention concentrates on given queries and keys, head by head,
// as the JSON that `lln analyze --json` prints (docs/instruments.md says what its numbers mean).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lln_torch {

struct AnalyzeCall {
  std::vector<std::string> kinds = {"softmax", "lln"};  // also lln+diag64, elu, performer ...
  at::Tensor alpha, beta;  // [heads] or [batch, heads]: mode frozen, which they imply
  // How alpha and beta are set that are not given; empty: per_head, none for causal attention.
  std::string matching;
  bool causal = false;    // there is no spectrum then
  std::int64_t rows = 0;  // of each matrix that are looked at; 0: all
  std::optional<std::int64_t> layer;
  std::string name;
  bool brief = false;  // entropy, ln P and the gap alone: what can be afforded during training
};

// q [batch, heads, tokens, dim] and k [batch, heads_k, tokens, dim]; the sequences of the batch are
// the samples of a head. Computes in host memory, and waits for tensors on a device.
std::string analyze(const at::Tensor& q, const at::Tensor& k, const AnalyzeCall& call = {});

}  // namespace lln_torch
