// The kernels that take a decode state token by token: a step, a read, and an append of few tokens.
// A block has a slot of the state to itself.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/decode.h"
#include "cuda/decode_kernels.h"
#include "cuda/decode_step.cuh"
#include "cuda/decode_step_columns.cuh"
#include "cuda/launch.h"

namespace lln::cuda {
namespace {

// Rows that a block reads at once where there is more than one.
constexpr int kManyRows = 4;
// Blocks that share a multiprocessor: 80 registers a thread, or 128.
template <int kRows>
constexpr int kBlocks = kRows == 1 ? 3 : 2;

// Sequences that add more than `most` tokens are left to the kernels of decode_append.cu.
template <int kRows, bool kBlock>
__global__ void __launch_bounds__(kStepThreads, kBlocks<kRows>)
    decode_step_kernel(const __grid_constant__ DecodeCall c, std::int64_t most, unsigned resident) {
  __shared__ StepShared<kRows> shared;
  const unsigned heads_k = static_cast<unsigned>(c.call.heads_k);
  const unsigned sequence = blockIdx.x / heads_k;
  const std::int64_t added = added_tokens(c, sequence);
  if (added > most) return;
  if (added > 0) {
    StepHead<kRows, kBlock> head(c, shared, blockIdx.x);
    prefetch_later_slots(c, resident);
    for (std::int64_t i = 0; i < added; ++i) head.add(i);
    head.store();
  }
  if (c.rows) zero_rows(c, sequence, blockIdx.x % heads_k, added, c.call.sequences.tokens);
}

// A block reads `tiles` times kRows rows of a slot: of one head after the other, or where there is
// one row, of neighbouring heads.
template <int kRows, bool kBlock>
__global__ void __launch_bounds__(kStepThreads, kBlocks<kRows>)
    decode_read_kernel(const __grid_constant__ DecodeCall c, unsigned tiles, unsigned heads) {
  __shared__ StepShared<kRows> shared;
  const unsigned slot = blockIdx.x / (tiles * heads);
  const unsigned head = blockIdx.x / tiles % heads, tile = blockIdx.x % tiles;
  const std::int64_t tokens = c.call.sequences.tokens;
  if (c.tokens[slot] == 0) {
    const unsigned heads_k = static_cast<unsigned>(c.call.heads_k);
    if (head == 0 && tile == 0) zero_rows(c, slot / heads_k, slot % heads_k, 0, tokens);
    return;
  }
  StepHead<kRows, kBlock> reader(c, shared, slot);
  if (tokens == 1) {
    const unsigned group = static_cast<unsigned>(c.call.heads / c.call.heads_k);
    const unsigned first = tile * kRows;
    reader.read({first, 0, 1, 0, static_cast<int>(min(group - first, unsigned{kRows}))});
  } else {
    const std::int64_t first = std::int64_t{tile} * kRows;
    const auto count = static_cast<int>(min(tokens - first, std::int64_t{kRows}));
    reader.read({head, first, 0, 1, count});
  }
}

template <int kRows, bool kBlock>
void launch_read(const DecodeCall& c, std::int64_t slots, cudaStream_t stream) {
  const std::int64_t group = c.call.heads / c.call.heads_k;
  const std::int64_t tokens = c.call.sequences.tokens;
  const std::int64_t heads = tokens == 1 ? 1 : group;
  const std::int64_t tiles = blocks_for(tokens == 1 ? group : tokens, kRows);
  launch("decode_read_kernel", decode_read_kernel<kRows, kBlock>,
         LaunchShape{slots * heads * tiles, kStepThreads, 0, stream}, c,
         static_cast<unsigned>(tiles), static_cast<unsigned>(heads));
}

void step_columns(const Call& call) {
  const Problem& p = call.problem;
  const DecodeCall c = make_decode_call(call);
  const auto kernel = p.dim <= 32    ? decode_step_columns<1>
                      : p.dim <= 64  ? decode_step_columns<2>
                      : p.dim <= 128 ? decode_step_columns<4>
                                     : decode_step_columns<8>;
  const int warps = static_cast<int>(c.shape.dvp) / kWarpColumns;
  const int resident = multiprocessors(p.device.index) * (kResidentWarps / warps);
  launch(
      "decode_step_columns", kernel,
      LaunchShape{p.batch * p.heads_k, 32 * warps, 0, static_cast<cudaStream_t>(call.stream), true},
      c, static_cast<unsigned>(resident));
}

void run_step(const Call& call) {
  const Problem& p = call.problem;
  if (p.tokens_k > 0) {
    return p.heads == p.heads_k && !p.has_diag() ? step_columns(call) : append_few(call, 1);
  }
  const DecodeCall c = make_decode_call(call);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const bool one = p.heads / p.heads_k * p.tokens == 1;
  const auto read = p.has_diag() ? one ? launch_read<1, true> : launch_read<kManyRows, true>
                    : one ? launch_read<1, false>
                                 : launch_read<kManyRows, false>;
  read(c, p.batch * p.heads_k, stream);
}

}  // namespace

void append_few(const Call& call, std::int64_t most) {
  const Problem& p = call.problem;
  const DecodeCall c = make_decode_call(call);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const bool one = p.heads == p.heads_k || !c.rows;
  const auto kernel = p.has_diag()
                          ? one ? decode_step_kernel<1, true> : decode_step_kernel<kManyRows, true>
                      : one ? decode_step_kernel<1, false>
                            : decode_step_kernel<kManyRows, false>;
  const int each = one ? kBlocks<1> : kBlocks<kManyRows>;
  const auto resident = static_cast<unsigned>(multiprocessors(p.device.index) * each);
  launch("decode_step_kernel", kernel, LaunchShape{p.batch * p.heads_k, kStepThreads, 0, stream}, c,
         most, resident);
}

std::string decode_refusal(const Problem& problem) {
  if (!problem.has_lln()) return "decoding is of lln and lln+diagB alone";
  if (problem.dtype == DType::f64) return "decoding takes f32, f16 and bf16";
  // No kernel has more blocks: a read takes kManyRows rows in each, a scan 8 of 256 channels.
  const std::int64_t most =
      std::max<std::int64_t>(32, blocks_for(std::max(problem.tokens, problem.tokens_k), kManyRows));
  const double blocks = static_cast<double>(problem.batch) * static_cast<double>(problem.heads) *
                        static_cast<double>(most);
  if (blocks > 0x7FFFFFFF) return "more heads and rows than a grid has blocks";
  return {};
}

std::vector<Kernel> decode_step_kernels() {
  const auto no_workspace = [](const Problem&, int) { return std::size_t{0}; };
  return {{"cuda", decode_refusal, no_workspace, run_step}};
}

}  // namespace lln::cuda
