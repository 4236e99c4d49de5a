// The decode state as a thing: merge, copies, bytes and back, and that a refused call changes
// nothing.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "attention_run.h"
#include "conformance/decode.h"
#include "lln/error.h"
#include "math/fnv.h"

namespace lln::test {
namespace {

using conformance::OwnedState;
using conformance::token_range;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::byte> saved(OwnedState& state) {
  std::vector<std::byte> bytes(state->saved_bytes());
  state->save(bytes);
  return bytes;
}

bool same_memory(const OwnedState& x, const OwnedState& y) {
  return std::equal(x.memory().begin(), x.memory().end(), y.memory().begin(), y.memory().end());
}

// The state as if every sequence had seen so many tokens, of which it holds none.
void pretend_tokens(OwnedState& state, std::int64_t tokens) {
  std::vector<std::byte> bytes = saved(state);
  const auto put = [&](std::size_t at, auto number) {
    std::memcpy(bytes.data() + at, &number, sizeof number);
  };
  for (std::int64_t b = 0; b < state->config().batch; ++b) {
    put(80 + 8 * static_cast<std::size_t>(b), tokens);
  }
  put(bytes.size() - 8, fnv1a(std::span(bytes).first(bytes.size() - 8)));
  state->load(bytes);
}

struct Stream {
  explicit Stream(const char* problem)
      : c(make_case(problem)),
        in(conformance::make_inputs(c, c.problem.dtype)),
        config(conformance::decode_config(c)) {}

  void append(OwnedState& state, std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> lengths;
    AttentionInputs piece = token_range(in.views(), begin, end - begin, lengths);
    piece.q = piece.alpha = piece.mix = {};
    state->append(piece);
  }
  // Rows of the first queries against all that the state has seen.
  Tensor read(OwnedState& state, std::int64_t rows = 4) {
    std::vector<std::int32_t> lengths;
    AttentionInputs query = token_range(in.views(), 0, rows, lengths);
    query.k = query.v = {};
    Tensor o(c.problem.dtype, {c.problem.batch, c.problem.heads, rows, c.problem.dim_v});
    state->read(query, o.view());
    return o;
  }

