// Validation of calls. Nothing is written before all rules hold; a kernel may assume them all.
// SPDX-License-Identifier: Apache-2.0
#include "api/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "api/faults.h"
#include "api/sequences.h"

namespace lln {
namespace {

// Of a state of keys, for texts.
struct StateNames {
  const char* both;
  const char* key_lse;
  const char* channel_values;
};
constexpr StateNames kState{"state", "state.key_lse", "state.channel_values"};
constexpr StateNames kSaved{"saved", "saved.key_lse", "saved.channel_values"};
constexpr StateNames kSavedGradient{"dsaved", "dsaved.key_lse", "dsaved.channel_values"};
constexpr StateNames kStateGradient{"dstate", "dstate.key_lse", "dstate.channel_values"};

AttentionState readable(const AttentionSaved& saved) {
  return {saved.key_lse, saved.channel_values};
}

class Checker {
 public:
  Checker(const AttentionInputs& in, const AttentionOptions& options, Op op)
      : in_(in), options_(options) {
    Problem& p = problem_;
    p.op = op;
    p.dtype = in.q.dtype;
    p.device = in.q.device;
    p.batch = in.q.shape[0];
    p.heads = in.q.shape[1];
    p.tokens = in.q.shape[2];
    p.dim = in.q.shape[3];
    p.heads_k = in.k.shape[1];
    p.tokens_k = in.k.shape[2];
    p.dim_v = in.v.shape[3];
    p.kind = options.kind;
    p.diag_block = p.has_diag() ? options.diag_block : 0;
    p.causal = options.causal;
    p.masked = in.key_lengths.given() || in.key_mask.given();
    p.packed = in.cu_seqlens_q.given() || in.cu_seqlens_k.given();
    p.sequences = p.packed ? std::max<std::int64_t>(in.cu_seqlens_q.count - 1, 0) : p.batch;
    p.feature = options.feature;
    if (p.feature == Feature::power) p.power = options.power;
    p.state = in.state.given();
    p.block_origins = in.block_origins.given();
  }

  // A call of a decode state, whose configuration says what the shapes must be.
  Checker(DecodeVerb verb, const DecodeConfig& config, const AttentionInputs& in,
          const AttentionOptions& options)
      : Checker(in, options, verb == DecodeVerb::append ? Op::append : Op::step) {
    rows_ = verb != DecodeVerb::append || in.q.given();
    keys_ = verb != DecodeVerb::read;
    const ConstView& first = keys_ ? in.k : in.q;
    Problem& p = problem_;
    p.dtype = first.dtype;
    p.device = first.device;
    p.batch = p.sequences = config.batch;
    p.heads = config.heads;
    p.heads_k = config.heads_k;
    p.dim = config.dim;
    p.dim_v = config.dim_v;
    p.tokens_k = keys_ ? in.k.shape[2] : 0;
    p.tokens = !rows_ ? 0 : keys_ ? p.tokens_k : in.q.shape[2];
    p.packed = false;
    p.masked = in.key_lengths.given();
    p.state = p.block_origins = false;
  }

  void check_inputs() {
    const Problem& p = problem_;
    if (rows_) input("q", in_.q, {p.batch, p.heads, p.tokens, p.dim});
    if (keys_) input("k", in_.k, {p.batch, p.heads_k, p.tokens_k, p.dim});
    if (keys_) input("v", in_.v, {p.batch, p.heads_k, p.tokens_k, p.dim_v});
    for (std::string& fault : problem_faults(p)) faults_.add(std::move(fault));
    if (p.has_lln() && rows_) parameter("alpha", in_.alpha, p.heads);
    if (p.has_lln() && keys_) parameter("beta", in_.beta, p.heads_k);
    if (p.kind == Kind::lln_diag && rows_) check_weights();
    if (in_.key_lengths.given() && in_.key_mask.given()) {
      fault("key_lengths and key_mask are both given: give one");
    }
    if (in_.key_lengths.given()) {
      faults_.lengths("key_lengths", in_.key_lengths, p.batch, p.tokens_k, p.device);
    }
    if (in_.key_mask.given()) {
      faults_.mask("key_mask", in_.key_mask, p.batch, p.tokens_k, p.device);
    }
    if (p.packed) check_packing();
    if (p.block_origins) {
      faults_.list("block_origins", in_.block_origins, p.sequences, "sequence", p.device);
    }
    state_input(kState, in_.state);
  }

