// Arguments in the words of the core, outputs allocated for it, and its calls: the rules of a call
// are the core's, and so are the texts of its errors.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/attention.h"

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "lln/error.h"
#include "lln_torch/binding/exec.h"
#include "lln_torch/binding/matching.h"

namespace lln_torch::binding {
namespace {

void check_query_mask(const lln::MaskView& mask, const lln::ConstView& q) {
  if (!mask.given() || (mask.shape[0] == q.shape[0] && mask.shape[1] == q.shape[2])) return;
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   "query_mask has shape [" + std::to_string(mask.shape[0]) + ", " +
                       std::to_string(mask.shape[1]) + "]: expected [" +
                       std::to_string(q.shape[0]) + ", " + std::to_string(q.shape[2]) + "]");
}

// One forward call under way: the core's view of it, and alpha and beta where they were made here.
struct ForwardCall {
  lln::AttentionOptions options;
  lln::AttentionInputs in;
  OptionalTensor alpha;
  OptionalTensor beta;

  ForwardCall(const Arguments& arguments, const Options& words, const ScaleSource& source)
      : options(attention_options(words)), in(attention_inputs(arguments)) {
    const lln::MaskView query_mask = mask_view("query_mask", source.query_mask);
    check_query_mask(query_mask, in.q);
    if (!has_lln()) return;
    if (source.alpha) alpha = number_tensor(arguments.q, *source.alpha, wide_type(in.q.dtype));
    if (source.beta) beta = number_tensor(arguments.q, *source.beta, wide_type(in.q.dtype));
    if (!alpha && !beta && !arguments.alpha && !arguments.beta) match_scales(arguments, source);
    if (alpha) in.alpha = scale_view("alpha", *alpha);
    if (beta) in.beta = scale_view("beta", *beta);
  }

  void match_scales(const Arguments& arguments, const ScaleSource& source) {
    const lln::MatchingInputs sources{.q = in.q,
                                      .k = in.k,
                                      .key_lengths = in.key_lengths,
                                      .key_mask = in.key_mask,
                                      .query_mask = mask_view("query_mask", source.query_mask),
                                      .cu_seqlens_q = in.cu_seqlens_q,
                                      .cu_seqlens_k = in.cu_seqlens_k};
    Scales matched = match(sources, arguments.q,
                           {.mode = lln::parse_matching(source.matching),
                            .causal = options.causal,
                            .feature = options.feature});
    alpha = std::move(matched.alpha);
    beta = std::move(matched.beta);
  }

  bool has_lln() const {
    return options.kind == lln::Kind::lln || options.kind == lln::Kind::lln_diag;
  }

  // Into a new tensor.
  Tensor run(const Arguments& arguments, const lln::AttentionSaved& saved) const {
    Tensor o = new_like(arguments.q, arguments.v.size(3));
    const lln::AttentionOutputs out{view4("o", o), saved};
    lln::Exec exec = attention_exec(arguments);
    const Workspace workspace(arguments.q, exec,
                              [&] { return lln::workspace_bytes(in, out, options, exec); });
    lln::attention_forward(in, out, options, exec);
    return o;
  }
};

// The gradient of one optional argument: a tensor like it and its view, where it is wanted.
struct OptionalGradient {
  Tensor tensor;
  lln::View view;
};

template <class MakeView>
OptionalGradient gradient_of(const char* name, const OptionalTensor& x, bool wanted,
                             const Tensor& like, MakeView&& make_view) {
  if (!x || !wanted) return {no_tensor(like), {}};
  Tensor gradient =
      new_tensor(*x, {x->sizes().data(), static_cast<std::size_t>(x->dim())}, x->scalar_type());
  const lln::View view = make_view(name, gradient);
  return {std::move(gradient), view};
}

}  // namespace

lln::AttentionOptions attention_options(const Options& words) {
  lln::AttentionOptions options;
  lln::parse_kind(words.kind, options.kind, options.diag_block);
  lln::parse_feature(words.feature, options.feature, options.power);
  options.causal = words.causal;
  options.mix = static_cast<float>(words.fixed_mix);
  return options;
}

