// The text form of a problem: round trips, defaults, every error text, and random text that must
// neither crash the parser nor come back as another problem.
// SPDX-License-Identifier: Apache-2.0
#include "lln/problem.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "conformance/cases.h"
#include "lln/error.h"

namespace lln {
namespace {

TEST(Problem, ReadsEveryPart) {
  const Problem p =
      parse_problem("backward:bf16:cuda:3:b2h16k4n4096m2048d64v32:lln:feature=power3");
  EXPECT_EQ(p.op, Op::backward);
  EXPECT_EQ(p.dtype, DType::bf16);
  EXPECT_EQ(p.device, (Device{DeviceKind::cuda, 3}));
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads, 16);
  EXPECT_EQ(p.heads_k, 4);
  EXPECT_EQ(p.tokens, 4096);
  EXPECT_EQ(p.tokens_k, 2048);
  EXPECT_EQ(p.dim, 64);
  EXPECT_EQ(p.dim_v, 32);
  EXPECT_EQ(p.kind, Kind::lln);
  EXPECT_EQ(p.feature, Feature::power);
  EXPECT_EQ(p.power, 3);
  EXPECT_EQ(p.sequences, 2);
}

TEST(Problem, OmittedPartsTakeTheirDefaults) {
  const Problem p = parse_problem("forward:f32:cpu:h12n16384d64:lln+diag48:causal");
  EXPECT_EQ(p.batch, 1);
  EXPECT_EQ(p.heads_k, 12);
  EXPECT_EQ(p.tokens_k, 16384);
  EXPECT_EQ(p.dim_v, 64);
  EXPECT_EQ(p.diag_block, 48);
  EXPECT_TRUE(p.causal);
  EXPECT_FALSE(p.masked);
  EXPECT_TRUE(p == parse_problem("forward:f32:cpu:b1h12k12n16384m16384d64v64:lln+diag48:causal"));
}

TEST(Problem, PrintsWhatItReads) {
  for (const std::string text :
       {"forward:f32:cpu:b1h12n16384d64:lln", "backward:bf16:cpu:b2h16k4n4096d64:lln+diag64:causal",
        "append:f16:cuda:b1h1n1d1:diag3", "step:f32:cuda:7:b1h2n5m0d7v8:softmax",
        "train:f64:cpu:b0h1n0d256:lln:masked:feature=softplus",
        "forward:f32:cpu:b1h1n10d4:lln:causal:packed=3:feature=power0.5",
        "backward:f32:cpu:b1h1n10d4:lln:causal:masked:state:feature=elu",
        "backward:f32:cpu:b1h1n10d4:lln+diag2:masked:state:block_origins:feature=relu",
        "forward:f32:cpu:b1h1n10d4:diag1099511627776:causal:packed=3:block_origins",
        "forward:f32:cpu:b1h1n10d4:softmax:packed"}) {
    EXPECT_EQ(to_string(parse_problem(text)), text);
  }
}

TEST(Problem, EveryCaseRoundTrips) {
  for (const conformance::Case& c : conformance::cases()) {
    EXPECT_TRUE(parse_problem(to_string(c.problem)) == c.problem) << to_string(c.problem);
  }
}

struct Wrong {
  const char* text;
  const char* reason;
};

constexpr Wrong kWrong[] = {
    {"", "expected op:dtype:device:shape:kind[:flags]"},
    {"forward:f32:cpu:b1h1n1d1", "expected op:dtype:device:shape:kind[:flags]"},
    {"sideways:f32:cpu:b1h1n1d1:lln", "unknown op 'sideways'"},
    {"forward:f8:cpu:b1h1n1d1:lln", "unknown dtype 'f8': expected f32, f16, bf16 or f64"},
    {"forward:f32:tpu:b1h1n1d1:lln", "unknown device 'tpu'"},
    {"forward:f32:cuda:2000:b1h1n1d1:lln", "device index 2000 is above 1023"},
    {"forward:f32:cpu:b1x1n1d1:lln", "expected one of the letters b h k n m d v before 'x1n1d1'"},
    {"forward:f32:cpu:b1hn1d1:lln", "'h' needs a whole number"},
    {"forward:f32:cpu:b1h99999999999999999999n1d1:lln", "'h' needs a whole number below 2^63"},
    {"forward:f32:cpu:b1b1n1d1:lln", "'b' twice"},
    {"forward:f32:cpu:b1h1n1:lln", "n and d are required"},
    {"forward:f32:cpu:b1h1n1d1:linear", "unknown kind 'linear'"},
    {"forward:f32:cpu:b1h1n1d1:diag", "expected a block size of at least 1"},
    {"forward:f32:cpu:b1h1n1d1:lln+diag0", "expected a block size of at least 1"},
    {"forward:f32:cpu:b1h1n1d1:lln:fast", "unknown flag 'fast'"},
    {"forward:f32:cpu:b1h1n1d1:lln:", "unknown flag ''"},
    {"forward:f32:cpu:b1h1n1d1:lln:causal:causal", "flag 'causal' twice"},
    {"forward:f32:cpu:b1h1n1d1:lln:masked:causal:masked", "flag 'masked' twice"},
    {"forward:f32:cpu:b1h1n1d1:lln:packed:packed=2", "flag 'packed' twice"},
    {"forward:f32:cpu:b1h1n1d1:lln:feature=elu:feature=relu", "flag 'feature' twice"},
    {"forward:f32:cpu:b1h1n1d1:lln:packed=x", "expected a number of sequences"},
    {"forward:f32:cpu:b1h1n1d1:lln:feature=cos", "unknown feature 'cos'"},
    {"forward:f32:cpu:b1h1n1d1:lln:feature=power-1", "unknown feature 'power-1'"},
    {"forward:f32:cpu:b1h1n1d0:lln", "channels of q and k must be 1 to 256: 0"},
    {"forward:f32:cpu:b1h1n1d257:lln", "channels of q and k must be 1 to 256: 257"},
    {"forward:f32:cpu:b1h1n1d1v300:lln", "channels of v must be 1 to 256: 300"},
    {"forward:f32:cpu:b1h0n1d1:lln", "at least one head is needed: 0 query heads"},
    {"forward:f32:cpu:b1h4k3n1d1:lln", "query heads must be a multiple of key heads: 4 and 3"},
    {"forward:f32:cpu:b1h1n2m3d1:lln:causal", "2 queries, 3 keys"},
    {"forward:f32:cpu:b1h1n2m3d1:diag2", "block-diagonal attention needs as many keys as queries"},
    {"forward:f32:cpu:b1h1n2d1:softmax:feature=elu",
     "feature elu belongs to LLN; softmax has none"},
    {"forward:f32:cpu:b1h1n2d1:diag2:state", "a state of keys belongs to LLN; diag2 has none"},
    {"append:f32:cpu:b1h1n2d1:lln:state", "decoding keeps a state of its own"},
    {"forward:f32:cpu:b1h1n2d1:lln:block_origins",
     "block_origins belongs to Diag and LLN+Diag; lln has no blocks"},
    {"append:f32:cpu:b1h1n2d1:lln+diag2:block_origins",
     "decoding counts blocks from the first token"},
    {"forward:f32:cpu:b1h1n2d1:diag2000000000000",
     "the block size must be 1 to 1099511627776: 2000000000000"},
    {"forward:f32:cpu:b2h1n2d1:lln:packed", "packed sequences need batch 1: batch 2"},
    {"forward:f32:cpu:b1h1n2d1:lln:packed:masked", "packed sequences take no key mask"},
    {"forward:f32:cpu:b9000000000h1n9000000000d256:lln", "elements is too large"},
    {"forward:f32:cpu:b1h1000000000n1d1:lln:packed=1000000000",
     "states of 2.56e+20 elements are too large: 1000000000 sequences, 1000000000 key heads"},
};

TEST(Problem, ErrorsNameThePartThatIsWrong) {
  for (const Wrong& wrong : kWrong) {
    try {
      parse_problem(wrong.text);
      ADD_FAILURE() << wrong.text << " was accepted; expected: " << wrong.reason;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(wrong.reason), std::string::npos)
          << "expected: " << wrong.reason << "\nfound:    " << error.what();
    }
  }
}

