// The kernels of torch.ops.lln: the functions of lln_torch/binding with arguments in the order of
// the schemas, registered for CPU and CUDA.
// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>

#include "lln_torch/binding/attention.h"
#include "lln_torch/binding/decode.h"
#include "lln_torch/binding/instruments.h"
#include "lln_torch/binding/matching.h"
#include "lln_torch/binding/pieces.h"
#include "ops/calibration.h"
#include "ops/errors.h"

#define LLN_KERNEL(function) TORCH_BOX(&Translated<&function>::call)

namespace lln_torch {
namespace {

using binding::OptionalTensor;

// Which tokens count: `keys` of a schema are lengths [batch] or a mask [batch, tokens].
const OptionalTensor kNone;
const OptionalTensor& lengths_of(const OptionalTensor& keys) {
  return keys && keys->dim() == 1 ? keys : kNone;
}
const OptionalTensor& mask_of(const OptionalTensor& keys) {
  return keys && keys->dim() == 1 ? kNone : keys;
}

// `mix` of a schema is the weight of LLN where diag_weight is given.
binding::Arguments arguments_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                const OptionalTensor& alpha, const OptionalTensor& beta,
                                const OptionalTensor& mix, const OptionalTensor& diag_weight,
                                const OptionalTensor& keys, const OptionalTensor& cu_seqlens,
                                const OptionalTensor& cu_seqlens_k) {
  return {q,
          k,
          v,
          alpha,
          beta,
          diag_weight ? kNone : mix,
          diag_weight ? mix : kNone,
          diag_weight,
          lengths_of(keys),
          mask_of(keys),
          cu_seqlens,
          cu_seqlens_k};
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
                 const OptionalTensor& beta, const OptionalTensor& mix,
                 const OptionalTensor& diag_weight, const OptionalTensor& keys,
                 const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                 const std::string& kind, bool causal, double fixed_mix, const std::string& feature,
                 const std::string& matching, const OptionalTensor& query_mask,
                 std::optional<double> fixed_alpha, std::optional<double> fixed_beta) {
  return binding::attention(
      arguments_of(q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k),
      {kind, causal, fixed_mix, feature}, {matching, query_mask, fixed_alpha, fixed_beta});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
    const OptionalTensor& beta, const OptionalTensor& mix, const OptionalTensor& diag_weight,
    const OptionalTensor& keys, const OptionalTensor& cu_seqlens,
    const OptionalTensor& cu_seqlens_k, const std::string& kind, bool causal, double fixed_mix,
    const std::string& feature, const std::string& matching, const OptionalTensor& query_mask,
    std::optional<double> fixed_alpha, std::optional<double> fixed_beta) {
  const binding::Forward f = binding::forward(
      arguments_of(q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k),
      {kind, causal, fixed_mix, feature}, {matching, query_mask, fixed_alpha, fixed_beta});
  return {f.o, f.key_lse, f.channel_values, f.alpha, f.beta};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
    const OptionalTensor& beta, const OptionalTensor& mix, const OptionalTensor& diag_weight,
    const OptionalTensor& keys, const OptionalTensor& cu_seqlens,
    const OptionalTensor& cu_seqlens_k, const Tensor& key_lse, const Tensor& channel_values,
    const std::string& kind, bool causal, double fixed_mix, const std::string& feature,
    bool scales_wanted, bool weights_wanted) {
  const binding::Gradients d = binding::backward(
      g, arguments_of(q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k),
      key_lse, channel_values, {kind, causal, fixed_mix, feature}, {scales_wanted, weights_wanted});
  return {d.q, d.k, d.v, d.alpha, d.beta, diag_weight ? d.lln_weight : d.mix, d.diag_weight};
}

void piece_forward(const Tensor& o, const OptionalTensor& saved_lse,
                   const OptionalTensor& saved_values, const Tensor& q, const Tensor& k,
                   const Tensor& v, const OptionalTensor& alpha, const OptionalTensor& beta,
                   const OptionalTensor& mix, const OptionalTensor& diag_weight,
                   const OptionalTensor& keys, const OptionalTensor& cu_seqlens,
                   const OptionalTensor& cu_seqlens_k, const OptionalTensor& state_lse,
                   const OptionalTensor& state_values, const OptionalTensor& block_origins,
                   const std::string& kind, bool causal, double fixed_mix,
                   const std::string& feature) {
  binding::piece_forward(
      arguments_of(q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k),
      {{state_lse, state_values}, block_origins}, {kind, causal, fixed_mix, feature}, o,
      {saved_lse, saved_values});
}

void piece_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                    const OptionalTensor& dalpha, const OptionalTensor& dbeta,
                    const OptionalTensor& dmix, const OptionalTensor& ddiag_weight,
                    const OptionalTensor& dstate_lse, const OptionalTensor& dstate_values,
                    const Tensor& g, const OptionalTensor& dsaved_lse,
                    const OptionalTensor& dsaved_values, const Tensor& q, const Tensor& k,
                    const Tensor& v, const OptionalTensor& alpha, const OptionalTensor& beta,
                    const OptionalTensor& mix, const OptionalTensor& diag_weight,
                    const OptionalTensor& keys, const OptionalTensor& cu_seqlens,
                    const OptionalTensor& cu_seqlens_k, const OptionalTensor& state_lse,
                    const OptionalTensor& state_values, const OptionalTensor& block_origins,
                    const std::string& kind, bool causal, double fixed_mix,
                    const std::string& feature) {
  binding::piece_backward(
      g, {dsaved_lse, dsaved_values},
      arguments_of(q, k, v, alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k),
      {{state_lse, state_values}, block_origins}, {kind, causal, fixed_mix, feature},
      {dq,
       dk,
       dv,
       dalpha,
       dbeta,
       diag_weight ? kNone : dmix,
       diag_weight ? dmix : kNone,
       ddiag_weight,
       {dstate_lse, dstate_values}});
}

