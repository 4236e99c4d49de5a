// Every case of the table on every CUDA kernel that takes it.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "conformance/random_cases.h"
#include "conformance/run.h"
#include "device_run.h"

namespace lln::test {
namespace {

using conformance::CaseResult;
using conformance::Verdict;

class CudaConformance : public OnDevice {};

// The table in slices, so that some of it can be asked for.
constexpr std::size_t kSlices = 32;
class CudaCases : public OnDevice, public testing::WithParamInterface<std::size_t> {};

// Every `step`th case of a list.
void expect_to_pass(const std::vector<Case>& list, std::size_t first, std::size_t step) {
  ThreadPool pool;
  std::map<std::string, double> worst;
  std::map<std::string, int> passed;
  const std::vector<Case> all = conformance::on_device(list, kDevice);
  for (std::size_t i = first; i < all.size(); i += step) {
    const Case& c = all[i];
    const std::vector<std::string> kernels = kernel_names(c.problem.op, DeviceKind::cuda);
    bool taken = false;
    for (const CaseResult& result : conformance::run_case(c, kernels, &pool)) {
      EXPECT_NE(result.verdict, Verdict::failed) << to_string(c) << " on " << result.kernel << '\n'
                                                 << result.text;
      if (result.verdict == Verdict::skipped) continue;
      taken = true;
      ++passed[result.kernel];
      worst[result.kernel] = std::max(worst[result.kernel], result.worst);
    }
    // Softmax has better kernels elsewhere; everything else is taken by some kernel.
    EXPECT_EQ(taken, c.problem.kind != Kind::softmax) << to_string(c);
  }
  for (const auto& [kernel, ratio] : worst) {
    fmt::print("{:<24} {:4} cases, worst error / tolerance {:.3f}\n", kernel, passed[kernel],
               ratio);
  }
}

TEST_P(CudaCases, OnEveryKernel) { expect_to_pass(conformance::cases(), GetParam(), kSlices); }
TEST_P(CudaCases, AtRandom) { expect_to_pass(conformance::random_cases(32, GetParam()), 0, 1); }
INSTANTIATE_TEST_SUITE_P(Table, CudaCases, testing::Range(std::size_t{0}, kSlices));

// A kernel that no case reaches is a kernel that nothing tests.
TEST_F(CudaConformance, EveryKernelTakesSomeCase) {
  const std::vector<Case> all = conformance::on_device(conformance::cases(), kDevice);
  for (const Op op : {Op::forward, Op::backward, Op::append}) {
    for (const std::string& kernel : kernel_names(op, DeviceKind::cuda)) {
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

// The plain kernels would give the same results, in many times the time.
TEST_F(CudaConformance, CausalDiagRunsOnTensorCores) {
  for (const std::string op : {"forward", "backward"}) {
    const auto chosen = [&](const std::string& problem) {
      return explain(parse_problem(op + ":" + problem)).chosen;
    };
    for (const char* type : {"bf16", "f16"}) {
      for (const char* shape : {"n4096d64", "h4k2n130d128", "b3n70d24v40"}) {
        for (const char* flags : {"diag64:causal", "diag100:causal", "diag5000:causal:masked"}) {
          const std::string problem = fmt::format("{}:cuda:{}:{}", type, shape, flags);
          EXPECT_EQ(chosen(problem), "cuda-tiled-diag") << op << ' ' << problem;
        }
      }
      EXPECT_EQ(chosen(fmt::format("{}:cuda:n90d64:diag64:causal:packed=3", type)),
                "cuda-tiled-diag");
      EXPECT_EQ(chosen(fmt::format("{}:cuda:n90d64:lln+diag100:causal", type)), "cuda-plain");
    }
  }
}

}  // namespace
}  // namespace lln::test
