// dim and dim_v that are no multiples of 8, on tensor cores: which kernel takes them, and that
// every family that may be behind it knows of the padding. The case table has the results.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <set>
#include <vector>

#include "api/validate.h"
#include "conformance/run.h"
#include "device_run.h"
#include "lln/error.h"

namespace lln::test {
namespace {

class CudaPadded : public OnDevice {};

TEST_F(CudaPadded, RunsOnTensorCores) {
  const auto chosen = [](const std::string& problem) {
    return explain(parse_problem(problem)).chosen;
  };
  for (const std::string op : kDeviceOps) {
    for (const std::string type : kDeviceTypes) {
      for (const std::string kind : kDeviceKinds) {
        for (const char* dims : {"d60", "d100", "d7", "d36v64", "d64v50", "d128v1"}) {
          const std::string problem = fmt::format("{}:{}:cuda:n90{}:{}", op, type, dims, kind);
          EXPECT_EQ(chosen(problem), "cuda-padded") << problem;
        }
        EXPECT_NE(chosen(op + ":" + type + ":cuda:n90d64:" + kind), "cuda-padded");
      }
      EXPECT_EQ(chosen(op + ":" + type + ":cuda:n90d60:lln:feature=elu"), "cuda-plain");
      for (const std::string kind : {"lln", "diag64", "lln+diag64"}) {
        EXPECT_EQ(chosen(op + ":" + type + ":cuda:n90d132:" + kind),
                  type == "f32" ? "cuda-plain" : "cuda-padded");
      }
      EXPECT_EQ(chosen(op + ":" + type + ":cuda:n90d132:lln:causal"),
                type == "bf16" ? "cuda-padded" : "cuda-plain");
    }
  }
}

// Why not is said of the problem that the others would get.
TEST_F(CudaPadded, RefusesWithTheOthersReasons) {
  const auto refusal = [](const std::string& problem) -> std::string {
    for (const auto& candidate : explain(parse_problem(problem)).candidates) {
      if (candidate.kernel == "cuda-padded") return candidate.refusal;
    }
    return "there is no such kernel";
  };
  EXPECT_EQ(refusal("forward:bf16:cuda:n90d64:lln"),
            "is for dim or dim_v that is no multiple of 8");
  const std::string why = refusal("forward:f32:cuda:n90d132v60:lln");
  EXPECT_NE(why.find("forward:f32:cuda:b1h1n90d136v64:lln"), std::string::npos) << why;
  EXPECT_NE(why.find("cuda-tiled-f32 takes dim and dim_v up to 128"), std::string::npos) << why;
}

// The rows of a tensor with zeros behind their channels; of a state, behind its rows, too.
Tensor widened(const Tensor& from, std::int64_t rows, std::int64_t channels) {
  Tensor to(from.dtype(), {from.shape()[0], from.shape()[1], rows, channels});
  to.for_each([&](auto b, auto h, auto n, auto c) { to.set(b, h, n, c, 0); });
  from.for_each([&](auto b, auto h, auto n, auto c) { to.set(b, h, n, c, from.get(b, h, n, c)); });
  return to;
}

// The call of a case on a kernel that is told of so many channels of padding.
void call_with_padding(const Case& c, const CaseViews& views, const Kernel& kernel,
                       std::int64_t padding) {
  CheckedCall checked = c.problem.op == Op::forward
                            ? check_forward(views.in, views.out, conformance::options(c))
                            : check_backward(views.in, views.grads, conformance::options(c));
  Call& call = checked.call;
  call.padding = padding;
  const DeviceMemory workspace(kDevice, kernel.bytes_of_call(call, 1));
  call.workspace = workspace.span().data();
  kernel.run(call);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(workspace.guards_untouched());
}

// The first rows and channels of a tensor that has more.
Tensor narrowed(const Tensor& from, const Shape& shape) {
  Tensor to(from.dtype(), shape);
  to.for_each([&](auto b, auto h, auto n, auto c) { to.set(b, h, n, c, from.get(b, h, n, c)); });
  return to;
}

void expect_right(const Case& c, const TensorSet& found, const conformance::Truth& truth,
                  const std::string& kernel) {
  using conformance::Operands;
  for (const TensorSet::Entry& entry : truth.reference.entries()) {
    const auto comparison = conformance::compare(
        entry.name, narrowed(found.at(entry.name), entry.tensor.shape()), entry.tensor,
        truth.plain.values.at(entry.name), truth.plain.sizes.at(entry.name), truth.plain.exponent,
        {c.problem.dtype == DType::f32 ? Operands::f32 : Operands::narrow});
    EXPECT_TRUE(comparison.passed())
        << to_string(c) << " on " << kernel << ": " << to_string(comparison);
  }
}

// A case on every family that takes it with padding. Queries and keys are so far below 0 that
// channels of padding would have nearly all of the weight.
void expect_every_family(Case c, std::set<std::string>& seen) {
  constexpr std::int64_t kPadding = 5;
  if (c.problem.has_lln()) c.style = conformance::InputStyle::far_below;
  ThreadPool pool;
  const conformance::Truth truth = conformance::make_truth(c, &pool);
  const Inputs in = conformance::make_inputs(c, c.problem.dtype);
  Case wide = c;
  wide.problem.dim += kPadding;
  Inputs with_padding = in;
  with_padding.q = widened(in.q, c.problem.tokens, wide.problem.dim);
  with_padding.k = widened(in.k, c.problem.tokens_k, wide.problem.dim);
  for (const Kernel& kernel : kernels(c.problem.op)) {
    if (kernel.name == "cuda-padded") break;
    if (!kernel.refusal(on_device(wide.problem)).empty()) continue;
    seen.insert(kernel.name);
    TensorSet outputs = conformance::make_outputs(wide, with_padding, c.problem.dtype);
    DeviceData data(kDevice, with_padding, outputs);
    call_with_padding(wide, data.views(), kernel, kPadding);
    data.fetch();
    expect_right(c, outputs, truth, kernel.name);
  }
}

TEST_F(CudaPadded, EveryFamilyKnowsOfIt) {
  std::set<std::string> seen;
  for (const std::string op : kDeviceOps) {
    for (const std::string type : kDeviceTypes) {
      for (const std::string kind : kDeviceKinds) {
        for (const char* shape : {"h2k1n90d59v64", "h1n90d123v32", "h2n90d19v24"}) {
          Case c = make_case(op + ":" + type + ":cpu:b1" + shape + ":" + kind);
          expect_every_family(c, seen);
          c.weights = conformance::WeightForm::channel;
          if (c.problem.kind == Kind::lln_diag && c.problem.dim == 59) expect_every_family(c, seen);
        }
      }
    }
    for (const std::string type : {"bf16", "f16"}) {
      for (const std::string kind : {"lln", "diag32", "lln+diag32"}) {
        expect_every_family(make_case(op + ":" + type + ":cpu:b1h2k1n70d251v40:" + kind), seen);
      }
    }
    for (const std::string kind : {"lln", "lln+diag32"}) {
      expect_every_family(make_case(op + ":bf16:cpu:b1h2k1n300d251v40:" + kind + ":causal"), seen);
    }
    // Several pieces of a walk.
    expect_every_family(make_case(op + ":bf16:cpu:b1h1n4200d11v8:lln:causal"), seen);
    expect_every_family(make_case(op + ":f16:cpu:b1h1n4200d11v8:lln:causal"), seen);
  }
  const bool has_sm90 = seen.contains("cuda-sm90");
  for (const Op op : {Op::forward, Op::backward}) {
    for (const Kernel& kernel : kernels(op)) {
      if (kernel.name == "cuda-padded") break;
      if (!has_sm90 && kernel.name.starts_with("cuda-sm90")) continue;
      EXPECT_TRUE(seen.contains(kernel.name)) << kernel.name;
    }
  }
}

// Sequences that count as empty leave zeros, whatever the scratch memory held.
TEST_F(CudaPadded, WrongCumulativeLengths) {
  for (const std::string op : kDeviceOps) {
    for (const std::string kind : {"lln", "lln:causal", "lln+diag32"}) {
      Case c = make_case(op + ":bf16:cpu:b1h2n90d60v50:" + kind + ":packed=3");
      c.lengths = {50, 20, 20};
      Inputs in = conformance::make_inputs(c, c.problem.dtype);
      in.cu_seqlens_q = in.cu_seqlens_k = {0, 50, 20, 90};
      DeviceMemory scratch(kDevice, workspace_bytes(on_device(c.problem)));
      scratch.write(std::vector<std::byte>(scratch.span().size(), std::byte{0x3F}));
      const TensorSet found = run_on_device(c, in, {.workspace = scratch.span()});
      for (const TensorSet::Entry& entry : found.entries()) {
        EXPECT_EQ(
            first_difference(entry.tensor, 0,
                             [](auto, auto, auto, auto) -> std::optional<double> { return 0; }),
            "")
            << entry.name << " of " << to_string(c);
      }
      const Case good = make_case("forward:bf16:cpu:b1h1n70d60:lln");
      EXPECT_THROW(run_on_device(good), Error) << "what the device has found is reported";
    }
  }
}

// Gradients of alpha and beta of LLN in f16 go to the plain kernels inside the same call, with
// their bits and their scratch memory.
TEST_F(CudaPadded, GradientsOfScales) {
  Case c = make_case("backward:f16:cpu:b2h2n90d60:lln");
  c.parameter_gradients = true;
  const Inputs in = conformance::make_inputs(c, c.problem.dtype);
  expect_same_bits(run_on_device(c, in), run_on_device(c, in, {.kernel = "cuda-plain"}),
                   to_string(c));
}

}  // namespace
}  // namespace lln::test