  // A state, or its gradient, that is read.
  void state_input(const StateNames& names, const AttentionState& state) {
    if (!goes_together(names, state)) return;
    const Problem& p = problem_;
    faults_.input(names.key_lse, state.key_lse, {p.sequences, p.heads_k, 1, p.dim},
                  parameter_type(), p.device);
    faults_.input(names.channel_values, state.channel_values,
                  {p.sequences, p.heads_k, p.dim, p.dim_v}, parameter_type(), p.device);
  }

  // The same that is written.
  void state_output(const StateNames& names, const AttentionSaved& state) {
    if (!goes_together(names, readable(state))) return;
    const Problem& p = problem_;
    output(names.key_lse, state.key_lse, {p.sequences, p.heads_k, 1, p.dim}, parameter_type());
    output(names.channel_values, state.channel_values, {p.sequences, p.heads_k, p.dim, p.dim_v},
           parameter_type());
  }

  // The states of a backward beside the given one: what was saved, its gradient, and the gradient
  // of the given one.
  void state_gradients(const AttentionGradients& grads) {
    problem_.state = problem_.state || grads.dsaved.given();
    state_input(kSaved, readable(grads.saved));
    state_input(kSavedGradient, grads.dsaved);
    if (!readable(grads.dstate).given()) return;
    if (!in_.state.given()) fault("dstate is asked for but state is not given");
    state_output(kStateGradient, grads.dstate);
  }

  // What a decode state has no use for.
  void decode_only(const View& o) {
    if (rows_) {
      const Problem& p = problem_;
      output("o", o, {p.batch, p.heads, p.tokens, p.dim_v}, p.dtype);
    } else if (o.given()) {
      fault("o is given without q: rows need queries");
    }
    if (in_.key_mask.given()) fault("key_mask is given: decoding takes key_lengths alone");
    if (in_.state.given()) fault("state is given: a decode state holds its own");
    if (in_.block_origins.given()) {
      fault("block_origins is given: decoding counts blocks from the first token");
    }
    if (in_.cu_seqlens_q.given() || in_.cu_seqlens_k.given()) {
      fault("packed sequences are given: decoding takes a batch of them");
    }
    if (keys_) return;
    if (in_.k.given() || in_.v.given()) fault("k or v is given: a read adds no keys");
    if (in_.key_lengths.given()) fault("key_lengths is given: a read sees all keys of the state");
  }

  // dL/do, shaped like o.
  void gradient_input(const ConstView& g) {
    input("g", g, {problem_.batch, problem_.heads, problem_.tokens, problem_.dim_v});
  }

  void output(const char* name, const View& view, const Shape& shape, DType dtype) {
    faults_.output(name, view, shape, dtype, problem_.device);
  }

  // A gradient on request: shaped like the input that it belongs to.
  void parameter_gradient(const char* name, const View& gradient, const char* input_name,
                          const ConstView& input_view, bool meaningful) {
    if (!gradient.given()) return;
    if (!meaningful || !input_view.given()) {
      fault(fmt::format("{} is asked for but {} {}", name, input_name,
                        meaningful ? "is not given" : "plays no part in this kind"));
      return;
    }
    output(name, gradient, input_view.shape, parameter_type());
  }

  void fault(std::string text) { faults_.add(std::move(text)); }

  const Problem& problem() const { return problem_; }
  DType parameter_type() const { return problem_.dtype == DType::f64 ? DType::f64 : DType::f32; }