  Case c;
  Inputs in;
  DecodeConfig config;
};

TEST(DecodeState, MergeFollowsWithLaterTokens) {
  for (const char* problem :
       {"append:f32:cpu:b2h4k2n200d20v12:lln", "append:f32:cpu:b1h2n200d16:lln+diag20"}) {
    Stream stream(problem);
    OwnedState whole(stream.config), first(stream.config), second(stream.config),
        third(stream.config), left(stream.config), right(stream.config);
    stream.append(whole, 0, 200);
    stream.append(first, 0, 60);
    stream.append(second, 60, 140);
    stream.append(third, 140, 200);
    const Tensor expected = stream.read(whole);
    left->copy_from(*first);
    left->merge(*second);
    left->merge(*third);
    right->copy_from(*second);
    right->merge(*third);
    first->merge(*right);
    EXPECT_EQ(first_difference(stream.read(left), 2e-6, expected), "") << problem;
    EXPECT_EQ(first_difference(stream.read(first), 2e-6, expected), "") << problem;
    EXPECT_EQ(left->tokens(), 200);
    EXPECT_EQ(first->tokens(), 200);
  }
}

TEST(DecodeState, AStateGoesOnInTheMemoryThatAnotherLeft) {
  Stream stream("append:f32:cpu:b2h4k2n70d16:lln+diag32");
  OwnedState whole(stream.config), first(stream.config);
  stream.append(whole, 0, 40);
  stream.append(first, 0, 40);
  const std::vector<std::int64_t> tokens = {first->tokens(0), first->tokens(1)};
  *first = DecodeState::resume(stream.config, first.memory(), tokens);
  EXPECT_EQ(saved(first), saved(whole));
  stream.append(whole, 40, 70);
  stream.append(first, 40, 70);
  EXPECT_EQ(saved(first), saved(whole));

  const auto refused = [&](std::vector<std::int64_t> counts) {
    return error_of([&] { DecodeState::resume(stream.config, first.memory(), counts); });
  };
  EXPECT_TRUE(contains(refused({1}), "1 counts of tokens are given: expected 2"));
  EXPECT_TRUE(contains(refused({70, -1}), "sequence 1 has -1 tokens: expected 0 to"));
}

TEST(DecodeState, MergeWithAnEmptyStateChangesNoBit) {
  Stream stream("append:f32:cpu:b1h2n70d16:lln+diag32");
  OwnedState state(stream.config), empty(stream.config), other(stream.config);
  stream.append(state, 0, 70);
  other->copy_from(*state);
  state->merge(*empty);
  EXPECT_TRUE(same_memory(state, other));
  empty->merge(*state);
  EXPECT_EQ(saved(empty), saved(state));
}

TEST(DecodeState, MergeInsideABlockIsRefused) {
  Stream stream("append:f32:cpu:b2h2n70d16:lln+diag32");
  OwnedState state(stream.config), later(stream.config), before(stream.config);
  stream.append(state, 0, 65);
  stream.append(later, 65, 70);
  before->copy_from(*state);
  const std::string text = error_of([&] { state->merge(*later); });
  EXPECT_TRUE(contains(text, "DecodeState::merge: 2 faults in b2h2k2d16v16:lln+diag32")) << text;
  EXPECT_TRUE(contains(text, "sequence 1 has 65 tokens, which is no multiple of the block of 32"))
      << text;
  EXPECT_TRUE(contains(text, "the 5 later ones")) << text;
  EXPECT_TRUE(same_memory(state, before));
  EXPECT_TRUE(contains(error_of([&] { state->merge(*state); }), "cannot follow itself"));
  // A sequence without later tokens may end anywhere.
  later->reset(0);
  state->reset(1);
  state->merge(*later);
  EXPECT_EQ(state->tokens(0), 65);
  EXPECT_EQ(state->tokens(1), 5);
}

TEST(DecodeState, ForkAndRollbackAreBitwise) {
  Stream stream("append:bf16:cpu:b1h4k2n90d16:lln+diag32");
  OwnedState state(stream.config), fork(stream.config);
  stream.append(state, 0, 50);
  const std::vector<std::byte> point = saved(state);
  fork->copy_from(*state);
  stream.append(state, 50, 90);
  stream.append(fork, 50, 90);
  EXPECT_TRUE(same_memory(state, fork));
  const std::vector<std::byte> end = saved(state);
  EXPECT_NE(end, point);
  state->load(point);
  EXPECT_EQ(state->tokens(), 50);
  EXPECT_EQ(saved(state), point);
  stream.append(state, 50, 90);
  EXPECT_EQ(saved(state), end);
  EXPECT_EQ(stream.read(state).bytes(), stream.read(fork).bytes());
}

TEST(DecodeState, ResetOfASequenceLeavesTheOthers) {
  Stream stream("append:f32:cpu:b2h2n40d8:lln+diag16");
  OwnedState state(stream.config), expected(stream.config);
  stream.append(state, 0, 40);
  const Tensor before = stream.read(state);
  state->reset(0);
  EXPECT_EQ(state->tokens(0), 0);
  EXPECT_EQ(state->tokens(1), 40);
  EXPECT_EQ(first_difference(stream.read(state), 0,
                             [&](auto b, auto h, auto n, auto l) {
                               return std::optional(b == 0 ? 0 : before.get(b, h, n, l));
                             }),
            "");
  state->reset();
  EXPECT_TRUE(same_memory(state, expected));
  EXPECT_TRUE(contains(error_of([&] { state->reset(2); }), "sequence 2 of b2h2k2d8v8"));
  EXPECT_TRUE(contains(error_of([&] { (void)state->tokens(-1); }), "sequence -1"));
}

// A moved-from state is one of no sequences: nothing is left that a call could reach.
TEST(DecodeState, MovedFromHasNoSequences) {
  Stream stream("append:f32:cpu:b2h2n20d8:lln+diag16");
  OwnedState owned(stream.config), target(stream.config);
  stream.append(owned, 0, 20);
  const std::vector<std::byte> before = saved(owned);
  const auto expect_empty = [&](DecodeState& state) {
    EXPECT_EQ(state.config().batch, 0);
    EXPECT_TRUE(contains(error_of([&] { (void)state.tokens(); }), "sequence 0 of b0h2k2d8v8"));
    EXPECT_TRUE(contains(error_of([&] { state.reset(0); }), "sequence 0 of b0h2k2d8v8"));
    EXPECT_TRUE(contains(error_of([&] { state.append(stream.in.views()); }), "expected [0, 2"));
    EXPECT_TRUE(contains(error_of([&] { state.load(before); }), "this state is of b0h2k2d8v8"));
    EXPECT_TRUE(contains(error_of([&] { target->merge(state); }), "the same configuration"));
    EXPECT_TRUE(contains(error_of([&] { target->copy_from(state); }), "the same configuration"));
    state.reset();
    std::vector<std::byte> bytes(state.saved_bytes());
    state.save(bytes);
    EXPECT_EQ(saved_decode_config(bytes).batch, 0);
  };
  DecodeState moved = std::move(*owned);
  expect_empty(*owned);
  EXPECT_EQ(moved.tokens(1), 20);
  *target = std::move(moved);
  expect_empty(moved);
  EXPECT_EQ(saved(target), before);
}

class Bytes : public testing::Test {
 protected:
  Bytes() : stream("append:f32:cpu:b2h2k1n9d3v2:lln+diag4"), state(stream.config) {
    stream.append(state, 0, 9);
    bytes = saved(state);
  }
  // The text of the refusal; the state must be as it was.
  std::string refusal(std::span<const std::byte> damaged) {
    OwnedState target(stream.config), before(stream.config);
    stream.append(target, 0, 5);
    before->copy_from(*target);
    std::string text = error_of([&] { target->load(damaged); });
    EXPECT_TRUE(same_memory(target, before));
    EXPECT_EQ(target->tokens(), 5);
    EXPECT_EQ(error_of([&] { (void)saved_decode_config(damaged); }).empty(),
              contains(text, "the bytes are of"));
    return text;
  }

