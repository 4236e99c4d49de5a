// One sequence in pieces on a CUDA device against the uncut one: over NCCL with one rank, and as
// two ranks that are threads of one process and share the device, half a million tokens each.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/AutogradState.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "lln/error.h"
#include "lln_torch/parallel/sequence_attention.h"
#include "thread_ranks.h"

namespace lln_torch {
namespace {

const c10::Device kDevice(at::kCUDA, 0);

class SequenceOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device for this test: torch sees none";
  }
};

// An exchange by way of host memory, which ends with a copy to the device.
class CopiedBack : public c10d::Work {
 public:
  CopiedBack(RankGroup::Work work, std::vector<at::Tensor> from, std::vector<at::Tensor> to)
      : work_(std::move(work)), from_(std::move(from)), to_(std::move(to)) {}
  bool wait(std::chrono::milliseconds) override {
    const at::NoGradGuard no_gradients;
    work_->wait();
    for (std::size_t i = 0; i < to_.size(); ++i) to_[i].copy_(from_[i]);
    return true;
  }

 private:
  RankGroup::Work work_;
  std::vector<at::Tensor> from_, to_;  // `from` lives as long as the exchange
};

// Ranks that share a device, as NCCL has none: every call goes to Gloo, by way of host memory.
class ThroughHost : public c10d::Backend {
 public:
  explicit ThroughHost(lln_torch::Backend engine)
      : c10d::Backend(engine->getRank(), engine->getSize()), engine_(std::move(engine)) {}
  const std::string getBackendName() const override { return "through-host"; }
  RankGroup::Work allreduce(std::vector<at::Tensor>& tensors,
                            const c10d::AllreduceOptions& options) override {
    std::vector<at::Tensor> copies = {tensors[0].cpu()};
    return copied(engine_->allreduce(copies, options), copies, tensors);
  }
  RankGroup::Work allgather(std::vector<std::vector<at::Tensor>>& outputs,
                            std::vector<at::Tensor>& inputs,
                            const c10d::AllgatherOptions& options) override {
    std::vector<at::Tensor> copies = {inputs[0].cpu()};
    std::vector<std::vector<at::Tensor>> found(1);
    for (const at::Tensor& x : outputs[0]) found[0].push_back(at::empty_like(x, at::kCPU));
    return copied(engine_->allgather(found, copies, options), found[0], outputs[0]);
  }
  RankGroup::Work send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    std::vector<at::Tensor> copies = {tensors[0].cpu()};
    return copied(engine_->send(copies, to, tag), copies, {});
  }
  RankGroup::Work recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    std::vector<at::Tensor> copies = {at::empty_like(tensors[0], at::kCPU)};
    return copied(engine_->recv(copies, from, tag), copies, tensors);
  }

 private:
  static RankGroup::Work copied(RankGroup::Work work, std::vector<at::Tensor> from,
                                std::vector<at::Tensor> to) {
    return c10::make_intrusive<CopiedBack>(std::move(work), std::move(from), std::move(to));
  }
  lln_torch::Backend engine_;
};

struct Case {
  std::string name;
  AttentionCall call;
  at::ScalarType type = at::kBFloat16;
  std::string tokens = "all";  // all, mask, lengths, packed
};

constexpr std::array<const char*, 4> kNames = {"o", "dq", "dk", "dv"};
using Results = std::array<at::Tensor, 4>;

struct Tensors {
  at::Tensor q, k, v, g;

