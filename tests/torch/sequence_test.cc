// Attention over pieces of a sequence on several ranks against attention over the whole: outputs,
// gradients, and what travels.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "expect_error.h"
#include "lln_torch/parallel/sequence_attention.h"
#include "lln_torch/parallel/state_exchange.h"
#include "thread_ranks.h"

namespace lln_torch {
namespace {

using test::on_threads;
using test::Traffic;

// Names of what gradients flow to, in this order.
enum Leaf : std::size_t { kQ, kK, kV, kAlpha, kBeta, kMix, kLlnWeight, kDiagWeight, kLeaves };
using Leaves = std::array<at::Tensor, kLeaves>;
constexpr std::array<const char*, kLeaves> kNames = {"q",    "k",   "v",          "alpha",
                                                     "beta", "mix", "lln_weight", "diag_weight"};

struct Case {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the pieces
  AttentionCall call = {};            // its tensors are made by the test
  std::string tokens = "all";         // all, mask, holes, lengths, packed
  std::string weight = "";            // shape of mix: call, head, channel, token; or "two"
  std::int64_t batch = 2, heads = 4, heads_k = 2, dim = 8, dim_v = 6;
  double spike = 0;  // added to some keys, in exponent
  at::ScalarType type = at::kDouble;
  bool scales = true;  // alpha and beta are given
};

std::int64_t tokens_of(const Case& c) {
  std::int64_t sum = 0;
  for (const std::int64_t length : c.lengths) sum += length;
  return sum;
}

// A case on the whole sequence.
struct Whole {
  explicit Whole(const Case& c) : c_(c), tokens(tokens_of(c)) {
    at::manual_seed(7);
    const auto normal = [&](std::vector<std::int64_t> sizes) {
      return at::randn(sizes, at::kDouble);
    };
    leaves[kQ] = normal({c.batch, c.heads, tokens, c.dim});
    leaves[kK] = normal({c.batch, c.heads_k, tokens, c.dim});
    leaves[kV] = normal({c.batch, c.heads_k, tokens, c.dim_v});
    g = normal({c.batch, c.heads, tokens, c.dim_v});
    if (c.spike != 0 && tokens > 3) {
      leaves[kK].select(2, tokens / 2).select(2, 1).add_(c.spike);
      leaves[kK].select(2, tokens - 2).select(2, 3).add_(c.spike);
    }
    if (c.scales) {
      leaves[kAlpha] = 1 + 0.2 * normal({c.heads}).abs();
      leaves[kBeta] = 1 + 0.2 * normal({c.heads_k}).abs();
    }
    make_weights();
    for (at::Tensor& leaf : leaves) {
      if (leaf.defined()) leaf = leaf.to(c.type);
    }
    g = g.to(c.type);
    make_tokens();
  }

  void make_weights() {
    const auto uniform = [](std::vector<std::int64_t> sizes) {
      return at::rand(sizes, at::kDouble);
    };
    if (c_.weight == "call") leaves[kMix] = at::full({}, 0.3, at::kDouble);
    if (c_.weight == "head") leaves[kMix] = uniform({c_.heads});
    if (c_.weight == "channel") leaves[kMix] = uniform({c_.heads, c_.dim_v});
    if (c_.weight == "token") leaves[kMix] = uniform({c_.batch, c_.heads, tokens});
    if (c_.weight == "two") {
      leaves[kLlnWeight] = uniform({c_.heads});
      leaves[kDiagWeight] = uniform({c_.heads});
    }
  }

