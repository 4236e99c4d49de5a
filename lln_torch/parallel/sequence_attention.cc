// Arguments of a call, alpha and beta from moments of all pieces, and the two forms.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/sequence_attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "lln/error.h"
#include "lln/moments.h"
#include "lln_torch/ops/handles.h"
#include "lln_torch/parallel/sequence_call.h"

namespace lln_torch {
namespace {

[[noreturn]] void refuse_sequence_call(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, "attention over pieces: " + text);
}

// The rules of a call are those of attention over whole sequences, and so are the texts: it is
// tried without tokens, before anything is exchanged.
void check_sequence_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const AttentionCall& call, const Pieces& pieces) {
  for (const at::Tensor* x : {&q, &k, &v}) {
    if (x->defined() && x->dim() == 4 && x->size(2) == pieces.tokens()) continue;
    refuse_sequence_call(fmt::format(
        "q, k and v must be [batch, heads, tokens, dim] with the {} tokens of the piece",
        pieces.tokens()));
  }
  for (const at::Tensor* x : {&call.key_mask, &call.key_lengths, &call.cu_seqlens,
                              &call.cu_seqlens_k, &call.query_mask}) {
    if (x->defined()) refuse_sequence_call("which tokens count is said by Pieces, not by the call");
  }
  const at::NoGradGuard no_graph;
  AttentionCall tried = call;
  for (at::Tensor* x : {&tried.mix, &tried.lln_weight, &tried.diag_weight}) {
    if (x->defined() && x->dim() == 3 && x->size(2) == pieces.tokens()) *x = x->narrow(2, 0, 0);
  }
  if (pieces.cu_seqlens().defined()) tried.cu_seqlens = at::zeros_like(pieces.cu_seqlens());
  attention(q.narrow(2, 0, 0), k.narrow(2, 0, 0), v.narrow(2, 0, 0), tried);
}

at::Tensor piece_argument(const char* name, const at::Tensor& x) {
  check_readable(name, x);
  return with_contiguous_channels(in_autocast_type(x));
}

at::ScalarType type_beside(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A scale as [1 or S, heads].
at::Tensor scale_of_heads(const at::Tensor& q, const at::Tensor& given, double number,
                          std::int64_t heads) {
  if (!given.defined()) return at::full({1, heads}, number, q.options().dtype(type_beside(q)));
  const at::Tensor scale = given.to(type_beside(q));
  return scale.dim() == 2 && scale.size(1) == heads
             ? scale
             : scale.expand({scale.dim() == 2 ? scale.size(0) : 1, heads}).contiguous();
}

MatchedTensors scales_of_call(const at::Tensor& q, const at::Tensor& k, const AttentionCall& call,
                              const Pieces& pieces) {
  const std::string mode = matching_of(call);
  const bool given = call.alpha.defined() || call.fixed_alpha;
  if (given || mode == "none") {
    return {scale_of_heads(q, call.alpha, call.fixed_alpha.value_or(1), q.size(1)),
            scale_of_heads(q, call.beta, call.fixed_beta.value_or(1), k.size(1))};
  }
  const PieceMoments moments = join_moments(q, k, pieces);
  return match_joined(moments.q, moments.k, q, mode, call.causal, call.feature);
}

// A weight as the core takes it, with heads: [heads], [heads, dim_v] or [batch, heads, tokens].
at::Tensor weight_of_heads(const at::Tensor& q, const at::Tensor& x) {
  if (!x.defined()) return x;
  const at::Tensor weight = x.to(type_beside(q));
  return weight.dim() == 0 ? weight.expand({q.size(1)}).contiguous() : weight;
}

// The same beside [batch, heads, tokens, dim_v].
at::Tensor spread_weight(const at::Tensor& x) {
  if (x.dim() == 1) return x.view({1, -1, 1, 1});
  return x.dim() == 2 ? x.unsqueeze(1).unsqueeze(0) : x.unsqueeze(3);
}

at::Tensor mix_parts(const at::Tensor& far, const at::Tensor& near, const CausalWeights& weights,
                     double fixed_mix) {
  if (weights.lln_weight.defined()) {
    return (spread_weight(weights.lln_weight) * far + spread_weight(weights.diag_weight) * near)
        .to(far.scalar_type());
  }
  if (weights.mix.defined()) {
    const at::Tensor mix = spread_weight(weights.mix);
    return (mix * far + (1 - mix) * near).to(far.scalar_type());
  }
  return at::add(far * fixed_mix, near, 1 - fixed_mix);
}

// [parts, S, heads, 3] of disjoint sets to [S, heads, 3] of their union.
at::Tensor join_sets(const at::Tensor& parts) {
  at::Tensor joined = parts[0].clone(at::MemoryFormat::Contiguous);
  auto* const to = joined.mutable_data_ptr<double>();
  for (std::int64_t part = 1; part < parts.size(0); ++part) {
    const at::Tensor added = parts[part].contiguous();
    const auto* const x = added.const_data_ptr<double>();
    for (std::int64_t i = 0; i < joined.numel(); i += 3) {
      const lln::Moments both =
          lln::merge({to[i], to[i + 1], to[i + 2]}, {x[i], x[i + 1], x[i + 2]});
      to[i] = both.count;
      to[i + 1] = both.mean;
      to[i + 2] = both.m2;
    }
  }
  return joined;
}

}  // namespace

PieceMoments join_moments(const at::Tensor& q, const at::Tensor& k, const Pieces& pieces) {
  const auto own = [&](const at::Tensor& x) {
    return piece_moments(x, pieces.key_mask(), pieces.key_lengths(), pieces.cu_seqlens());
  };
  const RankGroup& group = pieces.group();
  at::Tensor both = at::cat({own(q), own(k)}, 1);
  if (group.size() > 1) both = join_sets(group.gather(both.to(group.device())).to(at::kCPU));
  return {both.narrow(1, 0, q.size(1)).contiguous(),
          both.narrow(1, q.size(1), k.size(1)).contiguous()};
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionCall& call, const Pieces& pieces) {
  check_sequence_call(q, k, v, call, pieces);
  if (call.diag_block > 0) pieces.expect_whole_blocks(call.diag_block);
  const at::Tensor rows = piece_argument("q", q), keys = piece_argument("k", k),
                   values = piece_argument("v", v);
  const CausalWeights weights{weight_of_heads(rows, call.mix),
                              weight_of_heads(rows, call.lln_weight),
                              weight_of_heads(rows, call.diag_weight)};
  const bool weighed = weights.mix.defined() || weights.lln_weight.defined();
  const SequenceCall sequence{call.diag_block, call.feature, call.causal, call.fixed_mix, pieces};
  if (call.diag_block > 0 && !weighed && call.fixed_mix == 0) {
    return blocks_attention(rows, keys, values, sequence);
  }
  const auto [alpha, beta] = scales_of_call(rows, keys, call, pieces);
  if (call.causal) return causal_attention(rows, keys, values, alpha, beta, weights, sequence);
  const auto [far, near] = whole_attention(rows, keys, values, alpha, beta, sequence);
  return near.defined() ? mix_parts(far, near, weights, call.fixed_mix) : far;
}

}  // namespace lln_torch
