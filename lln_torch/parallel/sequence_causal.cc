// Causal attention over pieces: each piece starts from the state of those before it; back, what the
// rows of later pieces say of that state reaches the keys of earlier ones.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "lln_torch/parallel/sequence_call.h"
#include "lln_torch/parallel/state_exchange.h"

namespace lln_torch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeWeight = std::optional<at::Tensor>;

MaybeWeight maybe_weight(const at::Tensor& x) {
  return x.defined() ? MaybeWeight(x) : MaybeWeight();
}

// Weights of the heads of a part: [heads, ...] or [batch, heads, tokens].
at::Tensor weight_part(const HeadPart& part, const at::Tensor& x) {
  if (!x.defined()) return x;
  return x.narrow(x.dim() == 3 ? 1 : 0, part.first * part.group, part.count * part.group);
}

// Rows and keys of a part.
PieceCall causal_call(const variable_list& x, const SequenceCall& call, const HeadPart& part) {
  PieceCall made = keys_call(x[0], x[1], x[2], x[3], x[4], call, part);
  made.q = part.of_rows(x[0]);
  made.cu_seqlens = call.pieces.cu_seqlens();
  made.mix = weight_part(part, x[5]);
  made.lln_weight = weight_part(part, x[6]);
  made.diag_weight = weight_part(part, x[7]);
  made.fixed_mix = call.fixed_mix;
  made.causal = true;
  if (call.diag_block > 0) {
    made.kind = "lln+diag" + std::to_string(call.diag_block);
    made.block_origins = call.pieces.block_origins();
  }
  return made;
}

constexpr std::size_t kInputs = 8;  // q, k, v, alpha, beta and three weights

struct CausalFunction : torch::autograd::Function<CausalFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& alpha, const at::Tensor& beta,
                            const MaybeWeight& mix, const MaybeWeight& lln_weight,
                            const MaybeWeight& diag_weight, const SequenceCall* given) {
    const SequenceCall& call = *given;
    variable_list x = {q, k, v, alpha, beta};
    std::int64_t weights_given = 0;  // a bit for each
    for (const MaybeWeight* weight : {&mix, &lln_weight, &diag_weight}) {
      if (*weight) weights_given |= std::int64_t{1} << (x.size() - 5);
      x.push_back(weight->value_or(at::Tensor()));
    }
    const std::vector<HeadPart> parts = head_parts(q.size(1), k.size(1));
    std::vector<StateScan> scans;
    std::vector<TensorState> own, before;
    for (const HeadPart& part : parts) {
      own.push_back(state_of_keys(keys_call(q, k, v, alpha, beta, call, part), call.pieces));
      scans.emplace_back(call.pieces, own.back(), part.number);
    }
    const at::Tensor o = rows_like(q, v);
    for (const HeadPart& part : parts) {
      before.push_back(scans[static_cast<std::size_t>(part.number)].finish());
      piece_forward(causal_call(x, call, part), before.back(), part.of_rows(o), {});
    }
    const TensorState owned = join_states(own), earlier = join_states(before);
    x.insert(x.end(), {owned.lse, owned.values, earlier.lse, earlier.values});
    ctx->save_for_backward(std::move(x));
    ctx->saved_data["weights_given"] = weights_given;
    keep_call(*ctx, call);
    return o;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    const SequenceCall& call = kept_call(*ctx);
    const variable_list x = ctx->get_saved_variables();
    const TensorState owned{x[8], x[9]}, before{x[10], x[11]};
    const std::vector<HeadPart> parts = head_parts(x[0].size(1), x[1].size(1));
    const variable_list gradients = new_gradients(ctx, x);
    std::vector<GradientScan> scans;
    for (const HeadPart& part : parts) {
      const TensorState given = state_part(part, before);
      const TensorState dgiven = piece_gradients(part, outputs[0], x, given, call, gradients);
      scans.emplace_back(call.pieces, given, dgiven, part.number);
    }
    for (const HeadPart& part : parts) {
      const TensorState dstate =
          scans[static_cast<std::size_t>(part.number)].finish(state_part(part, owned));
      if (dstate.defined()) add_later_rows(part, x, dstate, call, gradients);
    }
    variable_list all(gradients);
    all.emplace_back();  // of the call, which is no tensor
    return all;
  }

 private:
  static variable_list new_gradients(AutogradContext* ctx, const variable_list& x) {
    const std::int64_t weights_given = ctx->saved_data["weights_given"].toInt();
    variable_list gradients(kInputs);
    // autograd numbers the arguments that were given.
    for (std::size_t i = 0, edge = 0; i < kInputs; ++i) {
      if (i >= 5 && (weights_given >> (i - 5) & 1) == 0) continue;
      const bool wanted = ctx->needs_input_grad(edge++);
      if (i < 3 || wanted) gradients[i] = at::empty_like(x[i]);
    }
    return gradients;
  }

  // Of the piece's own rows; -> that of the state before it.
  static TensorState piece_gradients(const HeadPart& part, const at::Tensor& g,
                                     const variable_list& x, const TensorState& given,
                                     const SequenceCall& call, const variable_list& gradients) {
    const PieceCall piece = causal_call(x, call, part);
    PieceGradients made;
    made.q = part.of_rows(gradients[0]);
    made.k = part.of_keys(gradients[1]);
    made.v = part.of_keys(gradients[2]);
    if (gradients[3].defined()) made.alpha = part.of_rows(gradients[3]);
    if (gradients[4].defined()) made.beta = part.of_keys(gradients[4]);
    made.mix = weight_part(part, gradients[5]);
    made.lln_weight = weight_part(part, gradients[6]);
    made.diag_weight = weight_part(part, gradients[7]);
    made.state = new_state(piece.k, piece.v, call.pieces);
    piece_backward(part.of_rows(g), {}, piece, given, made);
    return made.state;
  }

  // Of the rows of later pieces, on the keys of this one.
  static void add_later_rows(const HeadPart& part, const variable_list& x,
                             const TensorState& dstate, const SequenceCall& call,
                             const variable_list& gradients) {
    const PieceCall keys = keys_call(x[0], x[1], x[2], x[3], x[4], call, part);
    const at::Tensor dk = at::empty_like(keys.k), dv = at::empty_like(keys.v);
    const at::Tensor dbeta = gradients[4].defined() ? at::empty_like(keys.beta) : at::Tensor();
    keys_backward(keys, dstate, dk, dv, dbeta);
    part.of_keys(gradients[1]).add_(dk);
    part.of_keys(gradients[2]).add_(dv);
    if (dbeta.defined()) part.of_keys(gradients[4]).add_(dbeta);
  }
};

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& alpha, const at::Tensor& beta,
                            const CausalWeights& weights, const SequenceCall& call) {
  return CausalFunction::apply(q, k, v, alpha, beta, maybe_weight(weights.mix),
                               maybe_weight(weights.lln_weight), maybe_weight(weights.diag_weight),
                               &call);
}

}  // namespace lln_torch