  static Tensors random(std::int64_t tokens, at::ScalarType type, std::int64_t heads_k) {
    at::manual_seed(11);
    constexpr std::int64_t kHeads = 4, kDim = 64;
    const auto made = [&](std::int64_t heads) {
      return at::randn({1, heads, tokens, kDim}, at::device(kDevice).dtype(type));
    };
    return {made(kHeads), made(heads_k), made(heads_k), made(kHeads)};
  }
  Tensors piece(std::int64_t begin, std::int64_t count) const {
    const auto cut = [&](const at::Tensor& x) { return x.narrow(2, begin, count); };
    return {cut(q), cut(k), cut(v), cut(g)};
  }
  template <class Attention>
  Results run(const Attention& attention) const {
    const at::Tensor leaves[] = {q.detach().requires_grad_(), k.detach().requires_grad_(),
                                 v.detach().requires_grad_()};
    const at::Tensor o = attention(leaves[0], leaves[1], leaves[2]);
    o.backward(g);
    return {o.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
  }
};

double seconds_of(const std::function<void()>& work) {
  const auto wait = [] { at::zeros({}, kDevice).item(); };  // behind all that was launched
  wait();
  const auto begin = std::chrono::steady_clock::now();
  work();
  wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

constexpr std::int64_t kFirstKey = 100;  // of masked rows: blocks are counted from it

// Of a sequence whose second piece begins at `first`.
PieceTokens tokens_of(const Case& c, std::int64_t tokens, std::int64_t first) {
  PieceTokens which;
  if (c.tokens == "mask") {
    which.key_mask = at::rand({1, tokens}, kDevice) > 0.3;
    which.key_mask.narrow(1, 0, kFirstKey).fill_(false);
    which.key_mask.select(1, kFirstKey).fill_(true);
    // The second piece cannot see where blocks begin.
    if (first > kFirstKey && first < tokens) which.key_mask.select(1, first).fill_(false);
  }
  if (c.tokens == "lengths") which.key_lengths = at::full({1}, tokens - 5000, at::kLong);
  if (c.tokens == "packed") {
    const std::vector<std::int64_t> borders = {0, 1000, 1000, tokens - 700, tokens};
    which.cu_seqlens = at::tensor(borders, at::kInt);
  }
  return which;
}

// What two ranks find that have the tokens before `first` and from there on.
std::array<Results, 2> in_pieces(const Case& c, const Tensors& whole, const PieceTokens& which,
                                 std::int64_t first) {
  const std::int64_t tokens = whole.q.size(2);
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::array<Results, 2> found;
  test::on_each_thread(2, [&](int rank) {
    // Otherwise one thread of torch's would run the backward passes of both, one after the other.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    const Backend gloo = make_gloo(store, rank, 2, test::kLong);
    const RankGroup group(c10::make_intrusive<ThroughHost>(gloo), kDevice, nullptr, gloo);
    const std::int64_t begin = rank == 0 ? 0 : first, count = rank == 0 ? first : tokens - first;
    PieceTokens own = which;
    if (which.key_mask.defined()) own.key_mask = which.key_mask.narrow(1, begin, count);
    const Pieces pieces(group, count, own);
    if (rank == 1 && c.tokens == "mask" && count > 0) {
      EXPECT_EQ(pieces.block_origins().defined(), begin > kFirstKey);
    }
    found[static_cast<std::size_t>(rank)] =
        whole.piece(begin, count).run([&](const auto& q, const auto& k, const auto& v) {
          return attention(q, k, v, c.call, pieces);
        });
  });
  return found;
}

double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  constexpr double kNothing = 1e-30;  // gradients of keys that nobody sees
  const at::Tensor truth = expected.to(at::kFloat);
  return ((found.to(at::kFloat) - truth).norm() / truth.norm().clamp_min(kNothing)).item<double>();
}

constexpr std::int64_t kNear = 300;  // tokens on either side of the border

void expect_like_whole(const Case& c, std::int64_t tokens, std::int64_t first, std::int64_t heads_k,
                       bool twice = false) {
  const Tensors whole = Tensors::random(tokens, c.type, heads_k);
  const PieceTokens which = tokens_of(c, tokens, first);
  Results expected;
  const double unsplit = seconds_of([&] {
    AttentionCall call = c.call;
    call.key_mask = which.key_mask;
    if (which.key_lengths.defined()) call.key_lengths = which.key_lengths.to(kDevice);
    if (which.cu_seqlens.defined()) call.cu_seqlens = which.cu_seqlens.to(kDevice);
    expected = whole.run(
        [&](const auto& q, const auto& k, const auto& v) { return attention(q, k, v, call); });
  });
  std::array<Results, 2> found;
  const double split = seconds_of([&] { found = in_pieces(c, whole, which, first); });
  const double tolerance = c.type == at::kFloat ? 2e-5 : 1e-2;
  const std::int64_t near = std::max<std::int64_t>(first - kNear, 0);
  const std::int64_t near_count = std::min(first + kNear, tokens) - near;
  std::string errors;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    const at::Tensor both = at::cat({found[0][i], found[1][i]}, 2);
    const double error = relative_error(both, expected[i]);
    EXPECT_LE(error, tolerance) << c.name << ' ' << kNames[i];
    // In a long sequence a block that is wrong would not show.
    EXPECT_LE(
        relative_error(both.narrow(2, near, near_count), expected[i].narrow(2, near, near_count)),
        2 * tolerance)
        << c.name << ' ' << kNames[i] << " near the border";
    errors += fmt::format(" {} {:.1e}", kNames[i], error);
  }
  fmt::print("{}, {} tokens: relative errors{}; {:.1f} ms, uncut {:.1f} ms\n", c.name, tokens,
             errors, 1e3 * split, 1e3 * unsplit);
  if (!twice) return;
  const std::array<Results, 2> again = in_pieces(c, whole, which, first);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      EXPECT_TRUE(at::equal(found[rank][i], again[rank][i])) << c.name << ' ' << kNames[i];
    }
  }
}

