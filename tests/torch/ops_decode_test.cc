// DecodeState of tensors: any pieces give the rows of the causal attention(), and the ways of a
// state through fork, select, merge and bytes.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "expect_error.h"
#include "lln_torch/ops/attention.h"
#include "lln_torch/ops/decode.h"

namespace lln_torch {
namespace {

using lln::test::expect_error;

constexpr std::int64_t kTokens = 45;

struct Stream {
  at::Tensor q = at::randn({2, 4, kTokens, 16});
  at::Tensor k = at::randn({2, 2, kTokens, 16});
  at::Tensor v = at::randn({2, 2, kTokens, 8});

  at::Tensor append(DecodeState& state, std::int64_t begin, std::int64_t end) const {
    const auto piece = [&](const at::Tensor& x) { return x.slice(2, begin, end); };
    return state.append(piece(q), piece(k), piece(v));
  }
};

DecodeOptions options_with(std::int64_t diag_block = 0) {
  DecodeOptions options;
  options.batch = 2;
  options.heads = 4;
  options.heads_k = 2;
  options.dim = 16;
  options.dim_v = 8;
  options.diag_block = diag_block;
  options.alpha = at::tensor({1.0F, 1.25F, 1.5F, 0.75F});
  options.beta = at::tensor({1.0F, 1.5F, 0.5F, 2.0F}).view({2, 2});
  return options;
}

at::Tensor causal_rows(const Stream& x, const DecodeOptions& options) {
  AttentionCall call;
  call.causal = true;
  call.diag_block = options.diag_block;
  call.alpha = options.alpha;
  call.beta = options.beta;
  call.mix = options.mix;
  call.fixed_mix = options.fixed_mix;
  call.feature = options.feature;
  return attention(x.q, x.k, x.v, call);
}

void expect_rows(const at::Tensor& found, const at::Tensor& expected) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_LE((found - expected).abs().max().item<double>(), 2e-5);
}

TEST(DecodeState, ReplaysTheCausalForward) {
  for (const std::int64_t block : {0, 8}) {
    for (const char* feature : {"exp", "elu"}) {
      DecodeOptions options = options_with(block);
      options.feature = feature;
      if (block != 0) options.mix = at::rand({4, 8});
      const Stream x;
      const at::Tensor expected = causal_rows(x, options);
      for (const std::vector<std::int64_t>& ends :
           std::vector<std::vector<std::int64_t>>{{45}, {9, 10, 30, 45}, {20, 45}}) {
        DecodeState state(options);
        const std::int64_t bytes = state.bytes();
        std::vector<at::Tensor> rows;
        std::int64_t begin = 0;
        for (const std::int64_t end : ends) {
          rows.push_back(x.append(state, begin, end));
          begin = end;
        }
        expect_rows(at::cat(rows, 2), expected);
        EXPECT_EQ(state.bytes(), bytes);
        EXPECT_TRUE(at::equal(state.tokens(), at::tensor({kTokens, kTokens})));
      }
      DecodeState state(options);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const auto token = [&](const at::Tensor& y) { return y.slice(2, t, t + 1); };
        expect_rows(state.step(token(x.q), token(x.k), token(x.v)), token(expected));
      }
      // Each row as if it stood at the last place.
      expect_rows(state.read(x.q.slice(2, kTokens - 1)), expected.slice(2, kTokens - 1));
    }
  }
}

TEST(DecodeState, LengthsAndTypes) {
  const Stream x;
  const DecodeOptions options = options_with(8);
  DecodeState state(options);
  const at::Tensor rows = state.append(x.q, x.k, x.v, {}, at::tensor({45, 12}, at::kInt));
  EXPECT_TRUE(at::equal(state.tokens(), at::tensor({45L, 12L})));
  EXPECT_EQ(rows[1].slice(1, 12).abs().max().item<float>(), 0);
  expect_rows(rows[0], causal_rows(x, options)[0]);
  // Without queries there are no rows.
  EXPECT_FALSE(state.append({}, x.k.slice(2, 0, 3), x.v.slice(2, 0, 3)).defined());
  DecodeState half(options);
  const at::Tensor found =
      half.append(x.q.to(at::kBFloat16), x.k.to(at::kBFloat16), x.v.to(at::kBFloat16));
  EXPECT_EQ(found.scalar_type(), at::kBFloat16);
  EXPECT_LE((found.to(at::kFloat) - causal_rows(x, options)).abs().max().item<double>(), 0.1);
}

