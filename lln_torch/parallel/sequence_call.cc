// Calls of the core for parts of a piece.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/sequence_call.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include "lln/error.h"

namespace lln_torch {
namespace {

struct HeldCall : torch::CustomClassHolder {
  explicit HeldCall(const SequenceCall& given) : call(given) {}
  SequenceCall call;
};

// As many packed sequences, without tokens; not defined where nothing is packed.
at::Tensor no_tokens(const at::Tensor& cu_seqlens) {
  return cu_seqlens.defined() ? at::zeros_like(cu_seqlens) : at::Tensor();
}

PieceCall part_call(const at::Tensor& alpha, const at::Tensor& beta, const SequenceCall& call,
                    const HeadPart& part) {
  PieceCall made;
  made.alpha = part.of_rows(alpha);
  made.beta = part.of_keys(beta);
  made.feature = call.feature;
  return made;
}

}  // namespace

void keep_call(torch::autograd::AutogradContext& ctx, const SequenceCall& call) {
  ctx.saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<HeldCall>(call));
}

const SequenceCall& kept_call(torch::autograd::AutogradContext& ctx) {
  if (at::GradMode::is_enabled()) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     "gradients of gradients of LLN attention are not available");
  }
  return static_cast<const HeldCall&>(*ctx.saved_data["call"].toCapsule()).call;
}

std::vector<HeadPart> head_parts(std::int64_t heads, std::int64_t heads_k) {
  const std::int64_t group = heads / heads_k, half = heads_k / 2;
  if (half == 0) return {{0, heads_k, group, 0}};
  return {{0, half, group, 0}, {half, heads_k - half, group, 1}};
}

TensorState state_part(const HeadPart& part, const TensorState& state) {
  return {part.of_keys(state.lse), part.of_keys(state.values)};
}

TensorState join_states(const std::vector<TensorState>& parts) {
  std::vector<at::Tensor> lse, values;
  for (const TensorState& part : parts) {
    lse.push_back(part.lse);
    values.push_back(part.values);
  }
  return {at::cat(lse, 1), at::cat(values, 1)};
}

TensorState new_state(const at::Tensor& k, const at::Tensor& v, const Pieces& pieces) {
  const at::Tensor& cu = pieces.cu_seqlens();
  const std::int64_t sequences = cu.defined() ? cu.numel() - 1 : k.size(0);
  const auto options = k.options().dtype(k.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return {at::empty({sequences, k.size(1), 1, k.size(3)}, options),
          at::empty({sequences, k.size(1), k.size(3), v.size(3)}, options)};
}

at::Tensor rows_like(const at::Tensor& q, const at::Tensor& v) {
  const std::int64_t batch = q.size(0), heads = q.size(1), tokens = q.size(2), dim = v.size(3);
  if (q.stride(1) >= q.stride(2)) return at::empty({batch, heads, tokens, dim}, q.options());
  return at::empty({batch, tokens, heads, dim}, q.options()).transpose(1, 2);
}

PieceCall keys_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& alpha, const at::Tensor& beta, const SequenceCall& call,
                    const HeadPart& part) {
  PieceCall made = part_call(alpha, beta, call, part);
  made.q = part.of_rows(q).narrow(2, 0, 0);
  made.k = part.of_keys(k);
  made.v = part.of_keys(v);
  made.key_lengths = call.pieces.key_lengths();
  made.key_mask = call.pieces.key_mask();
  made.cu_seqlens = no_tokens(call.pieces.cu_seqlens());
  made.cu_seqlens_k = call.pieces.cu_seqlens();
  return made;
}

PieceCall rows_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& alpha, const at::Tensor& beta, const SequenceCall& call,
                    const HeadPart& part) {
  PieceCall made = part_call(alpha, beta, call, part);
  made.q = part.of_rows(q);
  made.k = part.of_keys(k).narrow(2, 0, 0);
  made.v = part.of_keys(v).narrow(2, 0, 0);
  made.cu_seqlens = call.pieces.cu_seqlens();
  made.cu_seqlens_k = no_tokens(call.pieces.cu_seqlens());
  return made;
}

TensorState state_of_keys(const PieceCall& keys, const Pieces& pieces) {
  const TensorState state = new_state(keys.k, keys.v, pieces);
  const at::Tensor no_rows =
      at::empty({keys.q.size(0), keys.q.size(1), 0, keys.v.size(3)}, keys.q.options());
  piece_forward(keys, {}, no_rows, state);
  return state;
}

void keys_backward(const PieceCall& keys, const TensorState& gradient, const at::Tensor& dk,
                   const at::Tensor& dv, const at::Tensor& dbeta) {
  PieceGradients gradients;
  gradients.q = at::empty_like(keys.q);
  gradients.k = dk;
  gradients.v = dv;
  gradients.beta = dbeta;
  const at::Tensor no_rows =
      at::empty({keys.q.size(0), keys.q.size(1), 0, keys.v.size(3)}, keys.q.options());
  piece_backward(no_rows, gradient, keys, {}, gradients);
}

}  // namespace lln_torch
