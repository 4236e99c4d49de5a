// Bad input on a device: one clear error, nothing written outside the tensors, and a context that
// goes on working. Values in device memory are reported by the call after the one that met them.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "device_run.h"
#include "expect_error.h"

namespace lln::test {
namespace {

class CudaErrors : public OnDevice {};

const char* const kPlainCase = "forward:f32:cpu:b2h2n300d32:lln";

void expect_works() {
  const Case c = make_case(kPlainCase);
  const Inputs in = conformance::make_inputs(c, DType::f32);
  const TensorSet host = run(c, in);
  EXPECT_EQ(first_difference(run_on_device(c, in).at("o"), 1e-4, host.at("o")), "");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

void expect_reported(const std::string& text) {
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Case c = make_case(kPlainCase);
  expect_error([&] { run_on_device(c); }, {"an earlier call on cuda", text});
  expect_works();  // reported once
}

// The plain kernels, and those that have their own ways to memory.
constexpr const char* kTypes[] = {"f32", "bf16"};

TEST_F(CudaErrors, LengthsOutOfRange) {
  for (const std::string op : kDeviceOps) {
    for (const std::string kind : kDeviceKinds) {
      for (const std::string type : kTypes) {
        Case c = make_case(op + ":" + type + ":cpu:b3h2n200d64:" + kind + ":masked");
        c.keys = conformance::KeyPattern::lengths;
        Inputs in = conformance::make_inputs(c, c.problem.dtype);
        in.key_lengths = {-5, 201, 1 << 30};
        run_on_device(c, in);  // sees to the guards
        expect_reported("key_lengths");
      }
    }
  }
}

TEST_F(CudaErrors, CumulativeLengthsThatAreNotRight) {
  const std::vector<std::vector<std::int64_t>> lists = {
      {1, 100, 200, 300},  {0, 200, 100, 300}, {0, 100, 200, 299},
      {0, 100, 200, 301},  {0, -1, 200, 300},  {0, std::int64_t{1} << 62, 200, 300},
      {-300, 0, 150, 300},
  };
  for (const std::string op : kDeviceOps) {
    for (const std::string kind : kDeviceKinds) {
      for (const std::string type : kTypes) {
        Case c = make_case(op + ":" + type + ":cpu:b1h2n300d64:" + kind + ":packed=3");
        c.lengths = {100, 100, 100};
        Inputs in = conformance::make_inputs(c, c.problem.dtype);
        for (const std::vector<std::int64_t>& list : lists) {
          in.cu_seqlens_q = in.cu_seqlens_k = list;
          run_on_device(c, in);
          expect_reported("cu_seqlens_q does not start at 0");
        }
      }
    }
  }
}

// Their sequences have no tokens, so that nothing adds to the gradients of what they share,
// whatever the scratch memory held.
TEST_F(CudaErrors, WrongCumulativeLengthsLeaveNoGradientOfWeights) {
  for (const char* kind : {"lln+diag32", "lln+diag32:causal"}) {
    Case c = make_case(std::string("backward:bf16:cpu:b1h2n90d64:") + kind + ":packed=3");
    c.lengths = {50, 20, 20};
    c.weights = conformance::WeightForm::head;
    c.two_weights = true;  // what both parts hold goes away in dmix
    c.weight_gradients = true;
    Inputs in = conformance::make_inputs(c, c.problem.dtype);
    in.cu_seqlens_q = in.cu_seqlens_k = {0, 50, 20, 90};
    DeviceMemory scratch(kDevice, workspace_bytes(on_device(c.problem)));
    scratch.write(std::vector<std::byte>(scratch.span().size(), std::byte{0x3F}));
    const TensorSet found = run_on_device(c, in, {.workspace = scratch.span()});
    for (const char* name : {"dlln_weight", "ddiag_weight"}) {
      const Tensor& gradient = found.at(name);
      gradient.for_each([&](auto b, auto h, auto n, auto channel) {
        EXPECT_EQ(gradient.get(b, h, n, channel), 0) << kind << ", " << name << ", head " << h;
      });
    }
    expect_reported("cu_seqlens_q does not start at 0");
  }
}

TEST_F(CudaErrors, KeysCutUnlikeQueries) {
  Case c = make_case("forward:f32:cpu:b1h2n300d32:lln:causal:packed=3");
  c.lengths = {100, 100, 100};
  Inputs in = conformance::make_inputs(c, DType::f32);
  in.cu_seqlens_k = {0, 99, 200, 300};
  run_on_device(c, in);
  expect_reported("cu_seqlens_q and cu_seqlens_k differ");
}

TEST_F(CudaErrors, WorkspaceTooSmallOrMisaligned) {
  const Case c = make_case("forward:f32:cpu:b2h2n3000d32:lln");
  const Inputs in = conformance::make_inputs(c, DType::f32);
  const std::size_t needed = workspace_bytes(on_device(c.problem));
  ASSERT_GT(needed, 0U);
  const DeviceMemory small(kDevice, needed - 1);
  expect_error([&] { run_on_device(c, in, {.workspace = small.span()}); }, {"is too small"});
  const DeviceMemory shifted(kDevice, needed, 64);
  expect_error([&] { run_on_device(c, in, {.workspace = shifted.span()}); },
               {"starts 64 bytes past a multiple of 256"});
  expect_works();
}

// All but a little of the device is taken: a call whose workspace does not fit fails, and after the
// memory is back everything works.
TEST_F(CudaErrors, OutOfMemory) {
  Case c = make_case("forward:f32:cpu:b1h1n64d256:lln:packed=1000000");
  c.lengths.assign(1000000, 0);
  c.lengths.back() = 64;
  c.parameters = conformance::ParameterForm::one;
  const Inputs in = conformance::make_inputs(c, DType::f32);
  TensorSet outputs = conformance::make_outputs(c, in, DType::f32);
  DeviceData data(kDevice, in, outputs);
  const std::size_t needed = workspace_bytes(on_device(c.problem));
  std::vector<void*> taken;
  for (std::size_t bytes = std::size_t{1} << 36; bytes >= needed / 4 && bytes > 0;) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) {
      taken.push_back(memory);
    } else {
      cudaGetLastError();
      bytes /= 2;
    }
  }
  expect_error([&] { call(c, data.views(), {}); },
               {"no memory for the workspace", to_string(on_device(c.problem))},
               ErrorCode::out_of_memory);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  for (void* memory : taken) cudaFree(memory);
  expect_works();
}

}  // namespace
}  // namespace lln::test