std::tuple<Tensor, Tensor> match(const Tensor& q, const Tensor& k, const OptionalTensor& keys,
                                 const OptionalTensor& query_mask, const OptionalTensor& cu_seqlens,
                                 const OptionalTensor& cu_seqlens_k, const OptionalTensor& running,
                                 const std::string& mode, bool causal, bool cross) {
  const binding::Scales scales = binding::match(
      {q, k, lengths_of(keys), mask_of(keys), query_mask, cu_seqlens, cu_seqlens_k, cross}, running,
      mode, causal);
  return {scales.alpha, scales.beta};
}

std::tuple<Tensor, Tensor> match_joined(const Tensor& q_moments, const Tensor& k_moments,
                                        std::int64_t dim, const std::string& mode, bool causal,
                                        const std::string& feature, bool wide) {
  const binding::Scales scales =
      binding::match_joined(q_moments, k_moments, dim, mode, causal, feature, wide);
  return {scales.alpha, scales.beta};
}

void update_moments(const Tensor& running, const Tensor& q, const Tensor& k,
                    const OptionalTensor& keys, const OptionalTensor& query_mask,
                    const OptionalTensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                    double decay, bool cross) {
  binding::update_moments(
      running, {q, k, lengths_of(keys), mask_of(keys), query_mask, cu_seqlens, cu_seqlens_k, cross},
      decay);
}

Tensor head_moments(const Tensor& x, const OptionalTensor& tokens,
                    const OptionalTensor& cu_seqlens) {
  return binding::head_moments(x, lengths_of(tokens), mask_of(tokens), cu_seqlens);
}

// `kinds` has commas between; a layer below 0 is none. -> the bytes of JSON.
Tensor analyze(const Tensor& q, const Tensor& k, const OptionalTensor& alpha,
               const OptionalTensor& beta, const std::string& kinds, const std::string& matching,
               bool causal, std::int64_t rows, std::int64_t layer, const std::string& name) {
  binding::AnalysisWords words{.matching = matching, .causal = causal, .rows = rows, .name = name};
  for (const auto kind : std::views::split(kinds, ',')) {
    words.kinds.emplace_back(kind.begin(), kind.end());
  }
  if (layer >= 0) words.layer = layer;
  const std::string text = binding::analyze(q, k, alpha, beta, words);
  Tensor bytes = binding::new_host_tensor(std::array{static_cast<std::int64_t>(text.size())},
                                          binding::ScalarType::Byte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("attention", LLN_KERNEL(attention));
  m.impl("forward", LLN_KERNEL(forward));
  m.impl("backward", LLN_KERNEL(backward));
  m.impl("piece_forward", LLN_KERNEL(piece_forward));
  m.impl("piece_backward", LLN_KERNEL(piece_backward));
  m.impl("match", LLN_KERNEL(match));
  m.impl("update_moments", LLN_KERNEL(update_moments));
  m.impl("head_moments", LLN_KERNEL(head_moments));
  m.impl("decode_append", LLN_KERNEL(binding::decode_append));
  m.impl("decode_step", LLN_KERNEL(binding::decode_step));
  m.impl("decode_read", LLN_KERNEL(binding::decode_read));
  m.impl("decode_reset", LLN_KERNEL(binding::decode_reset));
  m.impl("decode_merge", LLN_KERNEL(binding::decode_merge));
  m.impl("decode_tokens", LLN_KERNEL(binding::decode_tokens));
  m.impl("decode_save", LLN_KERNEL(binding::decode_save));
  m.impl("decode_load", LLN_KERNEL(binding::decode_load));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lln, CPU, m) {
  register_kernels(m);
  m.impl("calibrate", LLN_KERNEL(calibrate));
  m.impl("match_joined", LLN_KERNEL(match_joined));
  m.impl("update_joined", LLN_KERNEL(binding::update_joined));
  m.impl("analyze", LLN_KERNEL(analyze));
}
STABLE_TORCH_LIBRARY_IMPL(lln, CUDA, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(lln, CompositeExplicitAutograd, m) {
  m.impl("decode_bytes", LLN_KERNEL(binding::decode_bytes));
}

}  // namespace lln_torch