TEST(Problem, AllFaultsComeTogether) {
  try {
    parse_problem("forward:f32:cpu:b2h4k3n2m3d0:diag2:causal:packed");
    FAIL();
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const char* reason : {"multiple of key heads", "channels of q and k", "causal attention",
                               "block-diagonal attention", "packed sequences need batch 1"}) {
      EXPECT_NE(what.find(reason), std::string::npos) << reason << "\nfound: " << what;
    }
  }
}

// Whatever is accepted prints, and what it prints reads back as the same problem.
void expect_round_trip_or_error(const std::string& text, int& accepted) {
  Problem problem;
  try {
    problem = parse_problem(text);
  } catch (const Error&) {
    return;
  }
  ++accepted;
  ASSERT_TRUE(parse_problem(to_string(problem)) == problem)
      << text << " prints as " << to_string(problem) << ", which reads as another problem";
}

TEST(Problem, RandomTextNeverBreaksTheParser) {
  constexpr int kRounds = 20000;
  std::mt19937_64 random(20240229);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  const std::string alphabet = "bhknmdv0123456789:+=.-ecupowrl \xff";
  const std::vector<conformance::Case> table = conformance::cases();
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::string text = to_string(table[below(table.size())].problem);
    for (std::size_t edits = below(4); edits > 0; --edits) {
      const std::size_t at = below(text.size() + 1);
      const char letter = alphabet[below(alphabet.size())];
      switch (below(4)) {
        case 0:
          text.insert(at, 1, letter);
          break;
        case 1:
          if (at < text.size()) text[at] = letter;
          break;
        case 2:
          text.erase(at, below(4));
          break;
        default:
          text += text.substr(at);
      }
    }
    expect_round_trip_or_error(text, accepted);
  }
  EXPECT_GT(accepted, kRounds / 10);
}

