// Tensors of a piece as views, and the core's calls.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/pieces.h"

#include <vector>

#include "lln/error.h"
#include "lln_torch/binding/exec.h"

namespace lln_torch::binding {
namespace {

lln::View state_view(const char* name, const OptionalTensor& x) {
  return x ? view4(name, *x) : lln::View();
}

lln::AttentionSaved state_out(const State& state) {
  return {state_view("key_lse", state.key_lse), state_view("channel_values", state.channel_values)};
}

lln::AttentionState state_in(const State& state) {
  const lln::AttentionSaved views = state_out(state);
  return {views.key_lse, views.channel_values};
}

lln::AttentionInputs piece_inputs(const Arguments& a, const GivenOfRest& rest) {
  lln::AttentionInputs in = attention_inputs(a);
  in.state = state_in(rest.state);
  in.block_origins = index_view("block_origins", rest.block_origins);
  return in;
}

lln::View scale_or_none(const char* name, const OptionalTensor& x) {
  return x ? scale_view(name, *x) : lln::View();
}
lln::View weight_or_none(const char* name, const OptionalTensor& x) {
  return x ? weight_view(name, *x) : lln::View();
}

// [S, heads, 3] of f64, contiguous.
std::vector<lln::Moments> moments_in(const char* name, const Tensor& x) {
  if (x.dim() != 3 || x.size(2) != 3 || x.scalar_type() != ScalarType::Double ||
      !x.is_contiguous() || !x.is_cpu()) {
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        std::string(name) + " is not a contiguous float64 tensor [S, heads, 3] in host memory");
  }
  const auto* numbers = static_cast<const double*>(x.data_ptr());
  std::vector<lln::Moments> moments;
  for (std::int64_t i = 0; i < x.size(0) * x.size(1); ++i, numbers += 3) {
    moments.push_back({numbers[0], numbers[1], numbers[2]});
  }
  return moments;
}

struct HostMoments {
  std::vector<lln::Moments> q, k;
  lln::JoinedMoments joined;

  HostMoments(const Tensor& q_moments, const Tensor& k_moments, std::int64_t dim)
      : q(moments_in("q_moments", q_moments)),
        k(moments_in("k_moments", k_moments)),
        joined{
            .heads = q_moments.size(1), .heads_k = k_moments.size(1), .dim = dim, .q = q, .k = k} {}
};

}  // namespace

void piece_forward(const Arguments& a, const GivenOfRest& rest, const Options& words,
                   const Tensor& o, const State& saved) {
  const lln::AttentionOptions options = attention_options(words);
  const lln::AttentionInputs in = piece_inputs(a, rest);
  const lln::AttentionOutputs out{view4("o", o), state_out(saved)};
  lln::Exec exec = attention_exec(a);
  const Workspace workspace(a.q, exec,
                            [&] { return lln::workspace_bytes(in, out, options, exec); });
  lln::attention_forward(in, out, options, exec);
}

void piece_backward(const Tensor& g, const State& dsaved, const Arguments& a,
                    const GivenOfRest& rest, const Options& words, const PieceGradients& d) {
  const lln::AttentionOptions options = attention_options(words);
  const lln::AttentionInputs in = piece_inputs(a, rest);
  lln::AttentionGradients gradients{.g = view4("g", g),
                                    .dq = view4("dq", d.q),
                                    .dk = view4("dk", d.k),
                                    .dv = view4("dv", d.v),
                                    .dalpha = scale_or_none("dalpha", d.alpha),
                                    .dbeta = scale_or_none("dbeta", d.beta),
                                    .dmix = weight_or_none("dmix", d.mix),
                                    .dlln_weight = weight_or_none("dlln_weight", d.lln_weight),
                                    .ddiag_weight = weight_or_none("ddiag_weight", d.diag_weight)};
  gradients.dsaved = state_in(dsaved);
  gradients.dstate = state_out(d.state);
  lln::Exec exec = attention_exec(a);
  const Workspace workspace(a.q, exec,
                            [&] { return lln::workspace_bytes(in, gradients, options, exec); });
  lln::attention_backward(in, gradients, options, exec);
}

Scales match_joined(const Tensor& q_moments, const Tensor& k_moments, std::int64_t dim,
                    const std::string& mode, bool causal, const std::string& feature, bool wide) {
  const HostMoments moments(q_moments, k_moments, dim);
  lln::MatchingOptions options{.mode = lln::parse_matching(mode), .causal = causal};
  float power = 0;
  lln::parse_feature(feature, options.feature, power);
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  const std::int64_t sequences = q_moments.size(0);
  Scales scales{new_host_tensor(std::array{sequences, q_moments.size(1)}, type),
                new_host_tensor(std::array{sequences, k_moments.size(1)}, type)};
  lln::match_moments(moments.joined,
                     {scale_view("alpha", scales.alpha), scale_view("beta", scales.beta)}, options);
  return scales;
}

void update_joined(const Tensor& running, const Tensor& q_moments, const Tensor& k_moments,
                   std::int64_t dim, double decay) {
  const HostMoments moments(q_moments, k_moments, dim);
  check_running(running, k_moments.size(1), device_of(k_moments));
  change_running(running, decay,
                 [&](lln::RunningMoments& heads) { lln::update_moments(heads, moments.joined); });
}

}  // namespace lln_torch::binding