  Stream stream;
  OwnedState state;
  std::vector<std::byte> bytes;
};

TEST_F(Bytes, KnowTheirConfiguration) {
  EXPECT_EQ(saved_decode_config(bytes), stream.config);
  OwnedState other(saved_decode_config(bytes));
  other->load(bytes);
  EXPECT_EQ(saved(other), bytes);
  EXPECT_EQ(other->tokens(1), 9);
  EXPECT_EQ(stream.read(other).bytes(), stream.read(state).bytes());
}

// 8 magic, 4 version, 20 of options, 48 of sizes, 16 of tokens; m, s, rest, C, k and v of 2
// slots; 8.
TEST_F(Bytes, HaveTheDocumentedLayout) {
  ASSERT_EQ(bytes.size(),
            8U + 4 + 20 + 48 + 16 + 2 * 4 * (2 * (2 * 3 + 3 * 2) + 4 * 3 + 4 * 2) + 8);
  EXPECT_EQ(std::memcmp(bytes.data(), "llnstate\1\0\0\0\2\0\0\0", 16), 0);
  EXPECT_EQ(bytes[32 + 3 * 8], std::byte{3});  // dim
  EXPECT_EQ(bytes[80], std::byte{9});          // tokens of the first sequence
  const char letter[] = {'a'};
  EXPECT_EQ(fnv1a(std::as_bytes(std::span(letter))), 0xAF63DC4C8601EC8CU);
}

TEST_F(Bytes, NoSingleBitMayChange) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> damaged = bytes;
      damaged[i] ^= std::byte{1} << bit;
      EXPECT_FALSE(refusal(damaged).empty()) << "byte " << i << " bit " << bit;
    }
  }
}

TEST_F(Bytes, NoLengthButTheirOwn) {
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(refusal(std::span(bytes).first(size)).empty()) << size;
  }
  std::vector<std::byte> longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_TRUE(contains(refusal(longer), "has")) << refusal(longer);
}