// Parts in any combination, so that most texts get past the first check.
TEST(Problem, RandomPartsRoundTrip) {
  constexpr int kRounds = 20000;
  std::mt19937_64 random(7);
  const auto pick = [&](const auto& list) { return std::string(list[random() % std::size(list)]); };
  const char* const ops[] = {"forward", "backward", "append", "step", "train", ""};
  const char* const types[] = {"f32", "f16", "bf16", "f64", "f31"};
  const char* const devices[] = {"cpu", "cuda", "cuda:1", "cuda:-1", "cpu:0"};
  const char* const letters[] = {"b", "h", "k", "n", "m", "d", "v"};
  const char* const numbers[] = {"0", "1", "2", "64", "256", "1000000", "9223372036854775807", ""};
  const char* const kinds[] = {"lln", "diag1", "diag64", "lln+diag7", "softmax", "diag"};
  const char* const flags[] = {
      "causal",          "packed",        "packed=0",          "packed=5",
      "masked",          "state",         "block_origins",     "feature=exp",
      "feature=elu",     "feature=power", "feature=power1e-3", "feature=power3.25",
      "feature=powerinf"};
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::string text = pick(ops) + ":" + pick(types) + ":" + pick(devices) + ":n2d4";
    for (auto parts = random() % 3; parts > 0; --parts) text += pick(letters) + pick(numbers);
    text += ":" + pick(kinds);
    for (auto parts = random() % 3; parts > 0; --parts) text += ":" + pick(flags);
    expect_round_trip_or_error(text, accepted);
  }
  EXPECT_GT(accepted, kRounds / 100);
}

}  // namespace
}  // namespace lln
