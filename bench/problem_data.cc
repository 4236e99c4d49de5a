// Making the tensors of a problem and calling it.
// SPDX-License-Identifier: Apache-2.0
#include "bench/problem_data.h"

#include <algorithm>

#include "conformance/decode.h"

namespace lln::bench {
namespace {

std::vector<std::int64_t> even_ends(std::int64_t tokens, std::int64_t sequences) {
  std::vector<std::int64_t> ends = {0};
  const std::int64_t each = sequences > 0 ? tokens / sequences : 0;
  for (std::int64_t s = 1; s <= sequences; ++s) ends.push_back(s < sequences ? s * each : tokens);
  return ends;
}

DType parameter_type(const Problem& p) { return p.dtype == DType::f64 ? DType::f64 : DType::f32; }

}  // namespace

ProblemData::ProblemData(const Problem& problem, TensorMemory& memory, const Exec& exec,
                         const Manner& manner)
    : problem_(problem), exec_(exec) {
  options_.kind = problem.kind;
  if (problem.has_diag()) options_.diag_block = problem.diag_block;
  options_.causal = problem.causal;
  options_.feature = problem.feature;
  options_.power = problem.power;
  make_inputs(memory);
  make_lengths(memory);
  make_outputs(memory);
  if (problem.op == Op::append || problem.op == Op::step) make_state(memory);
  if (manner.matched) make_matching(memory);
  if (manner.parameters) make_parameter_gradients(memory);
  if (problem.op == Op::backward) {  // leaves what the backward takes from it
    exec_.workspace = {};            // which is as long as the backward needs it
    forward();
    exec_.workspace = exec.workspace;
  }
}

void ProblemData::run() {
  if (state_) return decode();
  if (problem_.op != Op::backward) forward();
  if (problem_.op != Op::forward) backward();
}

std::size_t ProblemData::needed_workspace() const {
  if (state_) return workspace_bytes(problem_, exec_);
  std::size_t bytes = 0;
  if (problem_.op != Op::backward) bytes = workspace_bytes(in_, out_, options_, exec_);
  if (problem_.op != Op::forward) {
    bytes = std::max(bytes, workspace_bytes(in_, grads_, options_, exec_));
  }
  return bytes;
}

void ProblemData::forward() {
  if (pair_.q.given()) match_moments(pair_, scales_, {}, matching_exec_);
  attention_forward(in_, out_, options_, exec_);
}

void ProblemData::backward() { attention_backward(in_, grads_, options_, exec_); }

void ProblemData::decode() {
  if (problem_.op == Op::append) {
    state_->reset();
    state_->append(in_, out_.o, exec_);
  } else if (problem_.tokens_k == 0) {
    state_->read(in_, out_.o, exec_);
  } else {
    state_->step(in_, out_.o, exec_);
  }
}

void ProblemData::make_inputs(TensorMemory& memory) {
  const Problem& p = problem_;
  in_.q = memory.gaussian(p.dtype, {p.batch, p.heads, p.tokens, p.dim});
  in_.k = memory.gaussian(p.dtype, {p.batch, p.heads_k, p.tokens_k, p.dim});
  in_.v = memory.gaussian(p.dtype, {p.batch, p.heads_k, p.tokens_k, p.dim_v});
  if (!p.has_lln()) return;
  // 1.25 to 1.75: what moment matching gives for unit inputs.
  const auto parameter = [&](std::int64_t heads) {
    std::vector<float> values;
    for (std::int64_t h = 0; h < heads; ++h) {
      values.push_back(1.25F + 0.5F * static_cast<float>(h) / static_cast<float>(heads));
    }
    return memory.numbers(parameter_type(p), {1, heads, 1, 1}, values);
  };
  in_.alpha = parameter(p.heads);
  in_.beta = parameter(p.heads_k);
  if (!p.state) return;
  in_.state = {memory.gaussian(parameter_type(p), {p.sequences, p.heads_k, 1, p.dim}),
               memory.gaussian(parameter_type(p), {p.sequences, p.heads_k, p.dim, p.dim_v})};
}

void ProblemData::make_lengths(TensorMemory& memory) {
  const Problem& p = problem_;
  if (p.masked) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      lengths.push_back(std::max<std::int64_t>(p.tokens_k - 1 - b % 7, 0));
    }
    in_.key_lengths = memory.list(lengths);
  }
  if (p.packed) {
    in_.cu_seqlens_q = memory.list(even_ends(p.tokens, p.sequences));
    in_.cu_seqlens_k = memory.list(even_ends(p.tokens_k, p.sequences));
  }
  if (p.block_origins) {  // as if as many tokens had come before
    in_.block_origins =
        memory.list(std::vector<std::int64_t>(static_cast<std::size_t>(p.sequences), -p.tokens_k));
  }
}

