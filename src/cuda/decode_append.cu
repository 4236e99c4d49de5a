// Appending many tokens. A sequence is cut into pieces by its own length: the sums of each piece
// from nothing, then the states before all of them by a scan of merges that ends in the slot, then
// the rows of each piece from the state before it. Last the running block and the counts.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/decode.h"
#include "cuda/decode_kernels.h"
#include "cuda/decode_sets.cuh"
#include "cuda/decode_walk.cuh"
#include "cuda/instructions.cuh"
#include "cuda/launch.h"

namespace lln::cuda {
namespace {

// Up to so many tokens are taken one by one: a step each costs less than the four launches here.
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
  std::int64_t tasks;   // of all slots: pieces times columns
  AppendPart part;
  const std::uint32_t* flags;  // [1 + slots]: whether any slot is added to, and which; null: all
};

// The tokens of a slot that are added here.
__device__ inline TokenRange tokens_of(const AppendCall& a, std::int64_t slot) {
  const DecodeCall& c = a.call;
  const std::int64_t added = added_tokens(c, slot / c.call.heads_k);
  if (added <= kFewTokens || (a.flags != nullptr && a.flags[1 + slot] == 0)) return {0, 0};
  if (a.part == AppendPart::all) return {0, added};
  const TokenRange walk = walk_tokens(c, slot, added);
  return a.part == AppendPart::lead ? TokenRange{0, walk.begin} : TokenRange{walk.begin, added};
}

__device__ inline KeySet piece_sums(const AppendCall& a, std::int64_t slot, std::int64_t piece) {
  const DecodeShape& shape = a.call.shape;
  float* const m = a.sums + (slot * a.pieces + piece) * shape.set_floats();
  return {m, m + shape.dp, m + 2 * shape.dp};
}

// The sums of a piece, or its rows.
template <bool kRead>
__device__ void walk_piece(const AppendCall& a, float* memory, std::int64_t task) {
  const DecodeCall& c = a.call;
  const auto columns = static_cast<int>(task % a.columns);
  const std::int64_t slot = task / a.columns / a.pieces, piece = task / a.columns % a.pieces;
  const TokenRange tokens = tokens_of(a, slot);
  const std::int64_t each = piece_tokens(tokens.end - tokens.begin);
  const std::int64_t begin = tokens.begin + piece * each, end = min(tokens.end, begin + each);
  if (begin >= end) return;
  const KeySet set = piece_sums(a, slot, piece);
  Walk walk(c, memory, slot, columns);
  walk.begin(kRead ? &set : nullptr);
  for (std::int64_t first = begin; first < end; first += kWalkChunk) {
    walk.chunk<kRead>(first, static_cast<int>(min(end - first, std::int64_t{kWalkChunk})));
  }
  if (!kRead) walk.store(set);
  __syncthreads();  // the next one may use the memory
}

template <bool kRead>
__global__ void __launch_bounds__(kWalkThreads)
    append_walk_kernel(const __grid_constant__ AppendCall a) {
  LLN_DYNAMIC_SHARED(memory);
  if (a.flags != nullptr && a.flags[0] == 0) return;
  for (std::int64_t task = blockIdx.x; task < a.tasks; task += gridDim.x) {
    walk_piece<kRead>(a, reinterpret_cast<float*>(memory), task);
  }
}

// A warp takes a channel of a slot through all pieces: what was the sums of a piece becomes the
// state before it, and the slot the state after the last.
__global__ void __launch_bounds__(kSetThreads)
    append_scan_kernel(const __grid_constant__ AppendCall a) {
  const DecodeCall& c = a.call;
  const DecodeShape& shape = c.shape;
  if (a.flags != nullptr && a.flags[0] == 0) return;
  const auto [slot, l] = find_channel(shape);
  const TokenRange range = tokens_of(a, slot);
  const std::int64_t tokens = range.end - range.begin;
  if (tokens <= 0 || l >= shape.d) return;
  const std::int64_t before = c.tokens[slot] + range.begin;
  const DecodeSlot own = shape.slot(c.state, slot);
  ChannelSet all = load_channel(shape, own.all, l);
  ChannelSet recent = load_channel(shape, own.recent, l);
  const std::int64_t each = piece_tokens(tokens);
  for (std::int64_t piece = 0; piece * each < tokens; ++piece) {
    const KeySet set = piece_sums(a, slot, piece);
    const ChannelSet sums = load_channel(shape, set, l);
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

// Where slots are flagged most calls have none: then no more blocks come than the device has at
// once, look, and go.
template <bool kRead>
void launch_walk(const AppendCall& a, int device, cudaStream_t stream) {
  const std::int64_t at_once = 2 * multiprocessors(device);
  const std::int64_t blocks = a.flags == nullptr ? a.tasks : std::min(a.tasks, at_once);
  const auto bytes = static_cast<int>(walk_floats(a.call.shape, kRead) * 4);
  launch("append_walk_kernel", append_walk_kernel<kRead>,
         LaunchShape{blocks, kWalkThreads, bytes, stream, false, shared_memory(device)}, a);
}

void run_append(const Call& call) {
  if (call.problem.tokens_k == 0) return;
  if (call.problem.tokens_k > kFewTokens) append_many(call);
  append_end(call);
}

std::size_t bytes(const Problem& p, int) { return append_bytes(p); }

}  // namespace

void append_many(const Call& call, AppendPart part, const std::uint32_t* flags) {
  const Problem& p = call.problem;
  const std::int64_t slots = p.batch * p.heads_k;
  const std::int64_t pieces = part == AppendPart::lead ? 1 : most_pieces(p.tokens_k);
  const std::int64_t columns = blocks_for(p.dim_v, kWalkColumns);
  const AppendCall a{make_decode_call(call),
                     reinterpret_cast<float*>(call.workspace),
                     pieces,
                     static_cast<int>(columns),
                     slots * pieces * columns,
                     part,
                     flags};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  launch_walk<false>(a, p.device.index, stream);
  launch("append_scan_kernel", append_scan_kernel,
         LaunchShape{slots * set_blocks(p.dim), kSetThreads, 0, stream}, a);
  if (a.call.rows) launch_walk<true>(a, p.device.index, stream);
}

void append_end(const Call& call) {
  const Problem& p = call.problem;
  const std::int64_t slots = p.batch * p.heads_k;
  if (p.tokens_k <= kFewTokens || call.in.key_lengths.given()) append_few(call, kFewTokens);
  if (p.tokens_k <= kFewTokens) return;
  launch("append_end_kernel", append_end_kernel,
         LaunchShape{slots, kEndThreads, 0, static_cast<cudaStream_t>(call.stream)},
         make_decode_call(call));
}

std::size_t append_bytes(const Problem& p) {
  if (p.tokens_k <= kFewTokens) return 0;
  const DecodeShape shape(p.dim, p.dim_v, 0);
  return static_cast<std::size_t>(p.batch * p.heads_k * most_pieces(p.tokens_k) *
                                  shape.set_floats()) *
         sizeof(float);
}

std::string append_refusal(const Problem& p) {
  if (std::string reason = decode_refusal(p); !reason.empty()) return reason;
  if (p.device.kind != DeviceKind::cuda || !device_refusal(p.device.index).empty()) return {};
  const std::int64_t needed = 4 * walk_floats({p.dim, p.dim_v, p.diag_block}, true);
  if (needed <= shared_memory(p.device.index)) return {};
  return "needs " + std::to_string(needed) + " bytes of shared memory, a block of the device has " +
         std::to_string(shared_memory(p.device.index));
}

std::vector<Kernel> decode_append_kernels() {
  return {{"cuda", append_refusal, bytes, run_append}};
}

}  // namespace lln::cuda