  void make_tokens() {
    if (c_.tokens == "mask") {
      which.key_mask = at::rand({c_.batch, tokens}) > 0.3;
      which.key_mask.select(0, 1).narrow(0, tokens / 2, tokens - tokens / 2).fill_(false);
      which.key_mask.select(1, 0).fill_(true);
    }
    if (c_.tokens ==
        "holes") {  // the first key that counts is of another block and piece in each row
      which.key_mask = at::rand({c_.batch, tokens}) > 0.4;
      which.key_mask.select(1, 8).fill_(false);  // where a piece begins
      which.key_mask.select(0, 0).narrow(0, 0, 4).fill_(false);
      which.key_mask.select(0, 0).narrow(0, 4, 1).fill_(true);
      which.key_mask.select(0, 1).narrow(0, 0, 12).fill_(false);
      which.key_mask.select(0, 1).narrow(0, 12, 1).fill_(true);
    }
    if (c_.tokens == "lengths") {
      which.key_lengths = at::tensor(std::vector<std::int64_t>{tokens / 3, tokens}, at::kLong);
    }
    if (c_.tokens == "packed") {
      which.cu_seqlens =
          at::tensor(std::vector<std::int64_t>{0, 3, 3, tokens / 2, tokens - 1, tokens}, at::kInt);
    }
  }

  // Fresh leaves that gradients flow to: those of a piece, or of the whole.
  Leaves fresh(std::int64_t begin, std::int64_t count) const {
    Leaves made;
    for (std::size_t i = 0; i < kLeaves; ++i) {
      if (!leaves[i].defined()) continue;
      const bool by_token = i <= kV || leaves[i].dim() == 3;
      made[i] = (by_token ? leaves[i].narrow(2, begin, count) : leaves[i])
                    .clone()
                    .detach()
                    .requires_grad_();
    }
    return made;
  }

  AttentionCall call_of(const Leaves& x) const {
    AttentionCall call = c_.call;
    call.alpha = x[kAlpha];
    call.beta = x[kBeta];
    call.mix = x[kMix];
    call.lln_weight = x[kLlnWeight];
    call.diag_weight = x[kDiagWeight];
    return call;
  }