lln::AttentionInputs attention_inputs(const Arguments& a) {
  lln::AttentionInputs in;
  in.q = view4("q", a.q);
  in.k = view4("k", a.k);
  in.v = view4("v", a.v);
  if (a.alpha) in.alpha = scale_view("alpha", *a.alpha);
  if (a.beta) in.beta = scale_view("beta", *a.beta);
  set_weights(a.mix, a.lln_weight, a.diag_weight, in);
  in.key_lengths = index_view("key_lengths", a.key_lengths);
  in.key_mask = mask_view("key_mask", a.key_mask);
  in.cu_seqlens_q = index_view("cu_seqlens", a.cu_seqlens);
  in.cu_seqlens_k = index_view("cu_seqlens_k", a.cu_seqlens_k);
  return in;
}

lln::Exec attention_exec(const Arguments& a) {
  return exec_for(a.q, a.q.numel() + a.k.numel() + a.v.numel());
}

void set_weights(const OptionalTensor& mix, const OptionalTensor& lln_weight,
                 const OptionalTensor& diag_weight, lln::AttentionInputs& in) {
  if (mix) in.mix = weight_view("mix", *mix);
  if (lln_weight) in.lln_weight = weight_view("lln_weight", *lln_weight);
  if (diag_weight) in.diag_weight = weight_view("diag_weight", *diag_weight);
}

Tensor attention(const Arguments& a, const Options& options, const ScaleSource& source) {
  return ForwardCall(a, options, source).run(a, {});
}

Forward forward(const Arguments& a, const Options& options, const ScaleSource& source,
                bool keep_state) {
  const ForwardCall call(a, options, source);
  Tensor key_lse = no_tensor(a.q);
  Tensor channel_values = no_tensor(a.q);
  lln::AttentionSaved saved;
  if (keep_state && call.has_lln() && !call.options.causal) {
    const ScalarType type = scalar_type(wide_type(call.in.q.dtype));
    const std::int64_t sequences = sequence_count(call.in.q, call.in.cu_seqlens_q);
    const std::int64_t one = 1;
    key_lse = new_tensor(a.q, std::array{sequences, a.k.size(1), one, a.q.size(3)}, type);
    channel_values =
        new_tensor(a.q, std::array{sequences, a.k.size(1), a.q.size(3), a.v.size(3)}, type);
    saved = {view4("key_lse", key_lse), view4("channel_values", channel_values)};
  }
  Tensor o = call.run(a, saved);
  return {o, key_lse, channel_values, call.alpha ? *call.alpha : no_tensor(a.q),
          call.beta ? *call.beta : no_tensor(a.q)};
}

Gradients backward(const Tensor& g, const Arguments& a, const Tensor& key_lse,
                   const Tensor& channel_values, const Options& options, Wanted wanted) {
  const lln::AttentionOptions core = attention_options(options);
  const lln::AttentionInputs in = attention_inputs(a);
  Tensor dq = new_like(a.q, a.q.size(3));
  Tensor dk = new_like(a.k, a.k.size(3));
  Tensor dv = new_like(a.v, a.v.size(3));
  OptionalGradient dalpha = gradient_of("alpha", a.alpha, wanted.scales, a.q, scale_view);
  OptionalGradient dbeta = gradient_of("beta", a.beta, wanted.scales, a.q, scale_view);
  OptionalGradient dmix = gradient_of("mix", a.mix, wanted.weights, a.q, weight_view);
  OptionalGradient dlln = gradient_of("lln_weight", a.lln_weight, wanted.weights, a.q, weight_view);
  OptionalGradient ddiag =
      gradient_of("diag_weight", a.diag_weight, wanted.weights, a.q, weight_view);
  lln::AttentionGradients gradients{.g = view4("g", g),
                                    .dq = view4("dq", dq),
                                    .dk = view4("dk", dk),
                                    .dv = view4("dv", dv),
                                    .dalpha = dalpha.view,
                                    .dbeta = dbeta.view,
                                    .dmix = dmix.view,
                                    .dlln_weight = dlln.view,
                                    .ddiag_weight = ddiag.view};
  if (key_lse.dim() == 4) {
    gradients.saved = {view4("key_lse", key_lse), view4("channel_values", channel_values)};
  }
  lln::Exec exec = attention_exec(a);
  const Workspace workspace(a.q, exec,
                            [&] { return lln::workspace_bytes(in, gradients, core, exec); });
  lln::attention_backward(in, gradients, core, exec);
  return {dq, dk, dv, dalpha.tensor, dbeta.tensor, dmix.tensor, dlln.tensor, ddiag.tensor};
}

}  // namespace lln_torch::binding