TEST(DecodeState, ForkSelectAndReset) {
  const Stream x;
  for (const std::int64_t block : {0, 8}) {
    const DecodeOptions options = options_with(block);
    const at::Tensor expected = causal_rows(x, options);
    DecodeState state(options);
    x.append(state, 0, 20);
    DecodeState copy = state.fork();
    x.append(state, 20, 45);
    EXPECT_TRUE(at::equal(copy.tokens(), at::tensor({20L, 20L})));
    expect_rows(x.append(copy, 20, 45), expected.slice(2, 20));
    // Sequences change places, with their own beta.
    DecodeState prefix(options);
    x.append(prefix, 0, 20);
    DecodeState chosen = prefix.select(at::tensor({1L, 1L, 0L}));
    EXPECT_EQ(chosen.batch(), 3);
    const at::Tensor places = at::tensor({1L, 1L, 0L});
    const auto rest = [&](const at::Tensor& y) { return y.index_select(0, places).slice(2, 20); };
    expect_rows(chosen.append(rest(x.q), rest(x.k), rest(x.v)), rest(expected));
    state.reset(0);
    EXPECT_TRUE(at::equal(state.tokens(), at::tensor({0L, 45L})));
    state.reset();
    expect_rows(x.append(state, 0, 45), expected);
  }
}

TEST(DecodeState, MergeAndBytes) {
  const Stream x;
  const DecodeOptions options = options_with(8);
  const at::Tensor expected = causal_rows(x, options);
  DecodeState first(options), second(options);
  x.append(first, 0, 24);
  second.append({}, x.k.slice(2, 24, 40), x.v.slice(2, 24, 40));
  first.merge(second);
  const std::string bytes = first.save();
  expect_rows(x.append(first, 40, 45), expected.slice(2, 40));
  DecodeState loaded(options);
  loaded.load(bytes);
  EXPECT_TRUE(at::equal(loaded.tokens(), at::tensor({40L, 40L})));
  expect_rows(x.append(loaded, 40, 45), expected.slice(2, 40));
  expect_error([&] { loaded.load(std::string_view(bytes).substr(0, bytes.size() / 2)); },
               {"bytes"});
  std::string damaged = bytes;
  damaged[damaged.size() / 2] ^= 1;
  expect_error([&] { loaded.load(damaged); }, {"checksum"});
}

TEST(DecodeState, Refusals) {
  const Stream x;
  DecodeOptions options = options_with(8);
  DecodeState state(options);
  DecodeOptions other = options;
  other.diag_block = 16;
  expect_error([&] { state.merge(DecodeState(other)); },
               {"lln+diag8", "lln+diag16", "expected the same configuration"});
  other = options;
  other.beta = at::ones({2});
  expect_error([&] { state.merge(DecodeState(other)); }, {"beta [1, 1.5, 0.5, 2]", "[1, 1]"});
  expect_error([&] { state.reset(2); }, {"sequence 2: expected 0 to 1"});
  expect_error([&] { state.select(at::ones({2})); }, {"sequences must be int64 [batch]"});
  expect_error([&] { state.select(at::tensor({0L, 2L})); }, {"from 0 to 2: expected 0 to 1"});
  const at::Tensor leaf = x.q.clone().requires_grad_();
  expect_error([&] { state.append(leaf, x.k, x.v); }, {"decoding has no gradients"},
               lln::ErrorCode::unsupported);
  {
    at::NoGradGuard guard;
    EXPECT_TRUE(state.append(leaf, x.k, x.v).defined());
  }
  expect_error([&] { state.append(x.q, x.k.slice(1, 0, 1), x.v); }, {"DecodeState::append", "k"});
  expect_error([&] { state.step(x.q, x.k, x.v); }, {"DecodeState::step"});
  expect_error([&] { state.append(x.q.to(at::kDouble), x.k, x.v); }, {"found float64"},
               lln::ErrorCode::unsupported);
  expect_error([&] { state.read({}); }, {"q is not given: expected a tensor"});
  EXPECT_TRUE(at::equal(state.tokens(), at::tensor({45L, 45L})));
  options.dim = 0;
  expect_error([&] { DecodeState{options}; }, {"channels of q and k must be 1 to 256: 0"});
  options = options_with();
  options.mix = at::ones({4});
  expect_error([&] { DecodeState{options}; }, {"nothing to mix"});
}

}  // namespace
}  // namespace lln_torch