  const Case& c_;
  std::int64_t tokens;
  Leaves leaves;
  at::Tensor g;
  PieceTokens which;  // of the whole
};

struct Found {
  at::Tensor o;
  Leaves gradients;
};

Found run_uncut(const Whole& whole) {
  const Leaves x = whole.fresh(0, whole.tokens);
  AttentionCall call = whole.call_of(x);
  call.key_mask = whole.which.key_mask;
  call.key_lengths = whole.which.key_lengths;
  call.cu_seqlens = whole.which.cu_seqlens;
  Found found;
  found.o = attention(x[kQ], x[kK], x[kV], call);
  found.o.backward(whole.g);
  for (std::size_t i = 0; i < kLeaves; ++i) {
    if (x[i].defined()) found.gradients[i] = x[i].grad();
  }
  return found;
}

// One rank's part.
Found run_piece(const Whole& whole, const RankGroup& group) {
  std::int64_t begin = 0;
  for (int r = 0; r < group.rank(); ++r) begin += whole.c_.lengths[static_cast<std::size_t>(r)];
  const std::int64_t count = whole.c_.lengths[static_cast<std::size_t>(group.rank())];
  PieceTokens which = whole.which;
  if (which.key_mask.defined()) which.key_mask = which.key_mask.narrow(1, begin, count);
  const Pieces pieces(group, count, which);
  const Leaves x = whole.fresh(begin, count);
  Found found;
  found.o = attention(x[kQ], x[kK], x[kV], whole.call_of(x), pieces);
  found.o.backward(whole.g.narrow(2, begin, count));
  for (std::size_t i = 0; i < kLeaves; ++i) {
    if (x[i].defined()) found.gradients[i] = x[i].grad();
  }
  return found;
}

struct CutRun {
  Found found;
  std::vector<Traffic> traffic;
};

CutRun run_cut(const Whole& whole) {
  const std::size_t ranks = whole.c_.lengths.size();
  std::vector<Found> pieces(ranks);
  CutRun run;
  run.traffic = on_threads(static_cast<int>(ranks), [&](const RankGroup& group) {
    pieces[static_cast<std::size_t>(group.rank())] = run_piece(whole, group);
  });
  std::vector<at::Tensor> o;
  for (const Found& piece : pieces) o.push_back(piece.o.detach());
  run.found.o = at::cat(o, 2);
  for (std::size_t i = 0; i < kLeaves; ++i) {
    if (!whole.leaves[i].defined()) continue;
    std::vector<at::Tensor> parts;
    for (const Found& piece : pieces) parts.push_back(piece.gradients[i]);
    const bool by_token = i <= kV || whole.leaves[i].dim() == 3;
    run.found.gradients[i] = by_token ? at::cat(parts, 2) : at::stack(parts).sum(0);
  }
  return run;
}

double largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

// A gradient of alpha or beta is a sum over tokens and channels of terms that may cancel (for
// powers they do): it is as exact as they are.
double scale_of(const Whole& whole, const Found& uncut, std::size_t leaf) {
  const at::Tensor& gradient = uncut.gradients[leaf];
  if (leaf != kAlpha && leaf != kBeta) return largest(gradient);
  const std::size_t of = leaf == kAlpha ? kQ : kK;
  return largest((uncut.gradients[of] * whole.leaves[of]).abs().sum({0, 2, 3}));
}

void expect_close(const char* name, const at::Tensor& found, const at::Tensor& expected,
                  double scale, double tolerance) {
  if (expected.numel() == 0) return;
  const double error =
      (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(error, tolerance * scale) << name;
}

void expect_same_results(const Case& c) {
  SCOPED_TRACE(c.name + (c.type == at::kDouble ? " f64" : " f32"));
  const Whole whole(c);
  const Found uncut = run_uncut(whole);
  const CutRun cut = run_cut(whole);
  // c in f32 is as exact as its last bit, which a key of +200 in exponent makes large.
  const double tolerance = c.type == at::kDouble ? 1e-12 : c.spike != 0 ? 5e-5 : 1e-5;
  expect_close("o", cut.found.o, uncut.o, largest(uncut.o), tolerance);
  for (std::size_t i = 0; i < kLeaves; ++i) {
    if (!whole.leaves[i].defined()) continue;
    expect_close(kNames[i], cut.found.gradients[i], uncut.gradients[i], scale_of(whole, uncut, i),
                 tolerance);
  }
}

std::vector<Case> cases() {
  const AttentionCall lln{}, causal{.causal = true};
  const AttentionCall both{.diag_block = 4}, causal_both{.diag_block = 4, .causal = true};
  const std::vector<std::int64_t> two = {13, 20}, three = {9, 0, 24}, four = {0, 8, 1, 24},
                                  blocks = {8, 16, 0, 9}, one = {33};
  std::vector<Case> list;
  for (const auto& [name, call] : {std::pair{"lln", lln}, {"causal", causal}}) {
    for (const auto& lengths : {one, two, three, four}) {
      for (const char* tokens : {"all", "mask", "lengths", "packed"}) {
        Case c{std::string(name) + " " + tokens + " on " + std::to_string(lengths.size()), lengths,
               call, tokens};
        if (c.tokens == "packed") c.batch = 1;
        list.push_back(c);
      }
    }
  }
  for (const auto& [name, call] : {std::pair{"lln+diag", both}, {"causal lln+diag", causal_both}}) {
    for (const char* weight : {"", "call", "head", "channel", "token", "two"}) {
      list.push_back({std::string(name) + " weight " + weight, blocks, call, "all", weight});
    }
    list.push_back({std::string(name) + " lengths", blocks, call, "lengths", "head"});
    list.push_back({std::string(name) + " holes", blocks, call, "holes", "head"});
  }
  list.push_back({"spiked", two, lln, "all", "", 2, 4, 2, 8, 6, 200});
  list.push_back({"spiked causal", four, causal, "all", "", 2, 4, 2, 8, 6, 200});
  list.push_back({"one key head", three, lln, "all", "", 2, 4, 1});
  list.push_back({"one key head causal", three, causal, "all", "", 2, 4, 1});
  for (const char* feature : {"elu", "relu", "softplus", "power2"}) {
    list.push_back({feature, two, {.feature = feature}});
    list.push_back({std::string("causal ") + feature, two, {.causal = true, .feature = feature}});
  }
  for (const char* tokens : {"all", "holes", "lengths"}) {
    for (const bool in_order : {false, true}) {
      list.push_back({std::string("diag alone ") + tokens,
                      blocks,
                      {.diag_block = 4, .causal = in_order, .fixed_mix = 0},
                      tokens});
      list.back().scales = false;
    }
  }
  for (const char* mode : {"per_head", "exact", "entropy", "paper", "none"}) {
    list.push_back({std::string("matching ") + mode, three, {.matching = mode}, "mask"});
    list.back().scales = false;
    list.push_back({std::string("packed matching ") + mode, two, {.matching = mode}, "packed"});
    list.back().scales = false;
    list.back().batch = 1;
  }
  return list;
}

TEST(SequenceAttention, IsThatOfTheWhole) {
  for (Case c : cases()) {
    expect_same_results(c);
    c.type = at::kFloat;
    expect_same_results(c);
  }
}

TEST(SequenceAttention, PackedBlocksAreThoseOfTheirSequence) {
  for (const bool causal : {false, true}) {
    Case c{"packed blocks", {7, 12, 14}, {.diag_block = 4, .causal = causal}, "packed", "head", 1};
    // Sequences begin at 0, 3, 16 and 32; borders at 7 and 19: one and a multiple of blocks inside.
    c.lengths = {7, 17, 9};
    expect_same_results(c);
  }
}

// Against the same in f32, within the rounding of the type.
TEST(SequenceAttention, TakesHalfTypesAndAnyLayout) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const bool causal : {false, true}) {
      on_threads(2, [&](const RankGroup& group) {
        at::Generator generator = at::detail::createCPUGenerator(7);
        // [batch, tokens, heads, dim] in memory, as projections give it; the rank's half of it.
        const at::Tensor all = at::randn({1, 32, 2, 16}, generator).to(type).transpose(1, 2);
        const Pieces pieces(group, 16);
        const at::Tensor own = all.narrow(2, pieces.offset(), 16);
        const AttentionCall call{
            .diag_block = 8, .causal = causal, .fixed_alpha = 1, .fixed_beta = 1};
        const at::Tensor x = own.detach().requires_grad_();
        const at::Tensor o = attention(x, x, x, call, pieces);
        EXPECT_EQ(o.scalar_type(), type);
        EXPECT_LT(o.stride(1), o.stride(2)) << "the order of q";
        o.sum().backward({}, /*retain_graph=*/true);
        const at::Tensor once = x.grad().clone();
        o.sum().backward();
        EXPECT_TRUE(x.grad().allclose(2 * once, 1e-2, 1e-2)) << "twice the gradient";
        {
          const at::NoGradGuard no_graph;
          EXPECT_TRUE(attention(x, x, x, call, pieces).equal(o));
        }
        const at::Tensor whole = all.to(at::kFloat).detach().requires_grad_();
        const at::Tensor expected = attention(whole, whole, whole, call);
        expected.sum().backward();
        const auto half = [&](const at::Tensor& y) { return y.narrow(2, pieces.offset(), 16); };
        EXPECT_TRUE(o.to(at::kFloat).allclose(half(expected), 2e-2, 2e-2));
        EXPECT_TRUE(once.to(at::kFloat).allclose(half(whole.grad()), 5e-2, 5e-2));
      });
    }
  }
}

