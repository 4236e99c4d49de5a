// The core's object is resumed over the tensors of a state for one call: it owns nothing, so that
// copies, graphs and pickles of a state are those of its tensors.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/decode.h"

#include <array>
#include <span>

#include "lln/decode.h"
#include "lln/error.h"
#include "lln_torch/binding/attention.h"
#include "lln_torch/binding/exec.h"

namespace lln_torch::binding {
namespace {

lln::DecodeConfig decode_config(const Sizes& sizes, const std::string& kind, double mix,
                                const std::string& feature) {
  if (sizes.size() != 5) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     "sizes are batch, heads, heads_k, dim and dim_v");
  }
  const lln::AttentionOptions options = attention_options({kind, true, mix, feature});
  return {.batch = sizes[0],
          .heads = sizes[1],
          .heads_k = sizes[2],
          .dim = sizes[3],
          .dim_v = sizes[4],
          .kind = options.kind,
          .diag_block = options.diag_block,
          .feature = options.feature,
          .power = options.power,
          .mix = options.mix};
}

std::span<std::byte> bytes_of(const Tensor& x) {
  if (x.scalar_type() != ScalarType::Byte || !x.is_contiguous()) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     "bytes of a decode state must be a contiguous tensor of type uint8");
  }
  return {static_cast<std::byte*>(x.data_ptr()), static_cast<std::size_t>(x.numel())};
}

std::span<std::int64_t> counts_of(const Tensor& tokens) {
  if (tokens.scalar_type() != ScalarType::Long || !tokens.is_cpu() || !tokens.is_contiguous()) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     "tokens of a decode state must be contiguous int64 in host memory");
  }
  return {static_cast<std::int64_t*>(tokens.data_ptr()), static_cast<std::size_t>(tokens.numel())};
}

// The core's object over the tensors of a state, and the way back of its counts.
struct ResumedState {
  const Tensor& tokens;
  lln::DecodeState core;

  ResumedState(const Tensor& memory, const Tensor& counts, const lln::DecodeConfig& config)
      : tokens(counts),
        core(lln::DecodeState::resume(config, bytes_of(memory), counts_of(counts),
                                      device_of(memory), exec_for(memory, 0).stream)) {}

  void store_counts() const {
    const std::span<std::int64_t> counts = counts_of(tokens);
    for (std::size_t b = 0; b < counts.size(); ++b) {
      counts[b] = core.tokens(static_cast<std::int64_t>(b));
    }
  }
};

lln::AttentionInputs decode_inputs(const OptionalTensor& q, const OptionalTensor& k,
                                   const OptionalTensor& v, const OptionalTensor& alpha,
                                   const OptionalTensor& beta, const OptionalTensor& mix,
                                   const OptionalTensor& diag_weight) {
  lln::AttentionInputs in;
  if (q) in.q = view4("q", *q);
  if (k) in.k = view4("k", *k);
  if (v) in.v = view4("v", *v);
  if (alpha) in.alpha = scale_view("alpha", *alpha);
  if (beta) in.beta = scale_view("beta", *beta);
  set_weights(diag_weight ? OptionalTensor() : mix, diag_weight ? mix : OptionalTensor(),
              diag_weight, in);
  return in;
}

}  // namespace

Tensor decode_append(const Tensor& memory, const Tensor& tokens, const OptionalTensor& q,
                     const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
                     const OptionalTensor& beta, const OptionalTensor& mix,
                     const OptionalTensor& diag_weight, const OptionalTensor& lengths,
                     const Sizes& sizes, const std::string& kind, double fixed_mix,
                     const std::string& feature) {
  ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  lln::AttentionInputs in = decode_inputs(q, k, v, alpha, beta, mix, diag_weight);
  in.key_lengths = index_view("lengths", lengths);
  Tensor o = q ? new_like(*q, sizes[4]) : no_tensor(k);
  state.core.append(in, q ? view4("o", o) : lln::View{}, exec_for(k, k.numel() + v.numel()));
  state.store_counts();
  return o;
}

Tensor decode_step(const Tensor& memory, const Tensor& tokens, const Tensor& q, const Tensor& k,
                   const Tensor& v, const OptionalTensor& alpha, const OptionalTensor& beta,
                   const OptionalTensor& mix, const OptionalTensor& diag_weight, const Sizes& sizes,
                   const std::string& kind, double fixed_mix, const std::string& feature) {
  ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  Tensor o = new_like(q, sizes[4]);
  // A step reads and writes the whole state.
  state.core.step(decode_inputs(q, k, v, alpha, beta, mix, diag_weight), view4("o", o),
                  exec_for(q, memory.numel() / 4));
  state.store_counts();
  return o;
}

Tensor decode_read(const Tensor& memory, const Tensor& tokens, const Tensor& q,
                   const OptionalTensor& alpha, const OptionalTensor& mix,
                   const OptionalTensor& diag_weight, const Sizes& sizes, const std::string& kind,
                   double fixed_mix, const std::string& feature) {
  const ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  Tensor o = new_like(q, sizes[4]);
  state.core.read(decode_inputs(q, {}, {}, alpha, {}, mix, diag_weight), view4("o", o),
                  exec_for(q, q.numel() + memory.numel() / 4));
  return o;
}

void decode_reset(const Tensor& memory, const Tensor& tokens, std::int64_t sequence,
                  const Sizes& sizes, const std::string& kind, double fixed_mix,
                  const std::string& feature) {
  ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  if (sequence < 0) {
    state.core.reset();
  } else {
    state.core.reset(sequence);
  }
  state.store_counts();
}

void decode_merge(const Tensor& memory, const Tensor& tokens, const Tensor& later,
                  const Tensor& later_tokens, const Sizes& sizes, const std::string& kind,
                  double fixed_mix, const std::string& feature) {
  const lln::DecodeConfig config = decode_config(sizes, kind, fixed_mix, feature);
  ResumedState state(memory, tokens, config);
  state.core.merge(ResumedState(later, later_tokens, config).core);
  state.store_counts();
}

Tensor decode_tokens(const Tensor& memory, const Tensor& tokens, const Sizes& sizes,
                     const std::string& kind, double fixed_mix, const std::string& feature) {
  const ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  Tensor counts = new_host_tensor(std::array{sizes[0]}, ScalarType::Long);
  for (std::int64_t b = 0; b < sizes[0]; ++b) {
    static_cast<std::int64_t*>(counts.data_ptr())[b] = state.core.tokens(b);
  }
  return counts;
}

Tensor decode_save(const Tensor& memory, const Tensor& tokens, const Sizes& sizes,
                   const std::string& kind, double fixed_mix, const std::string& feature) {
  const ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  Tensor bytes = new_host_tensor(std::array{static_cast<std::int64_t>(state.core.saved_bytes())},
                                 ScalarType::Byte);
  state.core.save(bytes_of(bytes));
  return bytes;
}

void decode_load(const Tensor& memory, const Tensor& tokens, const Tensor& bytes,
                 const Sizes& sizes, const std::string& kind, double fixed_mix,
                 const std::string& feature) {
  ResumedState state(memory, tokens, decode_config(sizes, kind, fixed_mix, feature));
  state.core.load(bytes_of(bytes));
  state.store_counts();
}

std::int64_t decode_bytes(const Sizes& sizes, const std::string& kind, const std::string& feature,
                          bool on_device) {
  return static_cast<std::int64_t>(lln::decode_state_bytes(
      decode_config(sizes, kind, 0.5, feature), on_device ? lln::cuda_device() : lln::Device{}));
}

}  // namespace lln_torch::binding
