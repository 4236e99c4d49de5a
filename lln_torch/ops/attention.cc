// What autograd has to know of the core's attention: which tensors it takes, what a backward pass
// keeps, and that there is no second derivative.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/attention.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "lln/error.h"
#include "lln_torch/binding/attention.h"
#include "lln_torch/ops/handles.h"
#include "lln_torch/ops/matching.h"
#include "lln_torch/ops/side_work.h"

namespace lln_torch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tensors that gradients flow to, in the order of apply(), and those that none flow to.
enum DifferentiablePlace : std::size_t { kQ, kK, kV, kAlpha, kBeta, kMix, kLlnWeight, kDiagWeight };
constexpr std::size_t kDifferentiable = 8;
using DifferentiableTensors = std::array<at::Tensor, kDifferentiable>;
// autograd takes arguments that are not given in this form alone.
using MaybeTensor = std::optional<at::Tensor>;
MaybeTensor maybe_given(const at::Tensor& x) {
  return x.defined() ? MaybeTensor(x) : MaybeTensor();
}
enum FixedPlace : std::size_t { kKeyLengths, kKeyMask, kCuSeqlens, kCuSeqlensK };
constexpr std::size_t kFixed = 4;

// The rest of one call.
struct CallOptions {
  std::array<at::Tensor, kFixed> tensors;
  std::string kind, feature;
  bool causal = false;
  double fixed_mix = 0.5;
  std::shared_ptr<StateAgain> state_again;
  binding::Options binding_options() const { return {kind, causal, fixed_mix, feature}; }
};
struct CallScales {
  std::string matching;
  at::Tensor query_mask;
  std::optional<double> alpha, beta;
};

// The tensors of a call as the binding takes them.
struct BoundArguments {
  binding::Tensor q, k, v;
  std::array<binding::OptionalTensor, 5> beside;  // alpha to diag_weight
  std::array<binding::OptionalTensor, kFixed> fixed;

  BoundArguments(const at::Tensor* x, const at::Tensor* others)
      : q(to_binding("q", x[kQ])), k(to_binding("k", x[kK])), v(to_binding("v", x[kV])) {
    static constexpr std::array<const char*, 5> kBeside{"alpha", "beta", "mix", "lln_weight",
                                                        "diag_weight"};
    static constexpr std::array<const char*, kFixed> kOthers{"key_lengths", "key_mask",
                                                             "cu_seqlens", "cu_seqlens_k"};
    for (std::size_t i = 0; i < beside.size(); ++i) {
      beside[i] = to_binding_optional(kBeside[i], x[kAlpha + i]);
    }
    for (std::size_t i = 0; i < fixed.size(); ++i) {
      fixed[i] = to_binding_optional(kOthers[i], others[i]);
    }
  }
  binding::Arguments arguments() const {
    return {q,         k,         v,        beside[0], beside[1], beside[2],
            beside[3], beside[4], fixed[0], fixed[1],  fixed[2],  fixed[3]};
  }
};

at::Tensor run_without_gradients(const DifferentiableTensors& x, const CallOptions& options,
                                 const CallScales& scales) {
  const BoundArguments bound(x.data(), options.tensors.data());
  const binding::OptionalTensor query_mask = to_binding_optional("query_mask", scales.query_mask);
  return from_binding(binding::attention(bound.arguments(), options.binding_options(),
                                         {scales.matching, query_mask, scales.alpha, scales.beta}));
}

// The gradients of all differentiable tensors; not defined where they are not wanted. `saved` are
// those tensors, the others, key_lse and channel_values.
variable_list gradients_of(const at::Tensor& g, const variable_list& saved,
                           const binding::Options& options,
                           const std::array<bool, kDifferentiable>& wanted) {
  const BoundArguments bound(saved.data(), saved.data() + kDifferentiable);
  const at::Tensor* state = saved.data() + kDifferentiable + kFixed;
  const binding::Gradients found = binding::backward(
      to_binding("g", with_contiguous_channels(g)), bound.arguments(),
      to_binding("key_lse", state[0]), to_binding("channel_values", state[1]), options,
      {.scales = wanted[kAlpha] || wanted[kBeta],
       .weights = wanted[kMix] || wanted[kLlnWeight] || wanted[kDiagWeight]});
  const std::array<const binding::Tensor*, kDifferentiable> all{
      &found.q,    &found.k,   &found.v,          &found.alpha,
      &found.beta, &found.mix, &found.lln_weight, &found.diag_weight};
  variable_list gradients(kDifferentiable);
  for (std::size_t i = 0; i < kDifferentiable; ++i) {
    if (wanted[i]) gradients[i] = from_binding(*all[i]);
  }
  return gradients;
}