TEST(SequenceAttention, IsTheSameFromRunToRun) {
  for (const bool causal : {false, true}) {
    const Case c{"again", {9, 0, 24}, {.causal = causal}};
    const Whole whole(c);
    const CutRun first = run_cut(whole), second = run_cut(whole);
    EXPECT_TRUE(first.found.o.equal(second.found.o));
    for (std::size_t i = 0; i < kLeaves; ++i) {
      if (!whole.leaves[i].defined()) continue;
      EXPECT_TRUE(first.found.gradients[i].equal(second.found.gradients[i])) << kNames[i];
    }
  }
}

TEST(SequenceAttention, MergedStatesAreTheSameOnAllRanks) {
  std::vector<TensorState> merged(3);
  on_threads(3, [&](const RankGroup& group) {
    at::Generator generator =
        at::detail::createCPUGenerator(static_cast<std::uint64_t>(group.rank()));
    const Pieces pieces(group, group.rank());
    StateMerge merge(pieces,
                     {at::randn({2, 3, 1, 4}, generator) * 20, at::randn({2, 3, 4, 5}, generator)});
    merge.begin_sum();
    merged[static_cast<std::size_t>(group.rank())] = merge.finish().all;
  });
  for (const TensorState& state : merged) {
    EXPECT_TRUE(state.lse.equal(merged[0].lse));
    EXPECT_TRUE(state.values.equal(merged[0].values));
  }
}

