// Appending many tokens. A sequence is cut into pieces by its own length: the sums of each piece
// from nothing, then the states before all of them by a scan of merges that ends in the slot, then
// the rows of each piece from the state before it. Last the running block and the counts.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/decode.h"
#include "cuda/decode_kernels.h"
#include "cuda/decode_walk.cuh"
#include "cuda/instructions.cuh"
#include "cuda/launch.h"

namespace lln::cuda {
namespace {

// Fewer tokens than this are taken one by one: a step each costs less than the four launches here.
constexpr std::int64_t kFewTokens = 4;
// Tokens of a piece: short ones fill the device from a few thousand tokens on, long ones keep the
// scan short and their states small beside the tokens.
constexpr std::int64_t kShortPiece = 256, kLongPiece = 1024;
constexpr std::int64_t kLongSequence = 8192;

__host__ __device__ inline std::int64_t piece_tokens(std::int64_t tokens) {
  return tokens <= kLongSequence ? kShortPiece : kLongPiece;
}

// No sequence of at most so many tokens has more pieces.
std::int64_t most_pieces(std::int64_t tokens) {
  return std::max(blocks_for(std::min(tokens, kLongSequence), kShortPiece),
                  blocks_for(tokens, kLongPiece));
}

struct AppendCall {
  DecodeCall call;
  float* sums;          // [slots, pieces, set_floats()]: KeySets
  std::int64_t pieces;  // most of a sequence
  int columns;          // groups of kWalkColumns
};

__device__ inline KeySet piece_sums(const AppendCall& a, std::int64_t slot, std::int64_t piece) {
  const DecodeShape& shape = a.call.shape;
  float* const m = a.sums + (slot * a.pieces + piece) * shape.set_floats();
  return {m, m + shape.dp, m + 2 * shape.dp};
}

// The sums of a piece, or its rows.
template <bool kRead>
__global__ void __launch_bounds__(kWalkThreads)
    append_walk_kernel(const __grid_constant__ AppendCall a) {
  LLN_DYNAMIC_SHARED(memory);
  const DecodeCall& c = a.call;
  const int columns = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.columns));
  const std::int64_t task = blockIdx.x / static_cast<unsigned>(a.columns);
  const std::int64_t slot = task / a.pieces, piece = task % a.pieces;
  const std::int64_t tokens = added_tokens(c, slot / c.call.heads_k);
  const std::int64_t begin = piece * piece_tokens(tokens);
  if (tokens <= kFewTokens || begin >= tokens) return;
  const std::int64_t end = min(tokens, begin + piece_tokens(tokens));
  const KeySet set = piece_sums(a, slot, piece);
  Walk walk(c, reinterpret_cast<float*>(memory), slot, columns);
  walk.begin(kRead ? &set : nullptr);
  for (std::int64_t first = begin; first < end; first += kWalkChunk) {
    walk.chunk<kRead>(first, static_cast<int>(min(end - first, std::int64_t{kWalkChunk})));
  }
  if (!kRead) walk.store(set);
}

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / 32;

// A channel of a set: its mass, and the columns 4 lane and 4 lane + 128 of its values.
struct ChannelSums {
  float m, s;
  float4 values[2];
};

__device__ inline ChannelSums load_channel(const DecodeShape& shape, const KeySet& set, int l) {
  ChannelSums sums{set.m[l], set.s[l], {}};
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = 4 * lane + 128 * i;
    if (column >= shape.dvp) continue;
    sums.values[i] = *reinterpret_cast<const float4*>(set.values + l * shape.dvp + column);
  }
  return sums;
}

__device__ inline void store_channel(const DecodeShape& shape, const KeySet& set, int l,
                                     const ChannelSums& sums) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // all lanes have read what is overwritten
  if (lane == 0) {
    set.m[l] = sums.m;
    set.s[l] = sums.s;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = 4 * lane + 128 * i;
    if (column >= shape.dvp) continue;
    *reinterpret_cast<float4*>(set.values + l * shape.dvp + column) = sums.values[i];
  }
}