// Gradients that refuse to be differentiated, for backward passes that build a graph. Without it
// they would be constants there, and a second derivative silently wrong.
struct FinalGradients : torch::autograd::Function<FinalGradients> {
  // Of the wanted ones alone: a function has no outputs that are not defined.
  static variable_list forward(AutogradContext*, const at::Tensor& g, const at::Tensor& /*q*/,
                               const at::Tensor& /*k*/, const at::Tensor& /*v*/,
                               const MaybeTensor& /*alpha*/, const MaybeTensor& /*beta*/,
                               const MaybeTensor& /*mix*/, const MaybeTensor& /*lln_weight*/,
                               const MaybeTensor& /*diag_weight*/, const variable_list* saved,
                               const binding::Options* options,
                               const std::array<bool, kDifferentiable>* wanted) {
    variable_list gradients = gradients_of(g, *saved, *options, *wanted);
    std::erase_if(gradients, [](const at::Tensor& x) { return !x.defined(); });
    return gradients;
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     "gradients of gradients of LLN attention are not available");
  }
};

constexpr const char* kStateAgain = "state_again";
struct StateHolder : torch::CustomClassHolder {
  explicit StateHolder(std::shared_ptr<StateAgain> given) : again(std::move(given)) {}
  std::shared_ptr<StateAgain> again;
};

// The state in its place among the saved tensors, where it was made again.
void take_state_again(AutogradContext& ctx, variable_list& saved) {
  const auto found = ctx.saved_data.find(kStateAgain);
  if (found == ctx.saved_data.end()) return;
  const TensorState state =
      c10::static_intrusive_pointer_cast<StateHolder>(found->second.toCapsule())->again->take();
  if (!state.defined()) return;
  saved[kDifferentiable + kFixed] = state.lse;
  saved[kDifferentiable + kFixed + 1] = state.values;
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const MaybeTensor& alpha, const MaybeTensor& beta,
                            const MaybeTensor& mix, const MaybeTensor& lln_weight,
                            const MaybeTensor& diag_weight, const CallOptions* options,
                            const CallScales* scales) {
    variable_list saved{q, k, v};
    std::int64_t given = 0b111;  // a bit for each place
    for (const MaybeTensor* x : {&alpha, &beta, &mix, &lln_weight, &diag_weight}) {
      if (*x) given |= std::int64_t{1} << saved.size();
      saved.push_back(x->value_or(at::Tensor()));
    }
    saved.insert(saved.end(), options->tensors.begin(), options->tensors.end());
    const BoundArguments bound(saved.data(), saved.data() + kDifferentiable);
    const binding::OptionalTensor query_mask =
        to_binding_optional("query_mask", scales->query_mask);
    const binding::Forward found =
        binding::forward(bound.arguments(), options->binding_options(),
                         {scales->matching, query_mask, scales->alpha, scales->beta},
                         /*keep_state=*/options->state_again == nullptr);
    // Matched, or numbers.
    if (!alpha) saved[kAlpha] = from_binding_optional(found.alpha);
    if (!beta) saved[kBeta] = from_binding_optional(found.beta);
    saved.push_back(from_binding(found.key_lse));
    saved.push_back(from_binding(found.channel_values));
    if (options->state_again) {
      options->state_again->remember({.q = q,
                                      .k = k,
                                      .v = v,
                                      .alpha = saved[kAlpha],
                                      .beta = saved[kBeta],
                                      .key_lengths = options->tensors[kKeyLengths],
                                      .key_mask = options->tensors[kKeyMask],
                                      .feature = options->feature});
      ctx->saved_data[kStateAgain] =
          c10::IValue::make_capsule(c10::make_intrusive<StateHolder>(options->state_again));
    }
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["given"] = given;
    ctx->saved_data["kind"] = options->kind;
    ctx->saved_data["feature"] = options->feature;
    ctx->saved_data["causal"] = options->causal;
    ctx->saved_data["fixed_mix"] = options->fixed_mix;
    return from_binding(found.o);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    variable_list gradients(kDifferentiable + 2);
    const at::Tensor& g = outputs[0];
    if (!g.defined()) return gradients;
    variable_list saved = ctx->get_saved_variables();
    take_state_again(*ctx, saved);
    // autograd numbers the arguments that were given.
    std::array<bool, kDifferentiable> wanted{};
    const std::int64_t given = ctx->saved_data["given"].toInt();
    for (std::size_t i = 0, edge = 0; i < kDifferentiable; ++i) {
      if ((given >> i & 1) != 0) wanted[i] = ctx->needs_input_grad(edge++);
    }
    const std::string kind = ctx->saved_data["kind"].toStringRef();
    const std::string feature = ctx->saved_data["feature"].toStringRef();
    const binding::Options options{kind, ctx->saved_data["causal"].toBool(),
                                   ctx->saved_data["fixed_mix"].toDouble(), feature};
    if (!at::GradMode::is_enabled()) {
      std::ranges::copy(gradients_of(g, saved, options, wanted), gradients.begin());
      return gradients;
    }
    const variable_list found = FinalGradients::apply(
        g, saved[kQ], saved[kK], saved[kV], maybe_given(saved[kAlpha]), maybe_given(saved[kBeta]),
        maybe_given(saved[kMix]), maybe_given(saved[kLlnWeight]), maybe_given(saved[kDiagWeight]),
        &saved, &options, &wanted);
    for (std::size_t i = 0, next = 0; i < kDifferentiable; ++i) {
      if (wanted[i]) gradients[i] = found[next++];
    }
    return gradients;
  }
};

