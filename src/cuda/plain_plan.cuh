// The plain kernels as a whole: what they need of the workspace, and which of them run for a call,
// in which order. How a kernel is launched is the caller's business.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/plain_causal.cuh"
#include "cuda/plain_parameters.cuh"

namespace lln::cuda::plain {

// Pieces of a state's size are worth some hundred tokens; a walk through a piece has no more than
// one block.
inline constexpr Jobs kJobs{8, 11};
// Blocks that share a piece where nothing is carried from tile to tile.
inline constexpr std::int64_t kParts = 8;
// Shared memory that a block has on every device from compute capability 8.0 on.
inline constexpr int kSharedBytes = 99 * 1024;

inline int shared_bytes(const PlainCall& p, unsigned tiles) {
  CountedMemory memory;
  const Tiles counted(memory, p, tiles);
  return memory.floats * static_cast<int>(sizeof(float));
}

// The largest tile that fits.
inline PlainCall with_tile(PlainCall p, unsigned tiles) {
  p.tile = kMaxTile;
  while (p.tile > 8 && shared_bytes(p, tiles) > kSharedBytes) p.tile /= 2;
  return p;
}

// Hands out the workspace; without memory it only counts.
class Workspace {
 public:
  explicit Workspace(std::byte* memory) : memory_(memory) {}
  float* floats(std::int64_t count) {
    return reinterpret_cast<float*>(bytes(static_cast<std::size_t>(count) * sizeof(float)));
  }
  std::byte* bytes(std::size_t count) {
    std::byte* const piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count + kAlign - 1) / kAlign * kAlign;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t kAlign = 256;
  std::byte* memory_;
  std::size_t used_ = 0;
};

inline std::int64_t most_jobs(const Problem& problem, std::int64_t tokens) {
  return problem.packed ? kJobs.most(tokens, problem.sequences)
                        : problem.sequences * kJobs.count(tokens);
}

// The sizes of a call, and its memory, which lies behind the table of sequences.
inline PlainCall lay_out(const Problem& problem, Workspace& workspace) {
  PlainCall p{};
  p.call.kind = problem.kind;
  p.causal = problem.causal;
  p.packed = problem.packed;
  p.dim = static_cast<int>(problem.dim);
  p.dim_v = static_cast<int>(problem.dim_v);
  p.group = static_cast<int>(problem.heads / problem.heads_k);
  p.batch = problem.batch;
  p.parts = problem.causal && p.has_lln() ? 1 : kParts;
  const std::int64_t q_jobs = p.q_jobs = most_jobs(problem, problem.tokens);
  const std::int64_t k_jobs = p.k_jobs = most_jobs(problem, problem.tokens_k);
  const auto states = [&](std::int64_t slots, bool s) {
    return States{workspace.floats(slots * p.dim), s ? workspace.floats(slots * p.dim) : nullptr,
                  workspace.floats(slots * p.state_size())};
  };
  const bool walks = problem.causal && p.has_lln();
  // Where the sums of keys are joined before those of rows begin, their memory serves both.
  const bool shared = !walks && problem.op == Op::backward;
  if (p.has_lln()) {
    p.pieces = states((shared ? std::max(k_jobs, q_jobs) : k_jobs) * problem.heads_k, true);
    if (walks) {
      p.before.m = workspace.floats(k_jobs * problem.heads_k * p.dim);
      p.before.s = workspace.floats(k_jobs * problem.heads_k * p.dim);
    }
    const bool at_end = problem.op == Op::backward && problem.state;  // dsaved may be given
    if (!walks || at_end) p.total = states(problem.sequences * problem.heads_k, false);
  }
  if (problem.op != Op::backward) return p;
  const std::int64_t rows = problem.batch * problem.heads * problem.tokens;
  const auto statistics = [&] {
    return RowStatistics{workspace.floats(rows), workspace.floats(rows), workspace.floats(rows)};
  };
  if (p.has_diag()) p.diag = statistics();
  p.alpha_sums = workspace.floats(q_jobs * p.parts * problem.heads);
  p.beta_sums = workspace.floats(k_jobs * p.parts * problem.heads_k);
  p.weight_sums = workspace.floats(q_jobs * p.parts * problem.heads * 2 * (problem.dim_v + 1));
  if (!p.has_lln()) return p;
  p.lln = statistics();
  if (shared) {
    p.row_pieces = {nullptr, p.pieces.s, p.pieces.values};
  } else {
    p.row_pieces.s = workspace.floats(q_jobs * problem.heads_k * p.dim);
    p.row_pieces.values = workspace.floats(q_jobs * problem.heads_k * p.state_size());
  }
  if (walks) {
    p = with_tile(p, CausalKeyGradients::tiles(p));  // one tile for all walks
    const std::int64_t chunks = problem.batch * problem.tokens / p.tile + q_jobs + 1;
    p.chunk_c = workspace.floats(chunks * problem.heads_k * p.dim);
  }
  if (!walks || problem.state) {
    p.row_total.s = workspace.floats(problem.sequences * problem.heads_k * p.dim);
    p.row_total.values = workspace.floats(problem.sequences * problem.heads_k * p.state_size());
  }
  return p;
}

inline ParameterGradient gradient_of(const View& view, float lln = 0, float diag = 0) {
  ParameterGradient gradient;
  gradient.data = static_cast<float*>(view.data);
  for (int i = 0; i < 4; ++i) {
    gradient.shape[i] = view.shape[static_cast<std::size_t>(i)];
    gradient.stride[i] = view.stride[static_cast<std::size_t>(i)];
  }
  gradient.lln = lln;
  gradient.diag = diag;
  return gradient;
}

inline SavedState state_of(const View& lse, const View& values) {
  return {static_cast<float*>(lse.data),
          lse.stride[0],
          lse.stride[1],
          static_cast<float*>(values.data),
          values.stride[0],
          values.stride[1],
          values.stride[2]};
}
// One that is read.
inline SavedState state_of(const AttentionState& state) {
  const auto writable = [](const ConstView& x) {
    View view;
    view.data = const_cast<void*>(x.data);
    view.stride = x.stride;
    return view;
  };
  return state_of(writable(state.key_lse), writable(state.channel_values));
}

// Everything but the device's view of the call and its sequences.
inline PlainCall make_plain_call(const Call& call, Workspace& workspace) {
  const Problem& problem = call.problem;
  PlainCall p = lay_out(problem, workspace);
  const bool backward = problem.op == Op::backward;
  const AttentionSaved& saved = backward ? call.grads.saved : call.out.saved;
  p.reads_saved = backward && !problem.causal && saved.key_lse.given();
  if (!backward || p.reads_saved) {
    p.saved = state_of(saved.key_lse, saved.channel_values);
  }
  p.state = state_of(call.in.state);
  if (!backward) return p;
  const AttentionGradients& grads = call.grads;
  p.dsaved = state_of(grads.dsaved);
  p.dstate = state_of(grads.dstate.key_lse, grads.dstate.channel_values);
  p.dalpha = gradient_of(grads.dalpha);
  p.dbeta = gradient_of(grads.dbeta);
  p.weights[0] = gradient_of(grads.dmix, 1, -1);
  p.weights[1] = gradient_of(grads.dlln_weight, 1, 0);
  p.weights[2] = gradient_of(grads.ddiag_weight, 0, 1);
  for (ParameterGradient& weight : p.weights) {
    if (weight.data == nullptr) continue;
    p.wants_weights = true;
    // With one row to a head this is also the shape of a weight per head: both have this gradient.
    weight.per_token = weight.shape[0] == problem.batch && weight.shape[1] == problem.heads &&
                       weight.shape[2] == problem.tokens && weight.shape[3] == 1;
  }
  return p;
}

// launch(body, blocks, bytes of shared memory) runs body(block, i) for every block i.

// A kernel whose tiles say how large they may be.
template <class Body, class Launch>
void launch_tiles(const PlainCall& p, std::int64_t blocks, Launch& launch) {
  const Body body{p.tile == 0 ? with_tile(p, Body::tiles(p)) : p};
  launch(body, blocks, shared_bytes(body.p, Body::tiles(p)));
}

inline int part_bytes() {
  CountedMemory memory;
  const PartTiles counted(memory);
  return memory.floats * static_cast<int>(sizeof(float));
}

template <class Launch>
void launch_states(const PlainCall& p, Launch& launch) {
  const Sequences& all = p.call.sequences;
  if (!p.reads_saved) {
    launch(KeySums{p}, p.k_jobs * p.call.heads_k * StatePart::count(p), part_bytes());
  }
  launch(JoinKeySums{p}, all.count * p.call.heads_k * Pieces::blocks_each(p), 0);
}

template <class Launch>
void launch_zero_rows(const PlainCall& p, bool backward, Launch& launch) {
  const Sequences& all = p.call.sequences;
  if (!p.packed || all.count == 0) return;
  const std::int64_t rows = all.tokens > all.tokens_k ? all.tokens : all.tokens_k;
  launch(ZeroRows{p, backward}, (rows + ZeroRows::kRows - 1) / ZeroRows::kRows, 0);
}

template <class Launch>
void launch_forward(const PlainCall& p, Launch& launch) {
  if (p.has_lln()) launch_states(p, launch);
  if (p.causal && p.has_lln()) {
    launch_tiles<CausalRows>(p, p.q_jobs * p.call.heads_k, launch);
  } else {
    launch_tiles<ForwardRows>(p, p.q_jobs * p.parts * p.call.heads, launch);
  }
  launch_zero_rows(p, false, launch);
}

template <class Launch>
void launch_parameters(const PlainCall& p, Launch& launch) {
  const auto one = [&](Parameter parameter, const ParameterGradient& to) {
    if (to.data == nullptr || to.per_token) return;
    launch(ParameterSums{p, parameter, to}, to.shape[0] * to.shape[1] * to.shape[3],
           kThreads * static_cast<int>(sizeof(double)));
  };
  one(Parameter::alpha, p.dalpha);
  one(Parameter::beta, p.dbeta);
  for (const ParameterGradient& weight : p.weights) one(Parameter::weight, weight);
}

template <class Launch>
void launch_backward(const PlainCall& p, Launch& launch) {
  const Sequences& all = p.call.sequences;
  const bool walks = p.causal && p.has_lln();
  const std::int64_t row_blocks = p.q_jobs * p.parts * p.call.heads;
  const std::int64_t key_blocks = p.k_jobs * p.parts * p.call.heads_k;
  if (p.has_lln()) launch_states(p, launch);
  if (walks) {
    launch_tiles<CausalRowGradients>(p, p.q_jobs * p.call.heads_k, launch);
  } else {
    launch_tiles<RowGradients>(p, row_blocks, launch);
  }
  if (p.has_lln()) {
    launch(RowSums{p}, p.q_jobs * p.call.heads_k * StatePart::count(p), part_bytes());
    launch(JoinRowSums{p}, all.count * p.call.heads_k * Pieces::blocks_each(p), 0);
  }
  if (p.dstate.given()) {
    launch(StateGradient{p}, all.count * p.call.heads_k * Pieces::blocks_each(p), 0);
  }
  if (walks) {
    launch_tiles<CausalKeyGradients>(p, key_blocks, launch);
  } else {
    launch_tiles<KeyGradients>(p, key_blocks, launch);
  }
  launch_parameters(p, launch);
  launch_zero_rows(p, true, launch);
}

}  // namespace lln::cuda::plain
