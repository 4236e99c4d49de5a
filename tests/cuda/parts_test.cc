// Calls that several kernels share: LLN+Diag as two calls, and gradients of alpha, beta and the
// weights beside kernels that give those of q, k and v. The case table has the results; here is
// that the plain kernels are not what makes them.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "conformance/run.h"
#include "device_run.h"
#include "lln/error.h"

namespace lln::test {
namespace {

using conformance::WeightForm;

class CudaParts : public OnDevice {};

std::string chosen(const std::string& problem) { return explain(parse_problem(problem)).chosen; }

TEST_F(CudaParts, TakesWhatNoFamilyTakesWhole) {
  for (const std::string op : kDeviceOps) {
    for (const char* problem :
         {"bf16:cuda:n90d64:lln+diag100:causal", "bf16:cuda:h4k2n130d128:lln+diag48:causal",
          "bf16:cuda:b3n70d24v40:lln+diag5000:causal:masked", "bf16:cuda:n90d60:lln+diag128:causal",
          "bf16:cuda:n90d64:lln+diag128:causal:packed=3", "f32:cuda:n90d64:lln+diag100",
          "f32:cuda:n90d64:lln+diag100:causal"}) {
      EXPECT_EQ(chosen(op + ":" + problem), "cuda-parts") << op << ' ' << problem;
    }
    for (const char* problem :
         {"f32:cuda:n90d136:lln+diag64", "f32:cuda:n90d64:diag100",
          "f16:cuda:n90d136:lln+diag64:causal", "bf16:cuda:n90d64:lln+diag64:feature=elu"}) {
      EXPECT_EQ(chosen(op + ":" + problem), "cuda-plain") << op << ' ' << problem;
    }
  }
}

TEST_F(CudaParts, SaysWhyNot) {
  const auto refusal = [](const std::string& problem) -> std::string {
    for (const auto& candidate : explain(parse_problem(problem)).candidates) {
      if (candidate.kernel == "cuda-parts") return candidate.refusal;
    }
    return "there is no such kernel";
  };
  EXPECT_EQ(refusal("forward:bf16:cuda:n90d64:lln"), "takes kind lln+diag alone");
  EXPECT_EQ(refusal("forward:f32:cuda:n90d136:lln+diag64"),
            "forward:f32:cuda:b1h1n90d136:lln is for cuda-plain");
}

// Gradients of parameters, asked for or not, leave every kernel what it is: those of q, k and v
// have the same bits.
TEST_F(CudaParts, ParametersKeepTheKernel) {
  for (const std::string type : kDeviceTypes) {
    for (const std::string kind :
         {"lln", "lln:causal", "lln+diag32", "lln+diag32:causal", "lln+diag100:causal"}) {
      for (const char* shape : {"b2h4k2n90d64", "b1h2n70d36v24"}) {
        // q dq of a small alpha is out of reach of f16, and LLN alone has no weights.
        const bool scales = type != "f16" || kind.starts_with("lln+diag");
        if (!scales) continue;
        Case c = make_case("backward:" + type + ":cpu:" + shape + ":" + kind);
        c.weights = WeightForm::head;
        const Inputs in = conformance::make_inputs(c, c.problem.dtype);
        const TensorSet alone = run_on_device(c, in);
        c.parameter_gradients = true;
        const TensorSet with = run_on_device(c, in);
        for (const char* name : {"dq", "dk", "dv"}) {
          EXPECT_EQ(first_difference(with.at(name), 0, alone.at(name)), "")
              << name << " of " << to_string(c);
        }
      }
    }
  }
}

// And these are not those of the plain kernels.
TEST_F(CudaParts, PlainKernelsHaveOtherBits) {
  for (const std::string kind : {"lln", "lln:causal", "lln+diag32", "lln+diag100:causal"}) {
    Case c = make_case("backward:bf16:cpu:b1h2n90d64:" + kind);
    c.parameter_gradients = true;
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    const TensorSet found = run_on_device(c, in);
    const TensorSet plain = run_on_device(c, in, {.kernel = "cuda-plain"});
    EXPECT_NE(first_difference(found.at("dalpha"), 0, plain.at("dalpha")), "") << kind;
    EXPECT_NE(first_difference(found.at("dq"), 0, plain.at("dq")), "") << kind;
  }
}

// dq is 0 where alpha is, and dalpha is not: it cannot be found from dq.
TEST_F(CudaParts, ScalesOfZero) {
  for (const std::string type : {"f32", "bf16"}) {
    for (const std::string kind : {"lln", "lln:causal", "lln+diag32"}) {
      for (const char* dims : {"d64", "d36"}) {
        Case c = make_case("backward:" + type + ":cpu:b1h3n90" + dims + ":" + kind);
        c.parameter_gradients = true;
        Inputs in = conformance::make_inputs(c, c.problem.dtype);
        in.alpha.set(0, 0, 0, 0, 0);
        in.alpha.set(0, 1, 0, 0, -1e-30);
        in.beta.set(0, 1, 0, 0, 0);
        const TensorSet found = run_on_device(c, in);
        const TensorSet plain = run_on_device(c, in, {.kernel = "cuda-plain"});
        for (const char* name : {"dalpha", "dbeta"}) {
          for (std::int64_t h = 0; h < 3; ++h) {
            const double expected = plain.at(name).get(0, h, 0, 0);
            const double found_here = found.at(name).get(0, h, 0, 0);
            const double tolerance = type == "f32" ? 1e-4 : 0.05;
            EXPECT_NEAR(found_here, expected, tolerance * (1 + std::abs(expected)))
                << name << " of head " << h << ", " << to_string(c);
          }
        }
        if (c.problem.has_diag()) continue;
        EXPECT_EQ(first_difference(found.at("dq"), 0,
                                   [](auto, auto h, auto, auto) -> std::optional<double> {
                                     if (h != 0) return std::nullopt;
                                     return 0;
                                   }),
                  "");
      }
    }
  }
}

// One gradient of the two, whatever the other scale is: all else has the bits that it has without.
TEST_F(CudaParts, OneScaleAlone) {
  for (const std::string kind : {"lln", "lln+diag32"}) {
    Case c = make_case("backward:bf16:cpu:b1h2n70d64:" + kind);
    Inputs in = conformance::make_inputs(c, c.problem.dtype);
    in.alpha.set(0, 0, 0, 0, 0);
    in.beta.set(0, 1, 0, 0, 1e-30);
    const TensorSet expected = run_on_device(c, in);
    c.parameter_gradients = true;
    const TensorSet both = run_on_device(c, in);
    for (const std::string wanted : {"dalpha", "dbeta"}) {
      TensorSet outputs = conformance::make_outputs(c, in, c.problem.dtype);
      DeviceData data(kDevice, in, outputs);
      CaseViews views = data.views();
      (wanted == "dalpha" ? views.grads.dbeta : views.grads.dalpha) = {};
      call(c, views, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      data.fetch();
      EXPECT_EQ(first_difference(outputs.at(wanted), 0, both.at(wanted)), "") << wanted;
      for (const char* name : {"dq", "dk", "dv"}) {
        if (kind == "lln" && name == (wanted == "dalpha" ? std::string("dq") : "dk")) continue;
        EXPECT_EQ(first_difference(outputs.at(name), 0, expected.at(name)), "")
            << name << " beside " << wanted << ' ' << kind;
      }
    }
  }
}

// Where tensors start makes no difference: of copies of padded ones, neither.
TEST_F(CudaParts, MisalignedTensors) {
  for (const char* form : {"d64v7:lln", "d60:lln+diag32", "d64v7:lln+diag100:causal"}) {
    Case c = make_case(std::string("backward:bf16:cpu:b1h2n90") + form);
    c.parameter_gradients = true;
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    expect_same_bits(run_on_device(c, in, {}, 2), run_on_device(c, in), to_string(c));
  }
}

// No sequences at all.
TEST_F(CudaParts, NothingPacked) {
  for (const std::string kind : {"lln", "lln+diag32", "lln+diag100:causal"}) {
    Case c = make_case("backward:bf16:cpu:b1h2n0d64:" + kind + ":packed=0");
    c.parameter_gradients = true;
    const TensorSet found = run_on_device(c);
    for (const char* name : {"dalpha", "dbeta"}) {
      found.at(name).for_each([&](auto b, auto h, auto n, auto ch) {
        EXPECT_EQ(found.at(name).get(b, h, n, ch), 0) << name << ' ' << kind;
      });
    }
  }
}

// Nothing but its own head sees a scale that is no number.
TEST_F(CudaParts, NaNScaleStaysInItsHead) {
  Case c = make_case("backward:bf16:cpu:b2h2n90d64:lln");
  c.parameters = conformance::ParameterForm::sequence;
  c.parameter_gradients = true;
  Inputs in = conformance::make_inputs(c, c.problem.dtype);
  in.alpha.set(1, 0, 0, 0, std::nan(""));
  const TensorSet found = run_on_device(c, in);
  for (const char* name : {"dalpha", "dbeta"}) {
    found.at(name).for_each([&](auto b, auto h, auto n, auto ch) {
      EXPECT_EQ(std::isnan(found.at(name).get(b, h, n, ch)), b == 1 && h == 0)
          << name << ' ' << b << ' ' << h;
    });
  }
}

// A sequence gives the same bits alone and among others, also where it is cut into several jobs.
TEST_F(CudaParts, NeighboursChangeNothing) {
  for (const std::string op : kDeviceOps) {
    for (const std::string form :
         {"n90d64:lln", "n1300d8:lln", "n90d64:lln+diag32", "n90d64:lln+diag100:causal"}) {
      Case c = make_case(op + ":bf16:cpu:b3h2" + form);
      c.parameters = conformance::ParameterForm::sequence;
      c.parameter_gradients = true;
      const Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const TensorSet all = run_on_device(c, in);
      Case one = c;
      one.problem.batch = one.problem.sequences = 1;
      Inputs last = conformance::make_inputs(one, one.problem.dtype);
      for (const auto& [to, from] : {std::pair{&last.q, &in.q},
                                     {&last.k, &in.k},
                                     {&last.v, &in.v},
                                     {&last.g, &in.g},
                                     {&last.alpha, &in.alpha},
                                     {&last.beta, &in.beta}}) {
        to->for_each([&, to = to, from = from](auto b, auto h, auto n, auto ch) {
          to->set(b, h, n, ch, from->get(2, h, n, ch));
        });
      }
      const TensorSet alone = run_on_device(one, last);
      for (const TensorSet::Entry& entry : alone.entries()) {
        EXPECT_EQ(first_difference(entry.tensor, 0,
                                   [&](auto, auto h, auto n, auto ch) -> std::optional<double> {
                                     return all.at(entry.name).get(2, h, n, ch);
                                   }),
                  "")
            << entry.name << " of " << to_string(c);
      }
    }
  }
}

// Sequences that count as empty leave zeros, whatever the scratch memory held.
TEST_F(CudaParts, WrongCumulativeLengths) {
  for (const std::string op : kDeviceOps) {
    Case c = make_case(op + ":bf16:cpu:b1h2n90d64:lln+diag100:causal:packed=3");
    c.lengths = {50, 20, 20};
    c.parameter_gradients = true;
    Inputs in = conformance::make_inputs(c, c.problem.dtype);
    in.cu_seqlens_q = in.cu_seqlens_k = {0, 50, 20, 90};
    DeviceMemory scratch(kDevice, workspace_bytes(on_device(c.problem)));
    scratch.write(std::vector<std::byte>(scratch.span().size(), std::byte{0x3F}));
    const TensorSet found = run_on_device(c, in, {.workspace = scratch.span()});
    for (const TensorSet::Entry& entry : found.entries()) {
      EXPECT_EQ(first_difference(entry.tensor, 0,
                                 [](auto, auto, auto, auto) -> std::optional<double> { return 0; }),
                "")
          << entry.name << " of " << to_string(c);
    }
    const Case good = make_case("forward:bf16:cpu:b1h1n70d60:lln");
    EXPECT_THROW(run_on_device(good), Error) << "what the device has found is reported";
  }
}

}  // namespace
}  // namespace lln::test
