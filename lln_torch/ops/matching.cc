// Tensors outside of autograd, with contiguous channels, for the binding's matching.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/matching.h"

#include <ATen/ops/zeros.h>

#include "lln_torch/binding/matching.h"
#include "lln_torch/ops/handles.h"

namespace lln_torch {
namespace {

binding::Tensor read_only(const char* name, const at::Tensor& x) {
  return to_binding(name, with_contiguous_channels(x.defined() ? x.detach() : x));
}

struct BoundTokens {
  binding::Tensor q, k;
  binding::OptionalTensor key_lengths, key_mask, query_mask, cu_seqlens, cu_seqlens_k;
  bool cross;

  BoundTokens(const at::Tensor& queries, const at::Tensor& keys, const TokenChoice& tokens)
      : q(read_only("q", queries)),
        k(read_only("k", keys)),
        key_lengths(to_binding_optional("key_lengths", tokens.key_lengths)),
        key_mask(to_binding_optional("key_mask", tokens.key_mask)),
        query_mask(to_binding_optional("query_mask", tokens.query_mask)),
        cu_seqlens(to_binding_optional("cu_seqlens", tokens.cu_seqlens)),
        cu_seqlens_k(to_binding_optional("cu_seqlens_k", tokens.cu_seqlens_k)),
        cross(tokens.cross) {}
  binding::MatchingArguments arguments() const {
    return {q, k, key_lengths, key_mask, query_mask, cu_seqlens, cu_seqlens_k, cross};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> match_moments(const at::Tensor& q, const at::Tensor& k,
                                                const MatchCall& call) {
  const BoundTokens bound(q, k, call.tokens);
  const binding::Scales scales = binding::match(
      bound.arguments(), to_binding_optional("running", call.running), call.mode, call.causal);
  return {from_binding(scales.alpha), from_binding(scales.beta)};
}

void match_into(const at::Tensor& alpha, const at::Tensor& beta, const at::Tensor& q,
                const at::Tensor& k, const MatchCall& call) {
  const BoundTokens bound(q, k, call.tokens);
  binding::match_into({to_binding("alpha", alpha), to_binding("beta", beta)}, bound.arguments(),
                      call.mode);
}

at::Tensor new_running_moments(std::int64_t heads_k, at::Device device) {
  return at::zeros({2, heads_k, 3}, at::TensorOptions(at::kDouble).device(device));
}

void update_moments(const at::Tensor& running, const at::Tensor& q, const at::Tensor& k,
                    const TokenChoice& tokens, double decay) {
  const BoundTokens bound(q, k, tokens);
  binding::update_moments(to_binding("running", running), bound.arguments(), decay);
}

HeadMoments head_moments(const at::Tensor& x, const HeadTokens& tokens) {
  const at::Tensor found = from_binding(
      binding::head_moments(read_only("x", x), to_binding_optional("lengths", tokens.lengths),
                            to_binding_optional("mask", tokens.mask),
                            to_binding_optional("cu_seqlens", tokens.cu_seqlens)));
  const at::Tensor count = found.select(-1, 0);
  return {count, found.select(-1, 1), found.select(-1, 2) / (count - 1).clamp_min(1)};
}

}  // namespace lln_torch