std::vector<Case> cases() {
  AttentionCall lln;
  lln.fixed_alpha = lln.fixed_beta = 1.4;
  AttentionCall both = lln, causal = lln, causal_both = lln, matched;
  both.diag_block = causal_both.diag_block = 64;
  causal.causal = causal_both.causal = true;
  return {{"lln", lln},
          {"lln matched", matched},
          {"lln+diag64", both},
          {"lln causal", causal},
          {"lln+diag64 causal", causal_both},
          {"lln f32", lln, at::kFloat},
          {"lln+diag64 causal f32", causal_both, at::kFloat},
          {"lln masked", lln, at::kBFloat16, "mask"},
          {"lln+diag64 masked", both, at::kBFloat16, "mask"},
          {"lln+diag64 causal masked", causal_both, at::kBFloat16, "mask"},
          {"lln matched, masked", matched, at::kBFloat16, "mask"},
          {"lln+diag64 lengths", both, at::kBFloat16, "lengths"},
          {"lln causal lengths", causal, at::kBFloat16, "lengths"},
          {"lln packed", lln, at::kBFloat16, "packed"},
          {"lln matched, packed", matched, at::kBFloat16, "packed"},
          {"lln causal packed", causal, at::kBFloat16, "packed"}};
}

TEST_F(SequenceOnDevice, TwoPiecesOfHalfAMillionTokens) {
  constexpr std::int64_t kHalf = 1 << 19;
  for (const Case& c : cases()) {
    if (c.tokens == "all") expect_like_whole(c, 2 * kHalf, kHalf, /*heads_k=*/4);
  }
}

TEST_F(SequenceOnDevice, UnevenPieces) {
  constexpr std::int64_t kTokens = 20000;
  for (const Case& c : cases()) {
    const std::int64_t middle = (c.tokens == "mask" ? kFirstKey : 0) + 4096;
    for (const std::int64_t heads_k : {4, 2}) {
      expect_like_whole(c, kTokens, middle, heads_k, /*twice=*/true);
      expect_like_whole(c, kTokens, 0, heads_k);  // one of them has nothing
      expect_like_whole(c, kTokens, kTokens, heads_k);
    }
  }
}

TEST_F(SequenceOnDevice, NcclOfOneRank) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  const Backend host =
      make_gloo(c10::make_intrusive<c10d::PrefixStore>("host", store), 0, 1, test::kLong);
  Backend nccl;
  try {
    nccl = make_nccl(c10::make_intrusive<c10d::PrefixStore>("nccl", store), 0, 1, test::kLong);
  } catch (const lln::Error& e) {
    GTEST_SKIP() << e.what();  // a build without it
  }
  const RankGroup group(nccl, kDevice, nullptr, host);
  const at::Tensor x = at::randn({3, 5}, kDevice), kept = x.clone();
  group.wait(group.begin_sum(x));
  group.wait(group.begin_max(x));
  group.wait(group.begin_min(x));
  group.broadcast(x, 0);
  EXPECT_TRUE(at::equal(x, kept));
  EXPECT_TRUE(at::equal(group.gather(x)[0], kept));
  for (const Case& c : cases()) {
    if (c.tokens != "all") continue;
    const Tensors whole = Tensors::random(5000, c.type, 2);
    const Results expected = whole.run(
        [&](const auto& q, const auto& k, const auto& v) { return attention(q, k, v, c.call); });
    const Pieces pieces(group, 5000);
    const Results found = whole.run([&](const auto& q, const auto& k, const auto& v) {
      return attention(q, k, v, c.call, pieces);
    });
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      EXPECT_LE(relative_error(found[i], expected[i]), c.type == at::kFloat ? 2e-5 : 1e-2)
          << c.name << ' ' << kNames[i];
    }
  }
}

}  // namespace
}  // namespace lln_torch