void refuse_tangents(const DifferentiableTensors& x) {
  for (const at::Tensor& tensor : x) {
    if (tensor.defined() && tensor._fw_grad(0).defined()) {
      throw lln::Error(lln::ErrorCode::unsupported,
                       "LLN attention has no derivatives in forward mode: use backward()");
    }
  }
}

at::Tensor run_call(const DifferentiableTensors& x, const CallOptions& options,
                    const CallScales& scales) {
  refuse_tangents(x);
  const auto needs_gradient = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  if (!at::GradMode::is_enabled() || std::ranges::none_of(x, needs_gradient)) {
    return run_without_gradients(x, options, scales);
  }
  return AttentionFunction::apply(
      x[kQ], x[kK], x[kV], maybe_given(x[kAlpha]), maybe_given(x[kBeta]), maybe_given(x[kMix]),
      maybe_given(x[kLlnWeight]), maybe_given(x[kDiagWeight]), &options, &scales);
}

at::Tensor prepared(const char* name, const at::Tensor& x) {
  check_readable(name, x);
  return with_contiguous_channels(in_autocast_type(x));
}

// A scale or a weight in the type that it has beside tensors of the type of q.
at::Tensor beside(const at::Tensor& q, const at::Tensor& x) {
  if (!x.defined() || !q.defined()) return x;
  return x.to(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

CallOptions call_options(const AttentionCall& call) {
  return {.tensors = {call.key_lengths, call.key_mask, call.cu_seqlens, call.cu_seqlens_k},
          .feature = call.feature,
          .causal = call.causal,
          .fixed_mix = call.fixed_mix,
          .state_again = call.state_again};
}

[[noreturn]] void refuse_call(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, text);
}

// What the core cannot see: that a request leaves out what another part of it is for.
void check_call(const AttentionCall& call) {
  if (call.diag_block == 0) {
    const bool mix = call.mix.defined();
    if (mix || call.lln_weight.defined() || call.diag_weight.defined()) {
      refuse_call(std::string(mix ? "mix is" : "lln_weight or diag_weight is") +
                  " given, and LLN alone (diag_block 0) has nothing to mix");
    }
  }
  const bool diag_alone = call.diag_block != 0 && call.fixed_mix == 0;
  if (call.state_again && (call.causal || diag_alone || call.cu_seqlens.defined())) {
    refuse_call("state_again is for bidirectional calls with LLN whose sequences are not packed");
  }
  if ((call.fixed_alpha && call.alpha.defined()) || (call.fixed_beta && call.beta.defined())) {
    refuse_call("a scale is given as a tensor and as a number: give one");
  }
}

}  // namespace

std::string matching_of(const AttentionCall& call) {
  if (call.matching != "auto") return call.matching;
  return call.feature == "exp" ? "per_head" : "none";
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionCall& call) {
  check_call(call);
  CallOptions options = call_options(call);
  DifferentiableTensors x{prepared("q", q), prepared("k", k), prepared("v", v)};
  CallScales scales{.matching = matching_of(call), .query_mask = call.query_mask};
  x[kMix] = beside(x[kQ], call.mix);
  x[kLlnWeight] = beside(x[kQ], call.lln_weight);
  x[kDiagWeight] = beside(x[kQ], call.diag_weight);
  const bool weighed = x[kMix].defined() || x[kLlnWeight].defined() || x[kDiagWeight].defined();
  const std::string block = std::to_string(call.diag_block);
  if (call.diag_block != 0 && !weighed && call.fixed_mix == 0) {
    options.kind = "diag" + block;
  } else {
    options.kind = call.diag_block == 0 ? "lln" : "lln+diag" + block;
    x[kAlpha] = beside(x[kQ], call.alpha);
    x[kBeta] = beside(x[kQ], call.beta);
    scales.alpha = call.fixed_alpha;
    scales.beta = call.fixed_beta;
  }
  return run_call(x, options, scales);
}

at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionCall& call) {
  CallOptions options = call_options(call);
  options.kind = "softmax";
  options.feature = "exp";
  return run_call({prepared("q", q), prepared("k", k), prepared("v", v)}, options,
                  {.matching = "none"});
}

std::pair<at::Tensor, at::Tensor> match(const at::Tensor& q, const at::Tensor& k,
                                        const AttentionCall& call) {
  return match_moments(in_autocast_type(q), in_autocast_type(k),
                       {.mode = matching_of(call),
                        .tokens = {.key_mask = call.key_mask,
                                   .key_lengths = call.key_lengths,
                                   .query_mask = call.query_mask,
                                   .cu_seqlens = call.cu_seqlens,
                                   .cu_seqlens_k = call.cu_seqlens_k},
                        .causal = call.causal});
}

}  // namespace lln_torch