// docs/scale.md has these formulas.
TEST(SequenceAttention, MovesWhatTheFormulasSay) {
  for (const std::int64_t tokens : {8, 64, 200}) {
    for (const int ranks : {1, 2, 3, 4}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(tokens) + " tokens");
      Case c{"counted", std::vector<std::int64_t>(static_cast<std::size_t>(ranks), tokens)};
      c.type = at::kFloat;
      const std::int64_t heads = c.batch * c.heads_k, state = heads * (c.dim + c.dim * c.dim_v);
      for (const bool causal : {false, true}) {
        c.call.causal = causal;
        const std::vector<Traffic> traffic = run_cut(Whole(c)).traffic;
        for (int rank = 0; rank < ranks; ++rank) {
          const Traffic& t = traffic[static_cast<std::size_t>(rank)];
          EXPECT_EQ(t.gathered, ranks > 1 ? 5 * 8 : 0) << "once for all layers: what a piece is";
          if (ranks == 1 || causal) {
            EXPECT_EQ(t.reduced, 0);
          } else {
            EXPECT_EQ(t.reduced, 4 * (heads * c.dim + 2 * state));
            EXPECT_EQ(t.reductions, 3 * 2);  // maximum, sum, sum of gradients; in two parts
          }
          std::int64_t later = 0, earlier = 0;
          for (int d = 1; d < ranks; d *= 2) {
            later += rank + d < ranks ? 1 : 0;
            earlier += rank - d >= 0 ? 1 : 0;
          }
          if (!causal) later = earlier = 0;
          EXPECT_EQ(t.sent, 4 * (later * state + earlier * (state + heads * c.dim)));
          EXPECT_EQ(t.sends, 2 * (later + earlier));
        }
      }
    }
  }
}

TEST(SequenceAttention, OnlySequencesThatCrossABorderTravel) {
  for (const bool causal : {false, true}) {
    Case c{
        "packed", {3, 13, 17}, {.causal = causal}, "packed"};  // borders at 3 and 16, of sequences
    c.batch = 1;
    for (const Traffic& t : run_cut(Whole(c)).traffic) EXPECT_EQ(t.reduced + t.sent, 0);
    c.lengths = {3, 20, 10};  // at 23, inside of one
    const std::int64_t state = c.heads_k * (c.dim + c.dim * c.dim_v), c_alone = c.heads_k * c.dim;
    std::int64_t reduced = 0, sent = 0;
    for (const Traffic& t : run_cut(Whole(c)).traffic) {
      reduced += t.reduced;
      sent += t.sent;
    }
    // Of one sequence, in f64; the scans of three ranks have three messages there and three back.
    EXPECT_EQ(reduced, causal ? 0 : 8 * 3 * (c_alone + 2 * state));
    EXPECT_EQ(sent, causal ? 8 * 3 * (state + state + c_alone) : 0);
  }
}

