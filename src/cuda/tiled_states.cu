// Pieces of a longer sequence: the state of keys elsewhere joins that of the keys at hand, and the
// gradients of both (docs/pieces.md). States are small, so that a warp takes a channel and nothing
// here is tuned.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/mma.cuh"
#include "cuda/tiled_launch.h"
#include "cuda/warp.cuh"

namespace lln::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// A warp's channel of a sequence and key head.
struct Channel {
  std::int64_t s, head;
  int l;
  bool inside;
};

__device__ Channel own_channel(const DeviceCall& call) {
  const std::int64_t index =
      std::int64_t{blockIdx.x} * (kThreads / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t head = index / call.dim;
  return {head / call.heads_k, head % call.heads_k, static_cast<int>(index % call.dim),
          index < call.sequences.count * call.heads_k * call.dim};
}

// One channel of a state or of the gradient of one.
struct ChannelOf {
  float* c = nullptr;
  float* values = nullptr;
};

__device__ ChannelOf channel_of(const StateView& state, const Channel& at) {
  return {state.c_at(at.s, at.head) + at.l, state.values_at(at.s, at.head) + at.l * state.row};
}

// c, which is -inf where there is no key and nothing else is read of the channel.
__device__ float mass_of(float c) { return c == -INFINITY ? c : clamp_keep_nan(c); }

__global__ void __launch_bounds__(kThreads)
    join_given(const __grid_constant__ TiledCall tiled, const bool has_keys) {
  wait_for_previous();
  let_next_start();
  const Channel at = own_channel(tiled.call);
  if (!at.inside) return;
  const ChannelOf all = channel_of(tiled.state, at), given = channel_of(tiled.given, at);
  const float own_c = has_keys ? *all.c : -INFINITY, given_c = mass_of(*given.c);
  const float top = fmaxf(own_c, given_c);
  const bool any = own_c != -INFINITY || given_c != -INFINITY;  // also NaN, which fmaxf() drops
  const float own = own_c == -INFINITY ? 0 : expf(own_c - top);
  const float other = given_c == -INFINITY ? 0 : expf(given_c - top);
  const float inverse = any ? 1 / (own + other) : 0;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int column = lane; column < tiled.call.dim_v; column += kWarp) {
    const float mine = own == 0 ? 0 : own * all.values[column];
    all.values[column] = (mine + (other == 0 ? 0 : other * given.values[column])) * inverse;
  }
  __syncwarp();  // all lanes have read c
  if (lane == 0) *all.c = any ? top + logf(own + other) : -INFINITY;
}

// The state of all keys is (c, C), and dC, t = C . dC - dc what it receives: from the rows, and
// from what is given of it. Of that the given keys have the share exp(c' - c).
__global__ void __launch_bounds__(kThreads)
    state_gradients(const __grid_constant__ TiledCall tiled, const bool has_rows) {
  wait_for_previous();
  let_next_start();
  const Channel at = own_channel(tiled.call);
  if (!at.inside) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int columns = static_cast<int>(tiled.call.dim_v);
  const ChannelOf all = channel_of(tiled.state, at), sums = channel_of(tiled.grads, at);
  const float c = *all.c;
  const bool any = c != -INFINITY;
  float t = has_rows && any ? *sums.c : 0;
  if (tiled.dsaved.given()) {  // always where there are no rows
    const ChannelOf dsaved = channel_of(tiled.dsaved, at);
    float product = 0;
    for (int column = lane; column < columns; column += kWarp) {
      const float added = any ? dsaved.values[column] : 0;
      if (any) product = fmaf(all.values[column], added, product);
      sums.values[column] = (has_rows && any ? sums.values[column] : 0) + added;
    }
    if (any) t += warp_sum(product) - *dsaved.c;
    __syncwarp();  // all lanes have read t
    if (lane == 0) *sums.c = t;
  }
  if (!tiled.dstate.given()) return;
  const ChannelOf given = channel_of(tiled.given, at), dstate = channel_of(tiled.dstate, at);
  const float given_c = mass_of(*given.c);
  const float share = given_c == -INFINITY ? 0 : expf(given_c - c);
  float product = 0;
  for (int column = lane; column < columns; column += kWarp) {
    const float received = sums.values[column];
    if (share != 0) product = fmaf(given.values[column], received, product);
    dstate.values[column] = share == 0 ? 0 : share * received;
  }
  product = warp_sum(product);
  if (lane == 0) *dstate.c = share == 0 ? 0 : share * (product - t);
}

LaunchShape of_channels(const DeviceCall& call, const TiledPlan& plan) {
  const std::int64_t channels = call.sequences.count * call.heads_k * call.dim;
  constexpr int kEach = kThreads / kWarp;
  return {(channels + kEach - 1) / kEach, kThreads, 0, plan.stream, true};
}

}  // namespace

void launch_given_state(const TiledCall& tiled, const TiledPlan& plan) {
  if (!tiled.given.given()) return;
  launch("join_given", join_given, of_channels(tiled.call, plan), tiled, plan.has_keys);
}

void launch_state_gradients(const TiledCall& tiled, const TiledPlan& plan) {
  if (!tiled.dsaved.given() && !tiled.dstate.given()) return;
  launch("state_gradients", state_gradients, of_channels(tiled.call, plan), tiled, plan.has_rows);
}

}  // namespace lln::cuda
