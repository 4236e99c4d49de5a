// Every case of the table on every CPU kernel of this build that takes it, for all vector targets
// of this machine; and the reference against a plain evaluation that shares no code with it.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "attention_run.h"
#include "conformance/random_cases.h"
#include "conformance/run.h"

namespace lln::conformance {
namespace {

std::vector<Case> table() {
#ifdef LLN_QUICK_TESTS
  return quick_cases();
#else
  return on_device(cases(), {});
#endif
}

void expect_to_pass(const std::vector<Case>& all) {
  ThreadPool pool;
  std::map<std::string, double> worst;
  std::map<std::string, int> passed;
  for (const Case& c : all) {
    for (const CaseResult& result :
         run_case(c, kernel_names(c.problem.op, DeviceKind::cpu), &pool)) {
      EXPECT_NE(result.verdict, Verdict::failed) << to_string(c) << " on " << result.kernel << '\n'
                                                 << result.text;
      if (result.verdict == Verdict::skipped) continue;
      ++passed[result.kernel];
      worst[result.kernel] = std::max(worst[result.kernel], result.worst);
    }
  }
  for (const auto& [kernel, ratio] : worst) {
    fmt::print("{:<20} {:4} cases, worst error / tolerance {:.3f}\n", kernel, passed[kernel],
               ratio);
  }
  EXPECT_GT(passed["reference"], 0);
}

TEST(Conformance, EveryCaseOnEveryKernel) { expect_to_pass(table()); }

TEST(Conformance, RandomCasesOnEveryKernel) {
#ifdef LLN_QUICK_TESTS
  constexpr std::int64_t kCount = 20;
#else
  constexpr std::int64_t kCount = 150;
#endif
  expect_to_pass(random_cases(kCount, 0));
}

// What stands in a failure is enough to find the case again, and the cases are not all of a sort.
TEST(Conformance, RandomCasesAreThoseOfTheirSeed) {
  const auto texts = [](std::int64_t count, std::uint64_t seed) {
    std::vector<std::string> found;
    for (const Case& c : random_cases(count, seed)) found.push_back(to_string(c));
    return found;
  };
  const std::vector<std::string> many = texts(200, 5), few = texts(20, 5);
  EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin()));
  EXPECT_NE(texts(20, 6), few);
  for (const char* part : {"forward:", "backward:", "f32", "bf16", "f16", ":diag", "lln+diag",
                           "softmax", ":causal", ":masked", ":packed", ":state", ":feature", "gaps",
                           "weights=", "saved", "_gradients", "large_keys", "spike"}) {
    EXPECT_TRUE(std::ranges::any_of(many, [&](const std::string& text) {
      return text.find(part) != std::string::npos;
    })) << part;
  }
}

// A kernel that no case reaches is a kernel that nothing tests.
TEST(Conformance, EveryKernelTakesSomeCase) {
  for (const Op op : {Op::forward, Op::backward, Op::append}) {
    for (const std::string& kernel : test::kernels_here(op)) {
      const std::vector<Case> all = table();
      const bool taken = std::any_of(all.begin(), all.end(), [&](const Case& c) {
        if (c.problem.op != op) return false;
        for (const auto& candidate : explain(c.problem).candidates) {
          if (candidate.kernel == kernel) return candidate.refusal.empty();
        }
        return false;
      });
      EXPECT_TRUE(taken) << kernel << " refuses every " << to_string(op) << " case";
    }
  }
}

// 3 is a number of bf16, and so are its neighbours at a distance of 2^-6.
TEST(Conformance, TensorCoresMayGiveTheNeighbour) {
  const auto one = [](double value, DType dtype) {
    Tensor x(dtype, {1, 1, 1, 1});
    x.set(0, 0, 0, 0, value);
    return x;
  };
  const Tensor right = one(3, DType::f64), none = one(0, DType::f64);
  const auto passes = [&](double value, Operands operands) {
    return compare("x", one(value, DType::bf16), right, right, none, 0, {operands}).passed();
  };
  EXPECT_TRUE(passes(3, Operands::f32));
  EXPECT_FALSE(passes(3 + 0x1p-6, Operands::f32));
  EXPECT_TRUE(passes(3 + 0x1p-6, Operands::narrow));
  EXPECT_TRUE(passes(3 - 0x1p-6, Operands::narrow));
  EXPECT_FALSE(passes(3 + 0x1p-5, Operands::narrow));
}

// A sum of 100 numbers of size 1 each, rounded by 1/256: 2 / 256 sqrt(100) at most.
TEST(Conformance, RoundedTermsMayGiveAChance) {
  const auto one = [](double value) {
    Tensor x(DType::f32, {1, 1, 1, 1});
    x.set(0, 0, 0, 0, value);
    return x;
  };
  const auto passes = [&](double value, double terms) {
    return compare("x", one(value), one(3), one(3), one(100), 0, {Operands::f32, terms, 0x1p-8})
        .passed();
  };
  EXPECT_FALSE(passes(3 + 0x1p-4, 0));
  EXPECT_TRUE(passes(3 + 0x1p-4, 100));
  EXPECT_FALSE(passes(3 + 0x1.5p-4, 100));
}

// The two evaluations take different ways (log-space pairs, and the factorised form in f32), so an
// error of the formula in either shows here and not only in the kernels.
TEST(Conformance, ReferenceAgreesWithPlainEvaluation) {
  ThreadPool pool;
  for (const Case& c : quick_cases()) {
    if (c.problem.dtype != DType::f32 && c.problem.dtype != DType::f64) continue;
    const Truth truth = make_truth(c, &pool);
    for (const TensorSet::Entry& entry : truth.reference.entries()) {
      const Comparison comparison = compare(entry.name, truth.plain.values.at(entry.name),
                                            entry.tensor, truth.plain.values.at(entry.name),
                                            truth.plain.sizes.at(entry.name), truth.plain.exponent);
      // The least of f32 besides, where values are denormal.
      constexpr double kLeast = std::numeric_limits<float>::denorm_min();
      EXPECT_LE(comparison.error, 4 * comparison.rounding + 16 * kLeast) << to_string(c) << '\n'
                                                                         << to_string(comparison);
    }
  }
}

}  // namespace
}  // namespace lln::conformance