void ProblemData::make_state(TensorMemory& memory) {
  const Problem& p = problem_;
  const DecodeConfig config = conformance::decode_config(p, options_);
  state_.emplace(config, memory.zeros(decode_state_bytes(config, p.device)), p.device,
                 exec_.stream);
  // An append without rows and a read without keys are given none.
  if (p.op == Op::append && p.tokens == 0) {
    in_.q = {};
    out_.o = {};
  }
  if (p.op == Op::step && p.tokens_k == 0) {
    in_.k = in_.v = {};
    in_.key_lengths = {};
  }
}

void ProblemData::make_matching(TensorMemory& memory) {
  const Problem& p = problem_;
  pair_ = {.q = in_.q,
           .k = in_.k,
           .key_lengths = in_.key_lengths,
           .cu_seqlens_q = in_.cu_seqlens_q,
           .cu_seqlens_k = in_.cu_seqlens_k};
  scales_ = {memory.zeros(parameter_type(p), {p.sequences, p.heads, 1, 1}),
             memory.zeros(parameter_type(p), {p.sequences, p.heads_k, 1, 1})};
  in_.alpha = scales_.alpha;
  in_.beta = scales_.beta;
  matching_exec_ = exec_;
  matching_exec_.workspace = memory.zeros(matching_workspace_bytes(pair_));
}

// Of one alpha, beta and mix for each head.
void ProblemData::make_parameter_gradients(TensorMemory& memory) {
  const Problem& p = problem_;
  if (!p.has_lln()) return;
  grads_.dalpha = memory.zeros(parameter_type(p), in_.alpha.shape);
  grads_.dbeta = memory.zeros(parameter_type(p), in_.beta.shape);
  if (!p.has_diag()) return;
  const std::vector<float> halves(static_cast<std::size_t>(p.heads), 0.5F);
  in_.mix = memory.numbers(parameter_type(p), {1, p.heads, 1, 1}, halves);
  grads_.dmix = memory.zeros(parameter_type(p), in_.mix.shape);
}

void ProblemData::make_outputs(TensorMemory& memory) {
  const Problem& p = problem_;
  out_.o = memory.zeros(p.dtype, {p.batch, p.heads, p.tokens, p.dim_v});
  if (p.op != Op::backward && p.op != Op::train) return;
  if (p.has_lln()) {
    out_.saved.key_lse = memory.zeros(parameter_type(p), {p.sequences, p.heads_k, 1, p.dim});
    out_.saved.channel_values =
        memory.zeros(parameter_type(p), {p.sequences, p.heads_k, p.dim, p.dim_v});
    grads_.saved = out_.saved;
  }
  grads_.g = memory.gaussian(p.dtype, out_.o.shape);
  grads_.dq = memory.zeros(p.dtype, in_.q.shape);
  grads_.dk = memory.zeros(p.dtype, in_.k.shape);
  grads_.dv = memory.zeros(p.dtype, in_.v.shape);
  if (!p.state) return;
  const ConstView& lse = in_.state.key_lse;
  const ConstView& values = in_.state.channel_values;
  grads_.dsaved = {memory.gaussian(lse.dtype, lse.shape),
                   memory.gaussian(values.dtype, values.shape)};
  grads_.dstate = {memory.zeros(lse.dtype, lse.shape), memory.zeros(values.dtype, values.shape)};
}

}  // namespace lln::bench
