// What `lln bench` computes with: percentiles of known numbers, problem sets, and a measurement
// whose parts must agree with each other.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "bench/machine.h"
#include "bench/machine_loops.h"
#include "bench/measure.h"
#include "bench/percentile.h"
#include "bench/problem_set.h"
#include "lln/error.h"

namespace lln::bench {
namespace {

TEST(Percentile, OfKnownNumbers) {
  EXPECT_EQ(percentile({7}, 0), 7);
  EXPECT_EQ(percentile({7}, 90), 7);
  EXPECT_EQ(percentile({3, 1, 2}, 50), 2);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 50), 2.5);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 0), 1);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 100), 4);
  const std::vector<double> eleven = {10, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5};
  EXPECT_DOUBLE_EQ(percentile(eleven, 10), 1);
  EXPECT_DOUBLE_EQ(percentile(eleven, 90), 9);
  EXPECT_DOUBLE_EQ(percentile(eleven, 25), 2.5);
}

TEST(Machine, ChainsConvergeToTheirFixedPoint) {
  // x -> 0.75 x + 0.25 in 12 chains of flops_per_round() / (2 * 12 * 8) lanes.
  const auto lanes = static_cast<float>(flops_per_round()) / (2 * 12 * 8);
  EXPECT_GE(lanes, 1);
  EXPECT_NEAR(fma_chains(1000), 12 * lanes, 1e-3F * lanes);
}

TEST(Machine, CopyCopies) {
  alignas(64) float from[128], to[128] = {};
  for (int i = 0; i < 128; ++i) from[i] = static_cast<float>(i);
  copy_past_caches(from, to, 64);
  for (int i = 0; i < 128; ++i) EXPECT_EQ(to[i], i < 64 ? from[i] : 0) << i;
}

TEST(Machine, LimitsArePositive) {
  ThreadPool threads(2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    EXPECT_GT(product_peak(threads, 1e-3, dtype), 1e6);
  }
  EXPECT_GT(copy_bandwidth(threads, 0), 1e6);
  EXPECT_FALSE(cpu_name().empty());
}

TEST(Measure, PartsAgree) {
  ThreadPool threads(2);
  for (const char* text :
       {"forward:f32:cpu:h2n64d16:lln", "train:bf16:cpu:h4k2n64d8v4:lln+diag16:causal",
        "backward:f16:cpu:b2h1n32d8:lln:masked:feature=elu", "train:f32:cpu:n60d8:diag16:packed=3",
        "forward:f32:cpu:h2n16m48d8:lln", "backward:f32:cpu:h1n32d8:softmax",
        "train:f64:cpu:h1n16d4:lln", "train:f32:cpu:h4k2n64d8v4:lln:causal:state",
        "train:f32:cpu:b2h2n70d8:lln+diag16:state:block_origins"}) {
    const Problem problem = parse_problem(text);
    const Result r = measure(problem, threads, 0.005, 1e10);
    EXPECT_EQ(r.problem, to_string(problem));
    EXPECT_EQ(r.kernel, explain(problem).chosen);
    EXPECT_EQ(r.threads, 2);
    EXPECT_GT(r.p10_ms, 0);
    EXPECT_LE(r.p10_ms, r.median_ms);
    EXPECT_LE(r.median_ms, r.p90_ms);
    EXPECT_DOUBLE_EQ(r.floor_ms * r.ratio, r.median_ms);
    EXPECT_EQ(r.cost.flops, minimal_cost(problem).flops);
    EXPECT_EQ(r.workspace_bytes, workspace_bytes(problem, {.parallel = &threads}));
    EXPECT_GE(r.peaks.size(), 2U);  // one before and one behind each batch
  }
}

TEST(Measure, BandwidthIsTheFloorWhereItIsTheLimit) {
  ThreadPool threads(1);
  const Problem problem = parse_problem("forward:f32:cpu:n64d16:lln");
  const Result r = measure(problem, threads, 0.002, 1.0);  // 1 byte per second
  EXPECT_NEAR(r.floor_ms, 1e3 * minimal_cost(problem).bytes, 1e-6 * r.floor_ms);
}

TEST(Measure, RefusesWhatCannotBeMeasured) {
  ThreadPool threads(1);
  const auto refusal = [&](const char* text) -> std::string {
    try {
      check_measurable(parse_problem(text), threads);
    } catch (const Error& e) {
      return e.what();
    }
    return {};
  };
  EXPECT_NE(refusal("append:f32:cpu:n8d8:softmax").find("decoding is of lln"), std::string::npos);
  EXPECT_EQ(refusal("append:f32:cpu:n8d8:lln"), "");
  EXPECT_EQ(refusal("step:f32:cpu:n1d8:lln"), "");
  EXPECT_NE(refusal("forward:f32:cuda:900:n8d8:lln").find("not on the CPU"), std::string::npos);
  EXPECT_NE(refusal("forward:f32:cpu:n0d8:lln").find("nothing to measure"), std::string::npos);
  EXPECT_EQ(refusal("forward:f32:cpu:n8d8:lln"), "");
}

class ProblemSet : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    std::ofstream(path_, std::ios::binary) << text;
    return path_;
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string path_ = testing::TempDir() + "lln_problem_set.txt";
};

TEST_F(ProblemSet, HasOneProblemPerLine) {
  const auto problems = read_problem_set(
      write("# comment\n\n  forward:f32:cpu:n8d8:lln  # short\r\ntrain:f32:cpu:n8d8:softmax"));
  ASSERT_EQ(problems.size(), 2U);
  EXPECT_EQ(to_string(problems[0]), "forward:f32:cpu:b1h1n8d8:lln");
  EXPECT_EQ(to_string(problems[1]), "train:f32:cpu:b1h1n8d8:softmax");
}

TEST_F(ProblemSet, NamesTheLineThatIsWrong) {
  try {
    read_problem_set(write("forward:f32:cpu:n8d8:lln\nforward:f32\n"));
    FAIL() << "took a line that is no problem";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string(e.what()).rfind(path_ + ":2: ", 0), 0U) << e.what();
  }
  EXPECT_THROW(read_problem_set(write("# nothing\n")), Error);
  EXPECT_THROW(read_problem_set(path_ + ".missing"), Error);
}

TEST(MinimalCost, PackedSoftmaxCountsPairsInsideSequences) {
  const auto flops = [](const char* text) { return minimal_cost(parse_problem(text)).flops; };
  EXPECT_DOUBLE_EQ(flops("forward:f32:cpu:n60d8:softmax:packed=3"),
                   3 * flops("forward:f32:cpu:n20d8:softmax"));
}

}  // namespace
}  // namespace lln::bench