TEST_F(Bytes, RefusalsSayWhy) {
  EXPECT_TRUE(contains(refusal(std::vector<std::byte>(500)), "do not begin with 'llnstate'"));
  EXPECT_TRUE(contains(refusal({}), "0 bytes are no saved decode state: expected at least 80"));
  std::vector<std::byte> version = bytes;
  version[8] = std::byte{7};
  EXPECT_TRUE(contains(refusal(version), "version 7: this build reads version 1"));
  std::vector<std::byte> corrupt = bytes;
  corrupt[200] ^= std::byte{64};
  EXPECT_TRUE(contains(refusal(corrupt), "checksum"));
  Stream other("append:f32:cpu:b1h2n9d3v2:lln");
  OwnedState foreign(other.config);
  const std::string text = refusal(saved(foreign));
  EXPECT_TRUE(contains(text,
                       "the bytes are of b1h2k2d3v2:lln: this state is of "
                       "b2h2k1d3v2:lln+diag4 mix 0.375"))
      << text;
}

TEST_F(Bytes, SaveNeedsRoom) {
  std::vector<std::byte> small(bytes.size() - 1);
  EXPECT_TRUE(contains(error_of([&] { state->save(small); }),
                       fmt::format("{} bytes for a state of", small.size())));
}

TEST(DecodeState, ConfigurationsAreChecked) {
  const auto refusal = [](const DecodeConfig& config) {
    return error_of([&] { (void)decode_state_bytes(config); });
  };
  EXPECT_EQ(refusal({.dim = 8, .dim_v = 8}), "");
  EXPECT_EQ(decode_state_bytes({.heads_k = 1, .dim = 16, .dim_v = 16}),
            4U * 2 * (2 * 16 + 16 * 16));
  const std::string many = refusal({.batch = -1, .heads = 3, .heads_k = 2, .dim = 0, .dim_v = 300});
  EXPECT_TRUE(contains(many, "decode_state_bytes: 4 faults in b-1h3k2d0v300:lln")) << many;
  EXPECT_TRUE(
      contains(refusal({.dim = 8, .dim_v = 8, .kind = Kind::softmax}), "lln and lln+diagB"));
  EXPECT_TRUE(contains(refusal({.dim = 8, .dim_v = 8, .kind = Kind::lln_diag, .diag_block = 0}),
                       "block size must be 1 to 1099511627776: 0"));
  EXPECT_TRUE(contains(refusal({.dim = 8, .dim_v = 8, .mix = std::nanf("")}), "mix is nan"));
  DecodeConfig large{.batch = 1,
                     .heads = 1024,
                     .heads_k = 1024,
                     .dim = 8,
                     .dim_v = 8,
                     .kind = Kind::lln_diag,
                     .diag_block = std::int64_t{1} << 40};
  EXPECT_TRUE(contains(refusal(large), "too large"));
  large.batch = 0;  // sizes of a slot must not overflow where there is none
  EXPECT_TRUE(contains(refusal(large), "too large"));
  alignas(64) std::byte memory[4096];
  const DecodeConfig config{.dim = 8, .dim_v = 8};
  const std::string unfit =
      error_of([&] { DecodeState state(config, std::span(memory).subspan(8, 100)); });
  EXPECT_TRUE(contains(unfit, "memory has 100 bytes: expected 1280")) << unfit;
  EXPECT_TRUE(contains(unfit, "memory starts 8 bytes past a multiple of 64")) << unfit;
}

class Refusals : public testing::Test {
 protected:
  Refusals() : stream("append:f32:cpu:b1h2n6d8:lln+diag4"), state(stream.config) {
    stream.append(state, 0, 3);
    before = saved(state);
  }
  template <class Call>
  void expect(std::string_view part, Call&& call) {
    const std::string text = error_of(call);
    EXPECT_TRUE(contains(text, part)) << text;
    EXPECT_EQ(saved(state), before) << part;
  }

  Stream stream;
  OwnedState state;
  std::vector<std::byte> before;
};

