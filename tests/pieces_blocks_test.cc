// Pieces of sequences with diagonal blocks, cut at borders of these: told where the blocks of the
// whole are counted from, they give what it gives uncut, whatever keys are masked.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "math/random.h"
#include "pieces_run.h"

namespace lln::test {
namespace {

using conformance::KeyPattern;
using conformance::ParameterForm;
using conformance::WeightForm;

const char* const kKinds[] = {"lln+diag16", "lln+diag16:causal", "diag16", "diag16:causal"};

double tolerance(const std::string& type) { return type == "f64" ? 1e-12 : 1e-5; }

TEST(PieceBlocks, Unmasked) {
  const std::vector<std::int64_t> cuts = {0, 16, 16, 64, 144, 150};
  for (const std::string kind : kKinds) {
    for (const std::string type : {"f64", "f32", "bf16", "f16"}) {
      Case c = make_case("forward:" + type + ":cpu:b2h4k2n150d16v8:" + kind);
      // The gradients of these keys are sums of two calls, which bf16 and f16 round twice.
      if (type.ends_with("16") && kind == "lln+diag16") continue;
      expect_pieces({c, cuts}, tolerance(type));
    }
  }
}

// Six sequences of 150 tokens whose blocks of 16 begin `shift` tokens after a multiple of 16: holes
// anywhere, also where pieces begin; left padding by whole blocks; pieces without a valid key; one
// valid key alone, in the last piece; none.
std::vector<std::uint8_t> difficult_masks(std::int64_t shift) {
  std::vector<std::uint8_t> mask;
  const auto add = [&](std::int64_t first, auto&& counts) {
    for (std::int64_t n = 0; n < 150; ++n) mask.push_back(n == first || (n > first && counts(n)));
  };
  const auto holes = [](std::int64_t n) {
    return n % 16 != 0 && uniform_number(7, static_cast<std::uint64_t>(n)) < 0.6;
  };
  const auto borders = [&](std::int64_t n) { return (n - shift) % 16 > 2; };
  const auto two_pieces = [&](std::int64_t n) { return n >= shift + 64 && n < shift + 80; };
  const auto all = [](std::int64_t) { return true; };
  const auto none = [](std::int64_t) { return false; };
  add(shift, holes);
  add(shift, borders);
  add(shift + 48, all);
  add(shift, two_pieces);
  add(shift + 128, none);
  add(150, none);
  return mask;
}

TEST(PieceBlocks, Masked) {
  for (const std::int64_t shift : {0, 1, 5, 15}) {
    const std::vector<std::int64_t> cuts = {0,          shift,      shift + 16,  shift + 64,
                                            shift + 64, shift + 80, shift + 128, 150};
    for (const std::string kind : kKinds) {
      for (const std::string type : {"f64", "f32"}) {
        Case c = make_case("forward:" + type + ":cpu:b6h2k1n150d8v5:" + kind);
        c.parameters = ParameterForm::sequence;
        expect_pieces({c, cuts, difficult_masks(shift)}, tolerance(type));
      }
    }
  }
}

TEST(PieceBlocks, KeyLengths) {
  for (const std::string kind : kKinds) {
    for (const std::string type : {"f64", "f32"}) {
      Case c = make_case("forward:" + type + ":cpu:b3h2n150d8:" + kind + ":masked");
      c.keys = KeyPattern::lengths;
      expect_pieces({c, {0, 32, 48, 112, 150}}, tolerance(type));
    }
  }
}

// Cut where a block of the sequence that is cut ends.
TEST(PieceBlocks, Packed) {
  for (const std::string kind : kKinds) {
    for (const std::string type : {"f64", "f32"}) {
      Case c = make_case("forward:" + type + ":cpu:b1h4k2n150d8v5:" + kind + ":packed=5");
      c.lengths = {30, 0, 1, 70, 49};
      c.parameters = ParameterForm::sequence;
      expect_pieces({c, {0, 16, 31, 63, 63, 117, 150}}, tolerance(type));
    }
  }
}

// Sequences whose blocks begin after their first token: each has a segment more than its length
// asks for, which all must have their place in the workspace.
TEST(PieceBlocks, ManyShortSegments) {
  for (const std::string op : {"forward", "backward"}) {
    Case c = make_case(op + ":f32:cpu:b1h2k1n120d8:lln+diag16:causal:packed=40:block_origins");
    c.lengths.assign(40, 3);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.block_origins.assign(40, 1);
    const TensorSet expected = run(c, in, {.kernel = "reference"});
    for (const int threads : {1, 11}) {
      ThreadPool pool(threads);
      const TensorSet found = run(c, in, {.parallel = &pool});
      for (const TensorSet::Entry& entry : found.entries()) {
        EXPECT_EQ(first_difference(entry.tensor, 1e-5, expected.at(entry.name)), "")
            << entry.name << " of " << to_string(c) << " on " << threads << " threads";
      }
    }
  }
}

// An origin may be any integer: moved by whole blocks before the sequence, or behind its end, it
// changes no bit. 2^63 is 32 more than a multiple of 48.
TEST(PieceBlocks, FarOrigins) {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::int32_t> near = {-32, 150, -7, 0};
  const std::vector<std::int64_t> far = {kLeast, kMost, -7 - 48 * (std::int64_t{1} << 50), -48};
  for (const std::string kind : {"diag48", "diag48:causal", "lln+diag48", "lln+diag48:causal"}) {
    const Case c = make_case("forward:f32:cpu:b4h2n150d16:" + kind);
    const Inputs in = conformance::make_inputs(c, DType::f32);
    for (const char* kernel : {"", "reference"}) {
      const auto rows_from = [&](const IndexView& origins) {
        Tensor o(DType::f32, in.g.shape());
        AttentionInputs views = in.views();
        views.block_origins = origins;
        attention_forward(views, {o.view()}, conformance::options(c), {.kernel = kernel});
        return o;
      };
      EXPECT_EQ(first_difference(rows_from(std::span(far)), 0, rows_from(std::span(near))), "")
          << to_string(c) << ' ' << kernel;
    }
  }
}

// Blocks that do not divide a tile, that are larger than one, or span several; with weights that
// belong to tokens or channels.
TEST(PieceBlocks, SizesAndWeights) {
  constexpr std::int64_t kTokens = 430, kFirst = 30;
  std::vector<std::uint8_t> mask;
  for (std::int64_t n = 0; n < 2 * kTokens; ++n) {
    const std::int64_t after = n % kTokens - kFirst;
    mask.push_back(after == 0 || (after > 0 && n % 7 != 0) ? 1 : 0);
  }
  for (const std::int64_t block : {1, 48, 100, 200}) {
    for (const std::string causal : {"", ":causal"}) {
      for (const WeightForm form : {WeightForm::channel, WeightForm::token}) {
        Case c =
            make_case("forward:f32:cpu:b2h4k2n430d16v20:lln+diag" + std::to_string(block) + causal);
        c.weights = form;
        c.two_weights = form == WeightForm::token;
        expect_pieces({c, {0, kFirst + block, kFirst + 2 * block, kTokens}, mask}, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace lln::test