TEST(SequenceAttention, RefusesBlocksThatABorderCuts) {
  const auto expect = [](std::vector<std::int64_t> lengths, const char* tokens,
                         const std::vector<std::string>& texts) {
    Case c{"cut", std::move(lengths), {.diag_block = 8}, tokens};
    if (c.tokens == "packed") c.batch = 1;
    const Whole whole(c);
    const int ranks = static_cast<int>(c.lengths.size());
    on_threads(ranks, [&](const RankGroup& group) {
      lln::test::expect_error([&] { run_piece(whole, group); }, texts);
    });
  };
  expect(
      {16, 10, 10}, "all",
      {"the piece of rank 2 begins at token 26 of 36, inside of a block of 8 tokens: the nearest "
       "places to cut are 24 and 32"});
  expect({30, 5}, "all", {"begins at token 30 of 35", "are 24 and 32"});
  expect({34, 1}, "all", {"are 32 and 35"});
  // Sequences begin at 0, 3 and 18.
  expect({13, 23}, "packed", {"begins at token 13 of 36", "are 11 and 18"});
  // The rows begin at 4 and 12: blocks of both end at 20, of one at 12.
  expect({17, 19}, "holes", {"begins at token 17 of 36", "are 12 and 20"});
}

TEST(SequenceAttention, NamesWhatIsWrong) {
  on_threads(2, [&](const RankGroup& group) {
    const Pieces pieces(group, 4);
    const at::Tensor x = at::randn({1, 2, 4, 8}), longer = at::randn({1, 2, 5, 8});
    const auto expect = [&](const std::function<void()>& call, const std::string& text) {
      lln::test::expect_error(call, {text});
    };
    expect([&] { attention(longer, longer, longer, {}, pieces); },
           "with the 4 tokens of the piece");
    expect(
        [&] {
          attention(x, x, x, {.key_mask = at::ones({1, 4}, at::kBool)}, pieces);
        },
        "which tokens count is said by Pieces");
    expect([&] { attention(x, x, x, {.causal = true}, pieces); }, "reads the whole sequence");
    // As attention over the whole says it.
    expect([&] { attention(x, x, x, {.fixed_alpha = 1}, pieces); }, "beta is not given");
    const at::Tensor three = at::randn({1, 3, 4, 8}), four = at::randn({1, 4, 4, 8});
    expect([&] { attention(three, x, x, {}, pieces); }, "heads");
    expect([&] { attention(x, x, four, {}, pieces); }, "v has shape");
    expect([&] { attention(x, x, x, {.diag_block = -4}, pieces); }, "block");
    expect([&] { attention(x, x, x, {.diag_block = 4, .mix = at::rand({3})}, pieces); }, "mix");
    expect([&] { attention(x, x, x, {.diag_block = 4, .diag_weight = at::rand({2})}, pieces); },
           "lln_weight");
    const at::Tensor beyond = at::full({1}, 9, at::kLong);
    expect([&] { Pieces(group, 4, {.key_lengths = beyond}); },
           "key_lengths has 9: expected 0 to 8");
    const bool first = group.first();
    const at::Tensor mask = at::ones({1, first ? 3 : 4}, at::kBool);
    expect([&] { Pieces(group, 4, {.key_mask = mask}); },
           first ? "key_mask has shape [1, 3]: expected [batch, 4]"
                 : "rank 0 has arguments that are refused there");
    const at::Tensor lengths = at::full({1}, first ? 5 : 6, at::kLong);
    expect([&] { Pieces(group, 4, {.key_lengths = lengths}); },
           "rank 1 has key_lengths with 1 entries and the checksum");
    const at::Tensor too_short = at::arange(0, 14, 7, at::kInt);
    expect([&] { Pieces(group, 4, {.cu_seqlens = too_short}); },
           "cu_seqlens must rise from 0 to the tokens of all pieces, 8");
    expect([&] { Pieces(group, std::vector<std::int64_t>{4}); }, "1 lengths for 2 ranks");
    const at::Tensor leaf = x.clone().requires_grad_();
    const at::Tensor o = attention(leaf, x, x, {.fixed_alpha = 1, .fixed_beta = 1}, pieces);
    lln::test::expect_error(
        [&] { o.sum().backward({}, /*keep_graph=*/true, /*create_graph=*/true); },
        {"gradients of gradients"}, lln::ErrorCode::unsupported);
  });
}

}  // namespace
}  // namespace lln_torch