TEST_F(Refusals, NameEveryFaultAndChangeNothing) {
  const AttentionInputs good = stream.in.views();
  Tensor o(DType::f32, stream.in.g.shape());
  AttentionInputs in = good;
  in.k.shape[3] = 7;
  in.beta = {};
  expect("DecodeState::append: 2 faults in append:f32:cpu:b1h2n6d8:lln+diag4",
         [&] { state->append(in, o.view()); });
  expect("o is not given", [&] { state->append(good); });
  in = good;
  in.q = {};
  expect("o is given without q", [&] { state->append(in, o.view()); });
  in = good;
  const std::uint8_t mask[6] = {};
  in.key_mask = mask_view(mask, 1, 6);
  expect("key_mask is given: decoding takes key_lengths alone",
         [&] { state->append(in, o.view()); });
  in = good;
  const Tensor lse(DType::f32, {1, 2, 1, 8});
  const Tensor values(DType::f32, {1, 2, 8, 8});
  in.state = {lse.view(), values.view()};
  expect("state is given: a decode state holds its own", [&] { state->append(in, o.view()); });
  in = good;
  const std::int32_t origin[] = {-2};
  in.block_origins = IndexView(std::span<const std::int32_t>(origin));
  expect("block_origins is given: decoding counts blocks from the first token",
         [&] { state->append(in, o.view()); });
  in = good;
  const std::int32_t ends[] = {0, 6};
  in.cu_seqlens_q = IndexView(std::span<const std::int32_t>(ends));
  expect("packed sequences are given", [&] { state->append(in, o.view()); });
  in = good;
  const std::int32_t lengths[] = {7};
  in.key_lengths = IndexView(std::span<const std::int32_t>(lengths));
  expect("key_lengths[0] is 7: expected 0 to 6", [&] { state->append(in, o.view()); });
  expect("a step has one row and one key, or only rows: 6 rows, 6 keys",
         [&] { state->step(good, o.view()); });
  expect("k or v is given: a read adds no keys", [&] { state->read(good, o.view()); });
  in = good;
  in.k.dtype = DType::bf16;
  expect("q is f32: expected bf16", [&] { state->append(in, o.view()); });
  alignas(64) std::byte little[64];
  expect("workspace of 64 bytes is too small",
         [&] { state->append(good, o.view(), {.workspace = little}); });
  expect("unknown kernel 'reference'",
         [&] { state->append(good, o.view(), {.kernel = "reference"}); });
}

TEST_F(Refusals, CountsOfTokensHaveALimit) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  EXPECT_TRUE(contains(error_of([&] { pretend_tokens(state, kMost + 1); }),
                       "sequence 0 has 4611686018427387905 tokens: expected 0 to "
                       "4611686018427387904"));
  pretend_tokens(state, kMost - 4);
  before = saved(state);
  OwnedState later(stream.config);
  stream.append(later, 0, 5);
  const std::string has = "sequence 0 has 4611686018427387900 tokens and would get ";
  expect(has + "5 more: expected at most 4611686018427387904", [&] { state->merge(*later); });
  expect(has + "6 more", [&] { stream.append(state, 0, 6); });
  pretend_tokens(later, kMost);
  expect(has + "4611686018427387904 more", [&] { state->merge(*later); });
  stream.append(state, 0, 4);
  EXPECT_EQ(state->tokens(), kMost);
  before = saved(state);
  std::vector<std::int32_t> lengths;
  Tensor o(DType::f32, {1, 2, 1, 8});
  const AttentionInputs token = token_range(stream.in.views(), 0, 1, lengths);
  expect("sequence 0 has 4611686018427387904 tokens and would get 1 more",
         [&] { state->step(token, o.view()); });
  AttentionInputs query = token;
  query.k = query.v = {};
  state->read(query, o.view());
}

TEST_F(Refusals, OtherConfigurationsDoNotMix) {
  Stream other("append:f32:cpu:b1h2n6d16:lln+diag4");
  OwnedState foreign(other.config);
  expect("b1h2k2d8v8:lln+diag4 mix 0.375 and one of b1h2k2d16v16:lln+diag4 mix 0.375",
         [&] { state->merge(*foreign); });
  expect("expected the same configuration", [&] { state->copy_from(*foreign); });
}

}  // namespace
}  // namespace lln::test
