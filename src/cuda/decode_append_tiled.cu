// Appending a prompt by the causal walks on tensor cores. They have no reference exponents: the
// sums so far go to them as s = sum 2^u and K = sum 2^u v, and those of the new tokens come back.
// Before a walk the kernels of decode_append.cu take the tokens up to the first border of diagonal
// blocks, and behind it the slots that are out of its reach, which are flagged: exponents that are
// not moderate, results that are not finite, few tokens.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "cuda/decode.h"
#include "cuda/decode_kernels.h"
#include "cuda/decode_sets.cuh"
#include "cuda/instructions.cuh"
#include "cuda/sm90/causal.h"
#include "cuda/tiled_causal_plan.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

// Masses so far with which those of rows, sums over 128 channels of weights up to 2^48, stay inside
// of f32.
constexpr float kLeastMass = 0x1p-100F, kMostMass = 0x1p60F;
constexpr float kLargestFinite = std::numeric_limits<float>::max();

struct TiledAppend {
  DecodeCall call;
  Partials given, own;    // of the walk
  DeviceSequence* table;  // of the walk; null: all sequences add all tokens
  std::uint32_t* flags;   // of the walk: whether any slot, and which, is out of reach
};

__device__ inline void flag(const TiledAppend& a, std::int64_t slot) {
  raise_flag(a.flags[0]);
  raise_flag(a.flags[1 + slot]);
}

// What the walk begins from.
__global__ void __launch_bounds__(kSetThreads)
    append_begin_kernel(const __grid_constant__ TiledAppend a) {
  const DecodeCall& c = a.call;
  const DecodeShape& shape = c.shape;
  const auto [slot, l] = find_channel(shape);
  const std::int64_t sequence = slot / c.call.heads_k;
  const TokenRange walk = walk_tokens(c, slot, added_tokens(c, sequence));
  if (a.table != nullptr && l == 0 && slot % c.call.heads_k == 0 && threadIdx.x == 0) {
    DeviceSequence& to = a.table[sequence];
    to.q_begin = to.k_begin = walk.begin;
    to.q_tokens = to.k_tokens = to.key_end = walk.end - walk.begin;
  }
  if (l >= shape.d) return;
  const DecodeSlot own = shape.slot(c.state, slot);
  const ChannelSet sums =
      joined(load_channel(shape, own.all, l), load_channel(shape, own.recent, l));
  const float mass = sums.s == 0 ? 0 : sums.s * exp2f(sums.m);
  bool good = walk.end > 0 && (sums.s == 0 || (mass >= kLeastMass && mass <= kMostMass));
  const int lane = static_cast<int>(threadIdx.x) % 32, column = 4 * lane;
  if (column < shape.dv) {
    const float4 x = sums.values[0];
    const float4 values = {x.x * mass, x.y * mass, x.z * mass, x.w * mass};
    for (const float value : {values.x, values.y, values.z, values.w}) {
      good = good && fabsf(value) <= kLargestFinite;
    }
    *reinterpret_cast<float4*>(a.given.values + (slot * shape.d + l) * shape.dv + column) = values;
  }
  if (lane == 0) a.given.s[slot * shape.d + l] = mass;
  if (!good) flag(a, slot);
}

// The tokens of the walk become the recent set; what there was becomes one.
__global__ void __launch_bounds__(kSetThreads)
    append_take_kernel(const __grid_constant__ TiledAppend a) {
  const DecodeShape& shape = a.call.shape;
  const auto [slot, l] = find_channel(shape);
  if (l >= shape.d || a.flags[1 + slot] != 0) return;
  const DecodeSlot into = shape.slot(a.call.state, slot);
  const float mass = a.own.s[slot * shape.d + l], inverse = 1 / mass;
  const int exponent = ilogbf(mass), column = 4 * (static_cast<int>(threadIdx.x) % 32);
  ChannelSet added{static_cast<float>(exponent), scalbnf(mass, -exponent), {}};
  if (column < shape.dv) {
    const float4 x =
        *reinterpret_cast<const float4*>(a.own.values + (slot * shape.d + l) * shape.dv + column);
    added.values[0] = {x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse};
  }
  store_channel(shape, into.all, l,
                joined(load_channel(shape, into.all, l), load_channel(shape, into.recent, l)));
  store_channel(shape, into.recent, l, added);
}

// The walk is the causal forward pass of the same tensors. With blocks it has a table, because its
// sequences begin at a border.
Problem walk_of(Problem p) {
  p.op = Op::forward;
  p.causal = true;
  p.masked = p.masked || p.has_diag();
  return p;
}

Partials sums_of_slots(Layout& layout, const Problem& p) {
  return take_partials(layout, p, p.batch * p.heads_k);
}

std::size_t bytes(const Problem& p, int) {
  const Problem walk = walk_of(p);
  Layout layout(nullptr);
  sums_of_slots(layout, p);
  sums_of_slots(layout, p);
  return std::max(causal_scratch_bytes(walk) + layout.bytes(),
                  causal_flag_bytes(walk) + append_bytes(p));
}

template <CausalLaunch kForward>
void run(const Call& call) {
  const Problem& p = call.problem;
  if (!tiled_takes(call)) {
    static const Kernel other = decode_append_kernels().back();
    return other.run(call);
  }
  if (p.has_diag()) append_many(call, AppendPart::lead);
  Call walk = call;
  walk.problem = walk_of(p);
  CausalWork work = prepare_causal(walk);
  CausalCall& causal = work.causal;
  Layout layout(call.workspace + causal_scratch_bytes(walk.problem));
  causal.given = sums_of_slots(layout, p);
  causal.own = sums_of_slots(layout, p);
  const TiledAppend a{make_decode_call(call), causal.given, causal.own,
                      causal.call.sequences.table == nullptr ? nullptr : work.table, causal.flags};
  const LaunchShape shape{p.batch * p.heads_k * set_blocks(p.dim), kSetThreads, 0,
                          work.plan.stream};
  launch("append_begin_kernel", append_begin_kernel, shape, a);
  kForward(causal, work.plan);
  launch("append_take_kernel", append_take_kernel, shape, a);
  Call others = call;
  others.workspace = call.workspace + causal_flag_bytes(walk.problem);
  append_many(others, AppendPart::rest, causal.flags);
  append_end(call);
}

template <std::string (*kRefusal)(const Problem&)>
std::string refusal(const Problem& p) {
  if (std::string reason = kRefusal(walk_of(p)); !reason.empty()) return reason;
  if (p.tokens == 0) return "is for appends with q";
  if (p.tokens_k < kShortestWalk) {
    return "takes " + std::to_string(kShortestWalk) + " tokens or more";
  }
  return append_refusal(p);
}

}  // namespace

std::vector<Kernel> tiled_append_kernels() {
  return {
      {"cuda-sm90-causal", refusal<sm90_causal_refusal>, bytes, run<sm90::launch_causal_forward>},
      {"cuda-tiled-causal", refusal<tiled_causal_refusal>, bytes, run<launch_causal_forward>}};
}

}  // namespace lln::cuda
