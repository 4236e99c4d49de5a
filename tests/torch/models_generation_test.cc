// Causal models: the future never changes the past, and generation by memories gives what the whole
// row gives, for every kind of memory.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "expect_error.h"
#include "lln_torch/models/generation.h"
#include "torch/small_models.h"

namespace lln_torch {
namespace {

using lln::test::expect_error;

constexpr std::int64_t kTexts = 2, kLength = 23;

Task next_task() {
  Task task{.name = "lm", .kind = TaskKind::next_token};
  task.vocabulary = kVocabulary;
  task.max_tokens = 32;
  return task;
}

std::shared_ptr<WordModel> make_decoder(const std::string& attention,
                                        const std::string& model = "") {
  auto made = small_model(next_task(), model, attention);
  made->eval();
  return std::dynamic_pointer_cast<WordModel>(made);
}

Tensor whole_scores(WordModel& model, const Tensor& ids) {
  const at::NoGradGuard no_grad;
  Context context;
  return model.word_scores(model.body().forward(ids, {}, {}, context));
}

struct DecoderCase {
  const char* name;
  const char* attention;
  const char* model;
  const char* memory;
};

void PrintTo(const DecoderCase& c, std::ostream* out) { *out << c.name; }

class Decoders : public testing::TestWithParam<DecoderCase> {};

TEST_P(Decoders, TheFutureChangesNothing) {
  const auto model = make_decoder(GetParam().attention, GetParam().model);
  Tensor ids = random_ids(kTexts, kLength);
  const Tensor before = whole_scores(*model, ids);
  ids.narrow(1, 15, kLength - 15).fill_(3);
  const Tensor after = whole_scores(*model, ids);
  expect_near(after.narrow(1, 0, 15), before.narrow(1, 0, 15), 1e-5);
  EXPECT_GT((after - before).abs().max().item<float>(), 1e-3);
}

// A prompt, single tokens across borders of diagonal blocks, and a second piece.
TEST_P(Decoders, GenerationEqualsTheWholeRow) {
  const auto model = make_decoder(GetParam().attention, GetParam().model);
  const Tensor ids = random_ids(kTexts, kLength);
  const Tensor whole = whole_scores(*model, ids);
  Generation generation(*model, kTexts);
  EXPECT_EQ(generation.memory_kind(), GetParam().memory);
  std::int64_t seen = 0;
  for (const std::int64_t piece : {6, 1, 1, 1, 7, 1, 1, 1, 1, 1, 2}) {
    const Tensor scores = generation.append(ids.narrow(1, seen, piece));
    seen += piece;
    expect_near(scores, whole.select(1, seen - 1), 2e-5);
  }
  EXPECT_EQ(seen, kLength);
  EXPECT_EQ(generation.tokens(), kLength);
}

INSTANTIATE_TEST_SUITE_P(
    Attentions, Decoders,
    testing::Values(
        DecoderCase{"lln_ema", "name = 'lln'", "", "state"},
        DecoderCase{"lln_diag_frozen",
                    "name = 'lln+diag'\nmatching = 'frozen'\nalpha = 1.5\ndiag_block = 8", "",
                    "state"},
        DecoderCase{"lln_diag_learned_rotary",
                    "name = 'lln+diag'\nmatching = 'learned'\ndiag = 'gate'\ndiag_block = 8",
                    "positions = 'rotary'", "state"},
        DecoderCase{"lln_diag_scales",
                    "name = 'lln+diag'\nmatching = 'none'\ndiag = 'scales'\ndiag_block = 8",
                    "norm = 'post'", "state"},
        DecoderCase{"lln_diag_channels",
                    "name = 'lln+diag'\nmatching = 'none'\ndiag = 'learned'\ndiag_block = 8",
                    "tied_output = true", "state"},
        DecoderCase{"elu_diag", "name = 'elu+diag'\ndiag_block = 8", "", "state"},
        DecoderCase{"softmax", "name = 'softmax'", "positions = 'rotary'", "keys and values"},
        DecoderCase{"softmax_diag_gate", "name = 'softmax+diag'\ndiag = 'gate'\ndiag_block = 8", "",
                    "keys and values"},
        DecoderCase{"softmax_diag", "name = 'softmax+diag'\ndiag_block = 8", "", "keys and values"},
        DecoderCase{"softmax_diag_temperature",
                    "name = 'softmax+diag'\ndiag_block = 8\ntemperature = 0.3", "",
                    "keys and values"},
        DecoderCase{"quadratic", "name = 'quadratic'", "", "whole row"}),
    [](const auto& tested) { return tested.param.name; });

// LLN without a table of positions goes on beyond the longest row of the training, and its memory
// stays what it was.
TEST(Generation, ConstantMemoryWithoutEnd) {
  const auto model = make_decoder("name = 'lln+diag'\ndiag_block = 8", "positions = 'rotary'");
  Generation generation(*model, 1);
  generation.append(random_ids(1, 20));
  const std::int64_t bytes = generation.bytes();
  EXPECT_GT(bytes, 0);
  for (int i = 0; i < 60; ++i) {
    EXPECT_TRUE(generation.append(random_ids(1, 1)).isfinite().all().item<bool>());
  }
  EXPECT_EQ(generation.tokens(), 80);
  EXPECT_EQ(generation.bytes(), bytes);

  const auto softmax = make_decoder("name = 'softmax'", "positions = 'rotary'");
  Generation growing(*softmax, 1);
  growing.append(random_ids(1, 20));
  const std::int64_t at_first = growing.bytes();
  growing.append(random_ids(1, 60));
  EXPECT_GT(growing.bytes(), at_first);
}

TEST(Generation, Refusals) {
  const auto model = make_decoder("name = 'lln'");
  Generation generation(*model, 1);
  generation.append(random_ids(1, 32));
  expect_error([&] { generation.append(random_ids(1, 1)); }, {"a row of 33 tokens", "at most 32"});
  expect_error([&] { generation.append(random_ids(2, 1)); }, {"expected ids [1, tokens]"});
  Task masked = next_task();
  masked.kind = TaskKind::masked_tokens;
  const auto encoder = small_model(masked, "", "name = 'softmax'");
  expect_error([&] { Generation(*encoder, 1); }, {"expected a decoder"});
}

TEST(SampleToken, ByTemperatureAndRank) {
  const Tensor scores = at::tensor({0.0F, 2.0F, 1.0F, 2.0F, -3.0F});
  std::mt19937_64 random(0);
  EXPECT_EQ(sample_token(scores, {.temperature = 0}, random), 1);
  EXPECT_EQ(sample_token(scores, {.temperature = 5, .top_k = 1}, random), 1);
  std::vector<int> found(5);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    ++found[static_cast<std::size_t>(sample_token(scores, {.temperature = 2}, random))];
  }
  const Tensor expected = (scores / 2).softmax(0);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i] / double{kDraws}, expected[static_cast<std::int64_t>(i)].item<float>(),
                0.015);
  }
  for (int i = 0; i < 200; ++i) {
    const std::int64_t token = sample_token(scores, {.temperature = 3, .top_k = 2}, random);
    EXPECT_TRUE(token == 1 || token == 3) << token;
  }
}

}  // namespace
}  // namespace lln_torch