  CheckedCall finish(const char* name) {
    // The text of a problem takes longer than a small decode step.
    if (faults_.count() > 0) faults_.throw_any(name, to_string(problem_));
    CheckedCall checked;
    checked.call.problem = problem_;
    checked.call.options = options_;
    checked.call.in = in_;
    for (ConstView* view : {&checked.call.in.alpha, &checked.call.in.beta, &checked.call.in.mix,
                            &checked.call.in.lln_weight, &checked.call.in.diag_weight}) {
      for (int i = 0; i < 4; ++i) {
        if (view->shape[i] == 1) view->stride[i] = 0;
      }
    }
    // On a device it is found there which keys count.
    if (problem_.device.kind == DeviceKind::cpu) {
      checked.sequences = make_sequences(problem_, in_);
    }
    return checked;
  }

 private:
  void input(const char* name, const ConstView& view, const Shape& shape) {
    faults_.input(name, view, shape, problem_.dtype, problem_.device);
  }

  void parameter(const char* name, const ConstView& view, std::int64_t heads) {
    if (view.given()) {
      faults_.parameter(name, view, problem_.sequences, heads, parameter_type(), problem_.device);
      return;
    }
    fault(fmt::format("{} is not given: LLN needs it, {} of shape [{} or 1, {} or 1, 1, 1]", name,
                      to_string(parameter_type()), problem_.sequences, heads));
  }

  // Whether both halves of a state are given; a fault where one is, or where there is no LLN.
  bool goes_together(const StateNames& names, const AttentionState& state) {
    if (!state.given()) return false;
    if (!problem_.has_lln()) {
      fault(fmt::format("{} belongs to LLN; this kind has no key_lse and channel_values",
                        names.both));
    }
    if (state.key_lse.given() && state.channel_values.given()) return true;
    fault(fmt::format("{} and {} go together: one of them is not given", names.key_lse,
                      names.channel_values));
    return false;
  }

  void check_weights() {
    const bool two = in_.lln_weight.given() || in_.diag_weight.given();
    if (in_.mix.given() && two) fault("mix and lln_weight or diag_weight are both given");
    if (two && (!in_.lln_weight.given() || !in_.diag_weight.given())) {
      fault("lln_weight and diag_weight go together: one of them is not given");
    }
    if (in_.mix.given()) weight("mix", in_.mix);
    if (in_.lln_weight.given()) weight("lln_weight", in_.lln_weight);
    if (in_.diag_weight.given()) weight("diag_weight", in_.diag_weight);
    if (!in_.mix.given() && !two && !std::isfinite(options_.mix)) {
      fault(fmt::format("mix is {}: expected a finite number", options_.mix));
    }
  }

  void weight(const char* name, const ConstView& view) {
    const Problem& p = problem_;
    const Shape forms[] = {{1, 1, 1, 1},
                           {1, p.heads, 1, 1},
                           {1, p.heads, 1, p.dim_v},
                           {p.batch, p.heads, p.tokens, 1}};
    for (const Shape& form : forms) {
      if (view.shape != form) continue;
      // Weights per token are data, not parameters: NaN there stays in its row.
      if (faults_.tensor(name, view, form, parameter_type(), p.device) &&
          (form[2] == 1 || p.tokens == 1)) {
        faults_.finite(name, view);
      }
      return;
    }
    fault(
        fmt::format("{} has shape {}: expected {} per call, {} per head, {} per head and channel "
                    "or {} per head and token",
                    name, to_string(view.shape), to_string(forms[0]), to_string(forms[1]),
                    to_string(forms[2]), to_string(forms[3])));
  }

  void check_packing() {
    const Problem& p = problem_;
    if (!in_.cu_seqlens_q.given()) {
      fault("cu_seqlens_k is given without cu_seqlens_q");
      return;
    }
    const bool q_ok = faults_.cumulative("cu_seqlens_q", in_.cu_seqlens_q, p.tokens, p.device);
    const IndexView& k = in_.cu_seqlens_k;
    if (!k.given()) {
      if (p.tokens != p.tokens_k) {
        fault(fmt::format("cu_seqlens_k is needed where q and k have different tokens: {} and {}",
                          p.tokens, p.tokens_k));
      }
      return;
    }
    const bool k_ok = faults_.cumulative("cu_seqlens_k", k, p.tokens_k, p.device);
    if (k.count != in_.cu_seqlens_q.count) {
      fault(fmt::format("cu_seqlens_q has {} entries and cu_seqlens_k {}: expected as many",
                        in_.cu_seqlens_q.count, k.count));
      return;
    }
    if (!q_ok || !k_ok || (!p.causal && !p.has_diag())) return;
    for (std::int64_t s = 0; s < k.count; ++s) {
      if (in_.cu_seqlens_q[s] != k[s]) {
        fault(
            fmt::format("cu_seqlens_q[{}] is {} and cu_seqlens_k[{}] is {}: causal and "
                        "block-diagonal attention need as many keys as queries",
                        s, in_.cu_seqlens_q[s], s, k[s]));
        return;
      }
    }
  }