__device__ inline ChannelSums joined(const ChannelSums& x, const ChannelSums& y) {
  const JoinedMass mass = join_mass<float>(x.m, x.s, y.m, y.s);
  ChannelSums sums{mass.m, mass.s, {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 &a = x.values[i], &b = y.values[i];
    sums.values[i] = {mass.first * a.x + mass.second * b.x, mass.first * a.y + mass.second * b.y,
                      mass.first * a.z + mass.second * b.z, mass.first * a.w + mass.second * b.w};
  }
  return sums;
}

// A warp takes a channel of a slot through all pieces: what was the sums of a piece becomes the
// state before it, and the slot the state after the last.
__global__ void __launch_bounds__(kScanThreads)
    append_scan_kernel(const __grid_constant__ AppendCall a) {
  const DecodeCall& c = a.call;
  const DecodeShape& shape = c.shape;
  const auto blocks = static_cast<unsigned>((shape.d + kScanWarps - 1) / kScanWarps);
  const std::int64_t slot = blockIdx.x / blocks;
  const int l = static_cast<int>(blockIdx.x % blocks * kScanWarps + threadIdx.x / 32);
  const std::int64_t tokens = added_tokens(c, slot / c.call.heads_k);
  if (tokens <= kFewTokens || l >= shape.d) return;
  const std::int64_t before = c.tokens[slot];
  const DecodeSlot own = shape.slot(c.state, slot);
  ChannelSums all = load_channel(shape, own.all, l);
  ChannelSums recent = load_channel(shape, own.recent, l);
  const std::int64_t each = piece_tokens(tokens);
  for (std::int64_t piece = 0; piece * each < tokens; ++piece) {
    const KeySet set = piece_sums(a, slot, piece);
    const ChannelSums sums = load_channel(shape, set, l);
    store_channel(shape, set, l, joined(all, recent));
    const std::int64_t size = min(each, tokens - piece * each);
    if ((before + piece * each) % kRecentTokens + size > kRecentTokens) {
      all = joined(all, recent);
      recent = {kNoReference, 0, {}};
    }
    recent = joined(recent, sums);
  }
  store_channel(shape, own.all, l, all);
  store_channel(shape, own.recent, l, recent);
}

constexpr int kEndThreads = 256;

// The running block, the count, and rows past the last token.
__global__ void __launch_bounds__(kEndThreads)
    append_end_kernel(const __grid_constant__ DecodeCall c) {
  const std::int64_t slot = blockIdx.x;
  const std::int64_t sequence = slot / c.call.heads_k, head_k = slot % c.call.heads_k;
  const std::int64_t added = added_tokens(c, sequence);
  if (added <= kFewTokens) return;
  const std::int64_t tokens = c.tokens[slot] + added;
  const DecodeShape& shape = c.shape;
  const DecodeSlot own = shape.slot(c.state, slot);
  const std::int64_t kept = min(added, shape.block_tokens(tokens));
  const auto copy = [&](const Rows& from, std::int64_t i, float* to, std::int64_t width) {
    const std::int64_t at = row_at(from, sequence, head_k, added - i);
    for (std::int64_t l = threadIdx.x % 32; l < width; l += 32) {
      to[l] = load_number(from, c.call.dtype, at + l);
    }
  };
  for (std::int64_t i = 1 + threadIdx.x / 32; i <= kept; i += kEndThreads / 32) {
    const std::int64_t row = (tokens - i) % shape.block;
    copy(c.call.k, i, own.block_k + row * shape.dp, shape.d);
    copy(c.call.v, i, own.block_v + row * shape.dvp, shape.dv);
  }
  if (c.rows) zero_rows(c, sequence, head_k, added, c.call.sequences.tokens);
  __syncthreads();  // all threads have read the count
  if (threadIdx.x == 0) c.tokens[slot] = tokens;
}

template <bool kRead>
void launch_walk(const AppendCall& a, std::int64_t blocks, int device, cudaStream_t stream) {
  const auto bytes = static_cast<int>(walk_floats(a.call.shape, kRead) * 4);
  launch("append_walk_kernel", append_walk_kernel<kRead>,
         LaunchShape{blocks, kWalkThreads, bytes, stream, false, shared_memory(device)}, a);
}

std::string append_refusal(const Problem& p) {
  if (std::string reason = decode_refusal(p); !reason.empty()) return reason;
  if (p.device.kind != DeviceKind::cuda || !device_refusal(p.device.index).empty()) return {};
  const std::int64_t needed = 4 * walk_floats({p.dim, p.dim_v, p.diag_block}, true);
  if (needed <= shared_memory(p.device.index)) return {};
  return "needs " + std::to_string(needed) + " bytes of shared memory, a block of the device has " +
         std::to_string(shared_memory(p.device.index));
}

void run_append(const Call& call) {
  const Problem& p = call.problem;
  const std::int64_t slots = p.batch * p.heads_k;
  if (slots == 0 || p.tokens_k == 0) return;
  append_few(call, kFewTokens);
  if (p.tokens_k <= kFewTokens) return;
  const AppendCall a{make_decode_call(call), reinterpret_cast<float*>(call.workspace),
                     most_pieces(p.tokens_k), static_cast<int>(blocks_for(p.dim_v, kWalkColumns))};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const std::int64_t blocks = slots * a.pieces * a.columns;
  launch_walk<false>(a, blocks, p.device.index, stream);
  launch("append_scan_kernel", append_scan_kernel,
         LaunchShape{slots * blocks_for(p.dim, kScanWarps), kScanThreads, 0, stream}, a);
  if (a.call.rows) launch_walk<true>(a, blocks, p.device.index, stream);
  launch("append_end_kernel", append_end_kernel, LaunchShape{slots, kEndThreads, 0, stream},
         a.call);
}

std::size_t append_workspace(const Problem& p, int) {
  if (p.tokens_k <= kFewTokens) return 0;
  const DecodeShape shape(p.dim, p.dim_v, 0);
  return static_cast<std::size_t>(p.batch * p.heads_k * most_pieces(p.tokens_k) *
                                  shape.set_floats()) *
         sizeof(float);
}

}  // namespace

std::vector<Kernel> decode_append_kernels() {
  return {{"cuda", append_refusal, append_workspace, run_append}};
}

}  // namespace lln::cuda
