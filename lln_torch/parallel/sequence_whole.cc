// Bidirectional attention over pieces: states are merged, rows read the whole; back, the gradients
// of the merged state are summed, and each rank passes its share to its keys. Block-diagonal
// attention needs no other rank, and is computed while sums travel.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "lln_torch/parallel/sequence_call.h"
#include "lln_torch/parallel/state_exchange.h"

namespace lln_torch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

PieceCall diag_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const SequenceCall& call) {
  PieceCall made;
  made.q = q;
  made.k = k;
  made.v = v;
  made.key_lengths = call.pieces.key_lengths();
  made.key_mask = call.pieces.key_mask();
  made.cu_seqlens = call.pieces.cu_seqlens();
  made.block_origins = call.pieces.block_origins();
  made.kind = "diag" + std::to_string(call.diag_block);
  made.causal = call.causal;
  return made;
}

PieceGradients diag_gradients(const at::Tensor& g, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const SequenceCall& call) {
  PieceGradients gradients;
  gradients.q = at::empty_like(q);
  gradients.k = at::empty_like(k);
  gradients.v = at::empty_like(v);
  piece_backward(g, {}, diag_call(q, k, v, call), {}, gradients);
  return gradients;
}

struct BlocksFunction : torch::autograd::Function<BlocksFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const SequenceCall* call) {
    const at::Tensor o = rows_like(q, v);
    piece_forward(diag_call(q, k, v, *call), {}, o, {});
    ctx->save_for_backward({q, k, v});
    keep_call(*ctx, *call);
    return o;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    const SequenceCall& call = kept_call(*ctx);
    const variable_list x = ctx->get_saved_variables();
    const PieceGradients found = diag_gradients(outputs[0], x[0], x[1], x[2], call);
    return {found.q, found.k, found.v, {}};
  }
};

struct WholeFunction : torch::autograd::Function<WholeFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& alpha, const at::Tensor& beta,
                               const SequenceCall* given) {
    const SequenceCall& call = *given;
    const std::vector<HeadPart> parts = head_parts(q.size(1), k.size(1));
    std::vector<StateMerge> merges;
    std::vector<TensorState> own, all;
    for (const HeadPart& part : parts) {
      own.push_back(state_of_keys(keys_call(q, k, v, alpha, beta, call, part), call.pieces));
      merges.emplace_back(call.pieces, own.back());
    }
    for (StateMerge& merge : merges) merge.begin_sum();
    variable_list outputs = {rows_like(q, v)};
    if (call.diag_block > 0) {
      outputs.push_back(rows_like(q, v));
      piece_forward(diag_call(q, k, v, call), {}, outputs[1], {});
    }
    std::vector<at::Tensor> shares;
    for (const HeadPart& part : parts) {
      const StateMerge::Merged merged = merges[static_cast<std::size_t>(part.number)].finish();
      all.push_back(merged.all);
      shares.push_back(merged.share);
      piece_forward(rows_call(q, k, v, alpha, beta, call, part), merged.all,
                    part.of_rows(outputs[0]), {});
    }
    const TensorState owned = join_states(own), merged = join_states(all);
    ctx->save_for_backward({q, k, v, alpha, beta, owned.lse, owned.values, merged.lse,
                            merged.values, at::cat(shares, 1)});
    keep_call(*ctx, call);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    const SequenceCall& call = kept_call(*ctx);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &alpha = saved[3],
                     &beta = saved[4];
    const TensorState owned{saved[5], saved[6]}, merged{saved[7], saved[8]};
    const std::vector<HeadPart> parts = head_parts(q.size(1), k.size(1));
    const at::Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
    const at::Tensor dalpha = ctx->needs_input_grad(3) ? at::empty_like(alpha) : at::Tensor();
    const at::Tensor dbeta = ctx->needs_input_grad(4) ? at::empty_like(beta) : at::Tensor();
    std::vector<StateGradientSum> sums;
    for (const HeadPart& part : parts) {
      sums.emplace_back(call.pieces, rows_backward(part, outputs[0], saved, call, dq, dalpha));
    }
    // Of Diag, meanwhile.
    PieceGradients diag;
    if (call.diag_block > 0) diag = diag_gradients(outputs[1], q, k, v, call);
    for (const HeadPart& part : parts) {
      const TensorState dall = sums[static_cast<std::size_t>(part.number)].finish();
      const TensorState own = state_part(part, owned), all = state_part(part, merged);
      const at::Tensor share = part.of_keys(saved[9]).transpose(2, 3);
      const at::Tensor dc = dall.lse.transpose(2, 3) +
                            ((own.values - all.values) * dall.values).sum(3, /*keepdim=*/true);
      keys_backward(keys_call(q, k, v, alpha, beta, call, part),
                    {(share * dc).transpose(2, 3).contiguous(), share * dall.values},
                    part.of_keys(dk), part.of_keys(dv),
                    dbeta.defined() ? part.of_keys(dbeta) : dbeta);
    }
    if (call.diag_block > 0) {
      dq.add_(diag.q);
      dk.add_(diag.k);
      dv.add_(diag.v);
    }
    return {dq, dk, dv, dalpha, dbeta, {}};
  }

 private:
  // dL/d of the state that the rows of a part read; dq and dalpha into their part of these.
  static TensorState rows_backward(const HeadPart& part, const at::Tensor& g,
                                   const variable_list& saved, const SequenceCall& call,
                                   const at::Tensor& dq, const at::Tensor& dalpha) {
    const PieceCall rows = rows_call(saved[0], saved[1], saved[2], saved[3], saved[4], call, part);
    PieceGradients gradients;
    gradients.q = part.of_rows(dq);
    gradients.k = at::empty_like(rows.k);
    gradients.v = at::empty_like(rows.v);
    if (dalpha.defined()) gradients.alpha = part.of_rows(dalpha);
    gradients.state = new_state(rows.k, rows.v, call.pieces);
    piece_backward(part.of_rows(g), {}, rows, state_part(part, {saved[7], saved[8]}), gradients);
    return gradients.state;
  }
};

}  // namespace

at::Tensor blocks_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const SequenceCall& call) {
  return BlocksFunction::apply(q, k, v, &call);
}

std::pair<at::Tensor, at::Tensor> whole_attention(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const at::Tensor& alpha,
                                                  const at::Tensor& beta,
                                                  const SequenceCall& call) {
  const variable_list outputs = WholeFunction::apply(q, k, v, alpha, beta, &call);
  return {outputs[0], outputs.size() > 1 ? outputs[1] : at::Tensor()};
}

}  // namespace lln_torch