  const AttentionInputs& in_;
  const AttentionOptions& options_;
  Problem problem_;
  Faults faults_;
  bool rows_ = true;  // q and what belongs to rows is wanted
  bool keys_ = true;  // k, v and what belongs to keys is wanted
};

}  // namespace

CheckedCall check_forward(const AttentionInputs& in, const AttentionOutputs& out,
                          const AttentionOptions& options) {
  Checker checker(in, options, Op::forward);
  checker.check_inputs();
  const Problem& p = checker.problem();
  checker.output("o", out.o, {p.batch, p.heads, p.tokens, p.dim_v}, p.dtype);
  checker.state_output(kSaved, out.saved);
  CheckedCall checked = checker.finish("attention_forward");
  checked.call.out = out;
  return checked;
}

CheckedCall check_backward(const AttentionInputs& in, const AttentionGradients& grads,
                           const AttentionOptions& options) {
  Checker checker(in, options, Op::backward);
  checker.check_inputs();
  const Problem& p = checker.problem();
  checker.gradient_input(grads.g);
  checker.state_gradients(grads);
  checker.output("dq", grads.dq, {p.batch, p.heads, p.tokens, p.dim}, p.dtype);
  checker.output("dk", grads.dk, {p.batch, p.heads_k, p.tokens_k, p.dim}, p.dtype);
  checker.output("dv", grads.dv, {p.batch, p.heads_k, p.tokens_k, p.dim_v}, p.dtype);
  const bool lln = p.has_lln();
  const bool mixture = p.kind == Kind::lln_diag;
  checker.parameter_gradient("dalpha", grads.dalpha, "alpha", in.alpha, lln);
  checker.parameter_gradient("dbeta", grads.dbeta, "beta", in.beta, lln);
  checker.parameter_gradient("dmix", grads.dmix, "mix", in.mix, mixture);
  checker.parameter_gradient("dlln_weight", grads.dlln_weight, "lln_weight", in.lln_weight,
                             mixture);
  checker.parameter_gradient("ddiag_weight", grads.ddiag_weight, "diag_weight", in.diag_weight,
                             mixture);
  CheckedCall checked = checker.finish("attention_backward");
  checked.call.grads = grads;
  return checked;
}

const char* call_name(DecodeVerb verb) noexcept {
  switch (verb) {
    case DecodeVerb::append:
      return "DecodeState::append";
    case DecodeVerb::read:
      return "DecodeState::read";
    case DecodeVerb::step:
      break;
  }
  return "DecodeState::step";
}

CheckedCall check_decode(DecodeVerb verb, const DecodeConfig& config, const AttentionInputs& in,
                         const View& o) {
  const AttentionOptions options{.kind = config.kind,
                                 .diag_block = config.diag_block,
                                 .feature = config.feature,
                                 .power = config.power,
                                 .mix = config.mix};
  Checker checker(verb, config, in, options);
  checker.check_inputs();
  checker.decode_only(o);
  CheckedCall checked = checker.finish(call_name(verb));
  checked.call.out.o = o;
  for (Sequence& seq : checked.sequences) seq.k_tokens = seq.key_end;
  // A scale that the call has no use for may be missing.
  static constexpr float kOne = 1;
  if (checked.call.problem.device.kind != DeviceKind::cpu) return checked;
  for (ConstView* scale : {&checked.call.in.alpha, &checked.call.in.beta}) {
    if (!scale->given()) *scale = {&kOne, DType::f32, {}, {1, 1, 1, 1}, {}};
  }
  return checked;
}

}  // namespace lln
