// Values that break careless arithmetic: huge keys, one key far above all others anywhere, equal
// rows, numbers at both ends of the f32 range, rows without keys. Every kernel, both directions.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <string>

#include "attention_run.h"
#include "conformance/run.h"

namespace lln::test {
namespace {

using conformance::InputStyle;
using conformance::KeyPattern;
using conformance::Verdict;

const char* const kKinds[] = {"lln",           "lln:causal", "lln+diag48",    "lln+diag48:causal",
                              "diag48:causal", "softmax",    "softmax:causal"};

void expect_all_kernels_pass(const Case& c) {
  ThreadPool pool(2);
  for (const auto& result :
       conformance::run_case(c, kernel_names(c.problem.op, DeviceKind::cpu), &pool)) {
    EXPECT_NE(result.verdict, Verdict::failed) << to_string(c) << " on " << result.kernel << '\n'
                                               << result.text;
  }
}

void expect_both_directions(Case c, const std::string& problem) {
  for (const std::string op : {"forward:", "backward:"}) {
    c.problem = parse_problem(op + problem);
    c.parameter_gradients = true;
    expect_all_kernels_pass(c);
  }
}

TEST(Adversarial, KeysTimesTenThousand) {
  for (const std::string kind : kKinds) {
    expect_both_directions({.style = InputStyle::large_keys}, "f32:cpu:b1h2n200d24:" + kind);
  }
}

// First, middle, on both sides of the usual chunk borders, last.
#ifdef LLN_QUICK_TESTS
constexpr std::int64_t kSpikes[] = {0, 63, 64, 199};
#else
constexpr std::int64_t kSpikes[] = {0, 31, 32, 63, 64, 65, 100, 127, 128, 199};
#endif

TEST(Adversarial, OneKeyTwoHundredLarger) {
  for (const std::string kind : kKinds) {
    for (const std::int64_t at : kSpikes) {
      expect_both_directions({.style = InputStyle::spike, .spike_at = at},
                             "f32:cpu:b1h2n200d8:" + kind);
    }
  }
  expect_both_directions({.style = InputStyle::spike, .spike_at = 63},
                         "bf16:cpu:b1h2n130d8:lln:causal");
}

TEST(Adversarial, ConstantRows) {
  for (const std::string kind : kKinds) {
    expect_both_directions({.style = InputStyle::constant_rows}, "f32:cpu:b1h2n150d16:" + kind);
  }
}

TEST(Adversarial, Denormals) {
  for (const std::string kind : kKinds) {
    expect_both_directions({.style = InputStyle::denormal}, "f32:cpu:b1h2n150d16:" + kind);
  }
}

// Outputs are means of values, so they are finite wherever the values are. Gradients hold products
// of values and may overflow by their nature.
TEST(Adversarial, ValuesNearTheLargestNumber) {
  for (const std::string type : {"f32", "bf16", "f16"}) {
    for (const std::string kind : kKinds) {
      Case c = make_case("forward:" + type + ":cpu:b1h2n150d16:" + kind);
      c.style = InputStyle::large_values;
      expect_all_kernels_pass(c);
    }
  }
}

TEST(Adversarial, RowsWithoutKeysAreZeroWithZeroGradients) {
  for (const std::string kind : kKinds) {
    Case c = make_case("forward:f32:cpu:b2h2n70d16:" + kind + ":masked");
    c.keys = KeyPattern::lengths;
    Inputs in = conformance::make_inputs(c, DType::f32);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    in.key_lengths = {0, 0};
    for (Tensor* t : {&in.k, &in.v}) {
      t->for_each([&](auto b, auto h, auto n, auto ch) { t->set(b, h, n, ch, nan); });
    }
    for (const Op op : {Op::forward, Op::backward}) {
      c.problem.op = op;
      c.parameter_gradients = true;
      const TensorSet outputs = run(c, in);
      for (const TensorSet::Entry& entry : outputs.entries()) {
        const auto zero = [](auto, auto, auto, auto) { return std::optional(0.0); };
        EXPECT_EQ(first_difference(entry.tensor, 0, zero), "")
            << entry.name << " of " << to_string(c);
      }
    }
  }
}

// An infinite key or query acts as a very large one: no NaN comes from it.
TEST(Adversarial, InfiniteKeysActAsTheirLimit) {
  for (const std::string kind : {"lln", "lln:causal"}) {
    const Case c = make_case("forward:f32:cpu:b1h1n70d8:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.k.set(0, 0, 40, 3, std::numeric_limits<double>::infinity());
    in.k.set(0, 0, 41, 2, -std::numeric_limits<double>::infinity());
    const TensorSet outputs = run(c, in);
    const TensorSet expected = run(c, in, {.kernel = "reference"});
    EXPECT_EQ(first_difference(outputs.at("o"), 1e-5, expected.at("o")), "") << to_string(c);
  }
}

// NaN reaches the rows and channels that see it, and no other: not as 0 * NaN in a product.
TEST(Adversarial, NanReachesOnlyRowsThatSeeIt) {
  for (const std::string problem :
       {"f32:cpu:b1h1n150d16:lln", "f32:cpu:b1h1n150d16:lln:causal",
        "f32:cpu:b1h1n150d16:lln+diag48:causal", "f32:cpu:b1h1n150d16:diag48:causal",
        "f32:cpu:b1h1n150d16:softmax:causal", "bf16:cpu:b1h1n150d16:lln",
        "bf16:cpu:b1h1n150d16:diag48"}) {
    const Case c = make_case("forward:" + problem);
    for (const bool in_values : {true, false}) {
      Inputs in = conformance::make_inputs(c, c.problem.dtype);
      (in_values ? in.v : in.k).set(0, 0, 20, 3, std::numeric_limits<double>::quiet_NaN());
      const TensorSet expected = run(c, in, {.kernel = "reference"});
      for (const std::string& kernel : kernels_for(c.problem)) {
        const TensorSet outputs = run(c, in, {.kernel = kernel});
        outputs.at("o").for_each([&](auto b, auto h, auto n, auto ch) {
          EXPECT_EQ(std::isnan(outputs.at("o").get(b, h, n, ch)),
                    std::isnan(expected.at("o").get(b, h, n, ch)))
              << to_string(c) << " on " << kernel << (in_values ? ": v" : ": k") << ", row " << n
              << ", channel " << ch;
        });
      }
    }
  }
}

// Sums of such values overflow, their averages do not.
TEST(Adversarial, ValuesNearTheLargestNumberOfSmallerTypes) {
  for (const std::string kind : {"lln", "diag48", "lln+diag48"}) {
    Case c = make_case("forward:bf16:cpu:b1h2n131d32:" + kind);
    c.style = conformance::InputStyle::large_values;
    const Inputs in = conformance::make_inputs(c, DType::bf16);
    const TensorSet expected = run(c, in, {.kernel = "reference"});
    for (const std::string& kernel : kernels_for(c.problem)) {
      const TensorSet outputs = run(c, in, {.kernel = kernel});
      EXPECT_EQ(first_difference(outputs.at("o"), 0x1p120, expected.at("o")), "")
          << to_string(c) << " on " << kernel;
    }
  }
}

// Weights of channels ask for whole vectors of every width, v may end with its last channel.
TEST(Adversarial, NothingIsReadBeyondTheValues) {
  constexpr std::int64_t kTokens = 64, kDim = 8;
  const Shape shape{1, 1, kTokens, kDim};
  const std::size_t bytes = kTokens * kDim * sizeof(float);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t room = (bytes + page - 1) / page * page;
  void* const memory =
      mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(mprotect(static_cast<std::byte*>(memory) + room, page, PROT_NONE), 0);
  auto* const v = reinterpret_cast<float*>(static_cast<std::byte*>(memory) + room - bytes);
  std::fill(v, v + kTokens * kDim, 1.0F);
  const std::vector<float> q(kTokens * kDim, 0.5F), mix(kDim, 0.25F);
  std::vector<float> o(kTokens * kDim);
  const float one = 1;
  for (const bool causal : {false, true}) {
    for (const std::string& kernel :
         kernels_for(parse_problem("forward:f32:cpu:b1h1n64d8:lln+diag64"))) {
      attention_forward({.q = view(q.data(), shape),
                         .k = view(q.data(), shape),
                         .v = view(static_cast<const float*>(v), shape),
                         .alpha = scalar(&one),
                         .beta = scalar(&one),
                         .mix = view(mix.data(), Shape{1, 1, 1, kDim})},
                        {.o = view(o.data(), shape)}, {.kind = Kind::lln_diag, .causal = causal},
                        {.kernel = kernel});
      EXPECT_NEAR(o.back(), 1, 1e-6) << kernel;
    }
  }
  munmap(memory, room + page);
}

// Weights that have not been divided by their sum yet must not make products overflow.
TEST(Adversarial, GradientsOfLargeValuesStayFinite) {
  for (const std::string kind : {"diag48", "diag48:causal", "lln+diag48", "lln+diag48:causal"}) {
    const Case c = make_case("backward:f32:cpu:b1h1n96d64:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.v.for_each([&](auto b, auto h, auto n, auto ch) {
      in.v.set(b, h, n, ch, 1e31 * in.v.get(b, h, n, ch));
    });
    for (Tensor* t : {&in.q, &in.k}) {
      t->for_each([&](auto b, auto h, auto n, auto ch) {
        t->set(b, h, n, ch, 1.41 + 0.05 * t->get(b, h, n, ch));
      });
    }
    for (const std::string& kernel : kernels_for(c.problem)) {
      const TensorSet gradients = run(c, in, {.kernel = kernel});
      for (const TensorSet::Entry& entry : gradients.entries()) {
        entry.tensor.for_each([&](auto b, auto h, auto n, auto ch) {
          EXPECT_TRUE(std::isfinite(entry.tensor.get(b, h, n, ch)))
              << to_string(c) << " on " << kernel << ": " << entry.name << " of token " << n;
        });
      }
    }
  }
}

// References are rounded where exponents are large; averages are averages all the same.
TEST(Adversarial, AveragesOfOneAreOneForLargeExponents) {
  for (const std::string problem :
       {"f32:cpu:b1h1n300d64:lln", "f32:cpu:b1h1n300d64:lln:causal", "bf16:cpu:b1h1n301d64:lln",
        "bf16:cpu:b1h1n301d64:diag48", "bf16:cpu:b1h1n301d64:diag1"}) {
    const Case c = make_case("forward:" + problem);
    Inputs in = conformance::make_inputs(c, c.problem.dtype);
    in.k.for_each([&](auto b, auto h, auto n, auto ch) {
      in.k.set(b, h, n, ch, 40 * in.k.get(b, h, n, ch));
      in.v.set(b, h, n, ch, 1);
    });
    for (const std::string& kernel : kernels_for(c.problem)) {
      const TensorSet outputs = run(c, in, {.kernel = kernel});
      const auto one = [](auto, auto, auto, auto) { return std::optional(1.0); };
      EXPECT_EQ(first_difference(outputs.at("o"), 2e-6, one), "") << to_string(c) << kernel;
    }
  }
}

}  // namespace
}  // namespace lln::test
