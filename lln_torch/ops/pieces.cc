// Handles of the binding for each argument, and its calls.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/pieces.h"

#include "lln_torch/binding/pieces.h"
#include "lln_torch/ops/handles.h"

namespace lln_torch {
namespace {

struct BoundState {
  binding::OptionalTensor lse, values;
  explicit BoundState(const TensorState& state)
      : lse(to_binding_optional("key_lse", state.lse)),
        values(to_binding_optional("channel_values", state.values)) {}
  binding::State state() const { return {lse, values}; }
};

struct BoundPiece {
  binding::Tensor q, k, v;
  binding::OptionalTensor alpha, beta, mix, lln_weight, diag_weight;
  binding::OptionalTensor key_lengths, key_mask, cu_seqlens, cu_seqlens_k, block_origins;

  explicit BoundPiece(const PieceCall& call)
      : q(to_binding("q", call.q)),
        k(to_binding("k", call.k)),
        v(to_binding("v", call.v)),
        alpha(to_binding_optional("alpha", call.alpha)),
        beta(to_binding_optional("beta", call.beta)),
        mix(to_binding_optional("mix", call.mix)),
        lln_weight(to_binding_optional("lln_weight", call.lln_weight)),
        diag_weight(to_binding_optional("diag_weight", call.diag_weight)),
        key_lengths(to_binding_optional("key_lengths", call.key_lengths)),
        key_mask(to_binding_optional("key_mask", call.key_mask)),
        cu_seqlens(to_binding_optional("cu_seqlens", call.cu_seqlens)),
        cu_seqlens_k(to_binding_optional("cu_seqlens_k", call.cu_seqlens_k)),
        block_origins(to_binding_optional("block_origins", call.block_origins)) {}
  binding::Arguments arguments() const {
    return {q,          k,           v,           alpha,    beta,       mix,
            lln_weight, diag_weight, key_lengths, key_mask, cu_seqlens, cu_seqlens_k};
  }
};

binding::Options options_of(const PieceCall& call) {
  return {call.kind, call.causal, call.fixed_mix, call.feature};
}

}  // namespace

void piece_forward(const PieceCall& call, const TensorState& state, const at::Tensor& o,
                   const TensorState& saved) {
  const BoundPiece bound(call);
  const BoundState given(state), written(saved);
  binding::piece_forward(bound.arguments(), {given.state(), bound.block_origins}, options_of(call),
                         to_binding("o", o), written.state());
}

void piece_backward(const at::Tensor& g, const TensorState& dsaved, const PieceCall& call,
                    const TensorState& state, const PieceGradients& d) {
  const BoundPiece bound(call);
  const BoundState given(state), dall(dsaved), dstate(d.state);
  const binding::OptionalTensor dalpha = to_binding_optional("dalpha", d.alpha);
  const binding::OptionalTensor dbeta = to_binding_optional("dbeta", d.beta);
  const binding::OptionalTensor dmix = to_binding_optional("dmix", d.mix);
  const binding::OptionalTensor dlln = to_binding_optional("dlln_weight", d.lln_weight);
  const binding::OptionalTensor ddiag = to_binding_optional("ddiag_weight", d.diag_weight);
  const binding::Tensor dq = to_binding("dq", d.q), dk = to_binding("dk", d.k),
                        dv = to_binding("dv", d.v);
  binding::piece_backward(to_binding("g", with_contiguous_channels(g)), dall.state(),
                          bound.arguments(), {given.state(), bound.block_origins}, options_of(call),
                          {dq, dk, dv, dalpha, dbeta, dmix, dlln, ddiag, dstate.state()});
}

MatchedTensors match_joined(const at::Tensor& q_moments, const at::Tensor& k_moments,
                            const at::Tensor& like, const std::string& mode, bool causal,
                            const std::string& feature) {
  const binding::Scales scales =
      binding::match_joined(to_binding("q_moments", q_moments), to_binding("k_moments", k_moments),
                            like.size(3), mode, causal, feature, like.scalar_type() == at::kDouble);
  return {from_binding(scales.alpha).to(like.device()),
          from_binding(scales.beta).to(like.device())};
}

at::Tensor piece_moments(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& lengths,
                         const at::Tensor& cu_seqlens) {
  return from_binding(binding::head_moments(to_binding("x", with_contiguous_channels(x.detach())),
                                            to_binding_optional("lengths", lengths),
                                            to_binding_optional("mask", mask),
                                            to_binding_optional("cu_seqlens", cu_seqlens)));
}

void update_joined(const at::Tensor& running, const at::Tensor& q_moments,
                   const at::Tensor& k_moments, std::int64_t dim, double decay) {
  binding::update_joined(to_binding("running", running), to_binding("q_moments", q_moments),
                         to_binding("k_moments", k_moments), dim, decay);
}

}  // namespace lln_torch
