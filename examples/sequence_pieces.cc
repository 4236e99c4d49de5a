// A sequence that lies in pieces on several processes: LLN+Diag attention with gradients over all
// of it, while each process holds only its tokens. Start one process for each rank, as
//   for rank in 0 1 2; do sequence_pieces $rank 3 29500 & done; wait
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "lln_torch/parallel/ranks.h"
#include "lln_torch/parallel/sequence_attention.h"

namespace {

constexpr std::int64_t kBlock = 64, kPieceTokens = 8 * kBlock, kHeads = 4, kDim = 32;

// Tokens of a rank, drawn by itself.
at::Tensor tokens_of(int rank) {
  at::manual_seed(static_cast<std::uint64_t>(rank));
  return at::randn({1, kHeads, kPieceTokens, kDim});
}

int run(int rank, int size, int port) {
  lln_torch::RankPlace place;
  place.rank = rank;
  place.size = size;
  place.host = "localhost";
  place.port = port;
  lln_torch::RanksOptions options;
  options.timeout = std::chrono::seconds(60);  // a rank that is lost ends all by then
  lln_torch::Ranks ranks(place, options);
  const lln_torch::RankGroup group = ranks.group("sequence", at::kCPU);

  lln_torch::AttentionCall call;
  call.diag_block = kBlock;
  const at::Tensor x = tokens_of(rank).requires_grad_();
  const lln_torch::Pieces pieces(group, kPieceTokens);  // once for all layers
  const at::Tensor o = lln_torch::attention(x, x, x, call, pieces);
  o.square().sum().backward();
  std::printf("rank %d has tokens %lld to %lld of %lld\n", rank,
              static_cast<long long>(pieces.offset()),
              static_cast<long long>(pieces.offset() + pieces.tokens()),
              static_cast<long long>(pieces.whole()));

  // What one process would compute, which here is small enough to do.
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r) all.push_back(tokens_of(r));
  const at::Tensor whole = at::cat(all, 2).requires_grad_();
  const at::Tensor expected = lln_torch::attention(whole, whole, whole, call);
  expected.square().sum().backward();
  const auto own = [&](const at::Tensor& y) {
    return y.narrow(2, pieces.offset(), pieces.tokens());
  };
  const bool same =
      o.allclose(own(expected), 1e-4, 1e-5) && x.grad().allclose(own(whole.grad()), 1e-4, 1e-5);
  std::printf("rank %d: output and gradient are %s\n", rank, same ? "those of the whole" : "wrong");
  return same && !ranks.leave() ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s RANK RANKS PORT\n", words[0]);
    return 2;
  }
  try {
    return run(std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
