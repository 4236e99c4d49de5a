// Every case of the table on every CUDA kernel that takes it.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

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
    }
  }
}

// Above 128 channels: Diag alone, and beside LLN where there is no mask inside sequences.
TEST_F(CudaConformance, WideDiagRunsOnTensorCores) {
  for (const std::string op : {"forward", "backward"}) {
    for (const char* type : {"bf16", "f16"}) {
      for (const char* form :
           {"n4096d256:diag64", "h4k2n130d136v200:diag100:causal", "b3n70d40v256:diag5000:masked",
            "n4096d256:lln+diag64", "h4k2n130d136v200:lln+diag100", "b3n70d144:lln+diag5000:masked",
            "n90d256:lln+diag64:packed=3"}) {
        const std::string problem = fmt::format("{}:{}:cuda:{}", op, type, form);
        EXPECT_EQ(explain(parse_problem(problem)).chosen, "cuda-tiled-diag") << problem;
      }
    }
  }
}

TEST_F(CudaConformance, WideCausalRunsOnTensorCores) {
  for (const std::string op : {"forward", "backward"}) {
    for (const char* form : {"n4096d256:lln", "h4k2n130d136v200:lln", "b3n70d40v256:lln",
                             "n4096d256:lln+diag64", "h4k2n130d136v200:lln+diag100"}) {
      const auto chosen = [&](const std::string& type, const std::string& flags) {
        return explain(parse_problem(fmt::format("{}:{}:cuda:{}:causal{}", op, type, form, flags)))
            .chosen;
      };
      EXPECT_EQ(chosen("bf16", ""), "cuda-tiled-wide-causal") << op << ' ' << form;
      EXPECT_EQ(chosen("bf16", ":masked"), "cuda-tiled-wide-causal") << op << ' ' << form;
      EXPECT_EQ(chosen("f16", ""), "cuda-plain") << op << ' ' << form;
      EXPECT_EQ(chosen("f32", ""), "cuda-plain") << op << ' ' << form;
    }
    EXPECT_EQ(explain(parse_problem(op + ":bf16:cuda:n90d256:lln:causal:packed=3")).chosen,
              "cuda-tiled-wide-causal");
  }
}

// The plain kernels do heads again that are out of reach, and would hide results that are not
// numbers: of ordinary heads none has the plain kernels' bits.
TEST_F(CudaConformance, WideCausalHeadsAreInReach) {
  for (const std::string op : {"forward", "backward"}) {
    for (const std::string form :
         {"b1h2k1n130d256:lln", "b1h1n300d136v8:lln", "b2h1n70d144:lln+diag16"}) {
      const Case c = make_case(op + ":bf16:cpu:" + form + ":causal");
      const Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const TensorSet found = run_on_device(c, in, {.kernel = "cuda-tiled-wide-causal"});
      const TensorSet plain = run_on_device(c, in, {.kernel = "cuda-plain"});
      for (const TensorSet::Entry& entry : found.entries()) {
        std::map<std::pair<std::int64_t, std::int64_t>, bool> differs;
        entry.tensor.for_each([&](auto b, auto h, auto n, auto ch) {
          differs[{b, h}] |= entry.tensor.get(b, h, n, ch) != plain.at(entry.name).get(b, h, n, ch);
        });
        for (const auto& [head, different] : differs) {
          EXPECT_TRUE(different) << entry.name << " of batch " << head.first << ", head "
                                 << head.second << ": " << to_string(c);
        }
      }
    }
  }
}

// In f16 with every block, in bf16 with those that its walks hold and in two calls with others.
TEST_F(CudaConformance, CausalLlnDiagRunsOnTensorCores) {
  for (const std::string op : {"forward", "backward"}) {
    const auto chosen = [&](const std::string& problem) {
      return explain(parse_problem(op + ":" + problem)).chosen;
    };
    for (const char* shape : {"n4096d64", "h4k2n130d128", "b3n70d24v40"}) {
      for (const char* flags : {"diag64:causal", "diag100:causal", "diag5000:causal:masked"}) {
        const std::string problem = fmt::format("f16:cuda:{}:lln+{}", shape, flags);
        EXPECT_EQ(chosen(problem), "cuda-tiled-f16-causal") << op << ' ' << problem;
      }
    }
    EXPECT_EQ(chosen("f16:cuda:n90d64:lln+diag64:causal:packed=3"), "cuda-tiled-f16-causal");
    EXPECT_EQ(chosen("bf16:cuda:n90d64:lln+diag100:causal"), "cuda-parts");
    EXPECT_TRUE(chosen("bf16:cuda:n90d64:lln+diag64:causal").ends_with("-causal"));
  }
}

