// attention, forward and backward. Outputs are allocated here and written by the core; what a call
// does not have (a state that the causal form does not save, gradients of arguments that were not
// given) comes back as a tensor without elements.
// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.h"

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "lln/error.h"
#include "ops/errors.h"
#include "ops/exec.h"

namespace lln_torch {
namespace {

// The tensors of a call that all passes take.
struct Arguments {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const OptionalTensor& alpha;
  const OptionalTensor& beta;
  const OptionalTensor& mix;
  const OptionalTensor& diag_weight;
  const OptionalTensor& keys;
  const OptionalTensor& cu_seqlens;
  const OptionalTensor& cu_seqlens_k;
};

lln::AttentionInputs inputs_of(const Arguments& a) {
  lln::AttentionInputs in;
  in.q = view4("q", a.q);
  in.k = view4("k", a.k);
  in.v = view4("v", a.v);
  if (a.alpha) in.alpha = scale_view("alpha", *a.alpha);
  if (a.beta) in.beta = scale_view("beta", *a.beta);
  set_weights(a.mix, a.diag_weight, in);
  set_keys(a.keys, in.key_lengths, in.key_mask);
  in.cu_seqlens_q = index_view("cu_seqlens", a.cu_seqlens);
  in.cu_seqlens_k = index_view("cu_seqlens_k", a.cu_seqlens_k);
  return in;
}

lln::Exec exec_of(const Arguments& a) {
  return exec_for(a.q, a.q.numel() + a.k.numel() + a.v.numel());
}

// Where alpha and beta come from that are no tensors: numbers, or the mode of matching.
struct ScaleSource {
  const std::string& matching;
  const OptionalTensor& query_mask;
  std::optional<double> alpha;
  std::optional<double> beta;
};

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

  ForwardCall(const Arguments& arguments, const std::string& kind, bool causal, double fixed_mix,
              const std::string& feature, const ScaleSource& source)
      : options(attention_options(kind, causal, fixed_mix, feature)), in(inputs_of(arguments)) {
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
    lln::Exec exec = exec_of(arguments);
    const Workspace workspace(arguments.q, exec, [&] {
      return lln::workspace_bytes(lln::make_problem(in, out, options), exec);
    });
    lln::attention_forward(in, out, options, exec);
    return o;
  }
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
                 const OptionalTensor& beta, const OptionalTensor& mix,
                 const OptionalTensor& diag_weight, const OptionalTensor& keys,
                 const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                 const std::string& kind, bool causal, double fixed_mix, const std::string& feature,
                 const std::string& matching, const OptionalTensor& query_mask,
                 std::optional<double> fixed_alpha, std::optional<double> fixed_beta) {
  const Arguments arguments{q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k};
  const ScaleSource source{matching, query_mask, fixed_alpha, fixed_beta};
  return translate_errors([&] {
    return ForwardCall(arguments, kind, causal, fixed_mix, feature, source).run(arguments, {});
  });
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
                const OptionalTensor& beta, const OptionalTensor& mix,
                const OptionalTensor& diag_weight, const OptionalTensor& keys,
                const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                const std::string& kind, bool causal, double fixed_mix, const std::string& feature,
                const std::string& matching, const OptionalTensor& query_mask,
                std::optional<double> fixed_alpha, std::optional<double> fixed_beta) {
  const Arguments arguments{q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k};
  const ScaleSource source{matching, query_mask, fixed_alpha, fixed_beta};
  return translate_errors([&]() -> Forward {
    const ForwardCall call(arguments, kind, causal, fixed_mix, feature, source);
    Tensor key_lse = no_tensor(q);
    Tensor channel_values = no_tensor(q);
    lln::AttentionSaved saved;
    if (call.has_lln() && !causal) {
      const ScalarType type = scalar_type(wide_type(call.in.q.dtype));
      const std::int64_t sequences = sequence_count(call.in.q, call.in.cu_seqlens_q);
      const std::int64_t one = 1;
      key_lse = new_tensor(q, std::array{sequences, k.size(1), one, q.size(3)}, type);
      channel_values = new_tensor(q, std::array{sequences, k.size(1), q.size(3), v.size(3)}, type);
      saved = {view4("key_lse", key_lse), view4("channel_values", channel_values)};
    }
    Tensor o = call.run(arguments, saved);
    return {o, key_lse, channel_values, call.alpha ? *call.alpha : no_tensor(q),
            call.beta ? *call.beta : no_tensor(q)};
  });
}

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

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                  const OptionalTensor& alpha, const OptionalTensor& beta,
                  const OptionalTensor& mix, const OptionalTensor& diag_weight,
                  const OptionalTensor& keys, const OptionalTensor& cu_seqlens,
                  const OptionalTensor& cu_seqlens_k, const Tensor& key_lse,
                  const Tensor& channel_values, const std::string& kind, bool causal,
                  double fixed_mix, const std::string& feature, bool scales_wanted,
                  bool weights_wanted) {
  const Arguments arguments{q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k};
  return translate_errors([&]() -> Backward {
    const lln::AttentionOptions options = attention_options(kind, causal, fixed_mix, feature);
    const lln::AttentionInputs in = inputs_of(arguments);
    Tensor dq = new_like(q, q.size(3));
    Tensor dk = new_like(k, k.size(3));
    Tensor dv = new_like(v, v.size(3));
    OptionalGradient dalpha = gradient_of("alpha", alpha, scales_wanted, q, scale_view);
    OptionalGradient dbeta = gradient_of("beta", beta, scales_wanted, q, scale_view);
    OptionalGradient dmix = gradient_of("mix", mix, weights_wanted, q, weight_view);
    OptionalGradient ddiag =
        gradient_of("diag_weight", diag_weight, weights_wanted, q, weight_view);
    lln::AttentionGradients gradients{.g = view4("g", g),
                                      .dq = view4("dq", dq),
                                      .dk = view4("dk", dk),
                                      .dv = view4("dv", dv),
                                      .dalpha = dalpha.view,
                                      .dbeta = dbeta.view,
                                      .ddiag_weight = ddiag.view};
    (diag_weight ? gradients.dlln_weight : gradients.dmix) = dmix.view;
    if (key_lse.dim() == 4) {
      gradients.saved = {view4("key_lse", key_lse), view4("channel_values", channel_values)};
    }
    lln::Exec exec = exec_of(arguments);
    const Workspace workspace(q, exec, [&] {
      return lln::workspace_bytes(lln::make_problem(in, gradients, options), exec);
    });
    lln::attention_backward(in, gradients, options, exec);
    return {dq, dk, dv, dalpha.tensor, dbeta.tensor, dmix.tensor, ddiag.tensor};
  });
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

}  // namespace

lln::AttentionOptions attention_options(const std::string& kind, bool causal, double mix,
                                        const std::string& feature) {
  lln::AttentionOptions options;
  lln::parse_kind(kind, options.kind, options.diag_block);
  lln::parse_feature(feature, options.feature, options.power);
  options.causal = causal;
  options.mix = static_cast<float>(mix);
  return options;
}

void set_weights(const OptionalTensor& mix, const OptionalTensor& diag_weight,
                 lln::AttentionInputs& in) {
  if (diag_weight) {
    in.diag_weight = weight_view("diag_weight", *diag_weight);
    if (mix) in.lln_weight = weight_view("lln_weight", *mix);
  } else if (mix) {
    in.mix = weight_view("mix", *mix);
  }
}

STABLE_TORCH_LIBRARY_IMPL(lln, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(lln, CUDA, m) { register_kernels(m); }

}  // namespace lln_torch
