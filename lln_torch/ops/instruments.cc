// Tensors in host memory and in types that the instruments read.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/instruments.h"

#include "lln_torch/binding/instruments.h"
#include "lln_torch/ops/handles.h"

namespace lln_torch {
namespace {

at::Tensor on_host(const at::Tensor& x) {
  if (!x.defined()) return x;
  const at::Tensor host = x.detach().cpu();
  return with_contiguous_channels(host.scalar_type() == at::kDouble ? host.to(at::kFloat) : host);
}

at::Tensor scale_on_host(const at::Tensor& x) {
  return x.defined() ? x.detach().cpu().to(at::kFloat) : x;
}

}  // namespace

std::string analyze(const at::Tensor& q, const at::Tensor& k, const AnalyzeCall& call) {
  std::string matching = call.matching;
  if (matching.empty()) {
    matching = call.alpha.defined() ? "frozen" : call.causal ? "none" : "per_head";
  }
  return binding::analyze(to_binding("q", on_host(q)), to_binding("k", on_host(k)),
                          to_binding_optional("alpha", scale_on_host(call.alpha)),
                          to_binding_optional("beta", scale_on_host(call.beta)),
                          {.kinds = call.kinds,
                           .matching = matching,
                           .causal = call.causal,
                           .rows = call.rows,
                           .layer = call.layer,
                           .name = call.name,
                           .brief = call.brief});
}

}  // namespace lln_torch