// The LLN part of f16 is stored before Diag is added to it: where the sum is in reach of f16, the
// part need not be. The tensor-core kernels leave such heads to the plain ones.
TEST_F(CudaConformance, PartsOutOfReachOfF16) {
  Case c = make_case("forward:f16:cpu:b1h3n130d32:lln+diag64:causal");
  c.weights = conformance::WeightForm::head;
  c.two_weights = true;
  Inputs in = conformance::make_inputs(c, c.problem.dtype);
  for (const std::int64_t head : {0, 1, 2}) {
    in.lln_weight.set(0, head, 0, 0, 4);
    in.diag_weight.set(0, head, 0, 0, -3.5);
  }
  in.v.for_each([&](auto b, auto h, auto n, auto ch) {
    if (h == 1) in.v.set(b, h, n, ch, 20000 + 64 * static_cast<double>(n % 7));
  });
  const TensorSet found = run_on_device(c, in, {.kernel = "cuda-tiled-f16-causal"});
  const TensorSet plain = run_on_device(c, in, {.kernel = "cuda-plain"});
  EXPECT_EQ(first_difference(found.at("o"), 0,
                             [&](auto b, auto h, auto n, auto ch) -> std::optional<double> {
                               if (h != 1) return std::nullopt;
                               return plain.at("o").get(b, h, n, ch);
                             }),
            "");
  EXPECT_TRUE(std::isfinite(plain.at("o").get(0, 1, 100, 3)));
  EXPECT_EQ(first_difference(found.at("o"), 0.05, plain.at("o")), "");
}

// Above 128 channels the LLN part is stored without its weight, as an average of values, and is in
// reach wherever they are. Its rounding is 4 times half a unit of 16.
TEST_F(CudaConformance, WidePartsOutOfReachOfF16) {
  Case c = make_case("forward:f16:cpu:b1h2n130d136:lln+diag64");
  c.weights = conformance::WeightForm::head;
  c.two_weights = true;
  Inputs in = conformance::make_inputs(c, c.problem.dtype);
  for (const std::int64_t head : {0, 1}) {
    in.lln_weight.set(0, head, 0, 0, 4);
    in.diag_weight.set(0, head, 0, 0, -3.5);
  }
  in.v.for_each([&](auto b, auto h, auto n, auto ch) {
    in.v.set(b, h, n, ch, 20000 + 64 * static_cast<double>(n % 7));
  });
  const TensorSet found = run_on_device(c, in, {.kernel = "cuda-tiled-diag"});
  const TensorSet plain = run_on_device(c, in, {.kernel = "cuda-plain"});
  EXPECT_TRUE(std::isfinite(plain.at("o").get(0, 1, 100, 3)));
  EXPECT_EQ(first_difference(found.at("o"), 100, plain.at("o")), "");
}

// Below the normal numbers of f16 both roundings are as large as the sum's own: a unit, not half.
// Gradients are sums of products with dS, which is rounded to such a number, too.
TEST_F(CudaConformance, SubnormalSumsOfF16) {
  constexpr double kUnit = 0x1p-24;
  for (const std::string op : {"forward", "backward"}) {
    const Case c = make_case(op + ":f16:cpu:b1h2n130d32:lln+diag64:causal");
    Inputs in = conformance::make_inputs(c, c.problem.dtype);
    // All results are linear in it.
    conformance::Tensor& small = op == "forward" ? in.v : in.g;
    small.for_each([&](auto b, auto h, auto n, auto ch) {
      small.set(b, h, n, ch, 0x1p-18 * small.get(b, h, n, ch));
    });
    const TensorSet found = run_on_device(c, in, {.kernel = "cuda-tiled-f16-causal"});
    const TensorSet plain = run_on_device(c, in, {.kernel = "cuda-plain"});
    for (const TensorSet::Entry& entry : found.entries()) {
      const double units = op == "forward" ? 1 : 4;
      EXPECT_EQ(first_difference(entry.tensor, units * kUnit, plain.at(entry.name)), "")
          << entry.name;
      double largest = 0;
      entry.tensor.for_each([&](auto b, auto h, auto n, auto ch) {
        largest = std::max(largest, std::abs(entry.tensor.get(b, h, n, ch)));
      });
      EXPECT_GT(largest, 8 * kUnit) << entry.name;
      EXPECT_LT(largest, 0x1p-14) << entry.name;
    }
  }
}

}  // namespace
}  // namespace lln::test
