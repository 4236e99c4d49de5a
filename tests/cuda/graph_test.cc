// Calls inside CUDA graphs: captured without any waiting, with a workspace that is given or one
// that becomes part of the graph, and replayed on new data to the bits of an ordinary call.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "device_run.h"

namespace lln::test {
namespace {

class CudaGraph : public OnStream {
 protected:
  // What is called while the stream is captured, as a graph that can be launched.
  template <class Body>
  cudaGraphExec_t captured(const Body& body) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    body();
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&program, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    return program;
  }
};

void overwrite(const ConstView& view, const Tensor& with) {
  ASSERT_EQ(cudaMemcpy(const_cast<void*>(view.data), with.bytes().data(), with.bytes().size(),
                       cudaMemcpyHostToDevice),
            cudaSuccess);
}

TEST_F(CudaGraph, ReplaysOnNewData) {
  for (const std::string kind : kDeviceKinds) {
    for (const std::string op : kDeviceOps) {
      for (const bool given : {true, false}) {
        Case c = make_case(op + ":bf16:cpu:b2h2n600d64:" + kind);
        const Inputs first = conformance::make_inputs(c, c.problem.dtype);
        Inputs second = first;
        second.q = first.k;
        second.k = first.q;
        second.v = first.g;
        TensorSet outputs = conformance::make_outputs(c, first, c.problem.dtype);
        DeviceData data(kDevice, first, outputs);
        const DeviceMemory memory(kDevice, workspace_bytes(on_device(c.problem)));
        Exec exec{.stream = stream_};
        if (given) exec.workspace = memory.span();
        const cudaGraphExec_t program = captured([&] { call(c, data.views(), exec); });
        for (const Inputs* in : {&first, &std::as_const(second), &first}) {
          overwrite(data.views().in.q, in->q);
          overwrite(data.views().in.k, in->k);
          overwrite(data.views().in.v, in->v);
          ASSERT_EQ(cudaGraphLaunch(program, stream_), cudaSuccess);
          data.fetch();
          expect_same_bits(outputs, run_on_device(c, *in), to_string(c));
        }
        cudaGraphExecDestroy(program);
      }
    }
  }
}

// Lengths are read on the device, when the graph runs.
TEST_F(CudaGraph, LengthsMayChangeBetweenReplays) {
  Case c = make_case("forward:f32:cpu:b3h2n400d32:lln+diag16:causal:masked");
  c.keys = conformance::KeyPattern::lengths;
  Inputs in = conformance::make_inputs(c, DType::f32);
  TensorSet outputs = conformance::make_outputs(c, in, DType::f32);
  DeviceData data(kDevice, in, outputs);
  const cudaGraphExec_t program = captured([&] { call(c, data.views(), {.stream = stream_}); });
  for (std::int32_t length : {400, 17, 0}) {
    for (std::int32_t& entry : in.key_lengths) entry = std::min(entry, length);
    ASSERT_EQ(cudaMemcpy(const_cast<void*>(data.views().in.key_lengths.data), in.key_lengths.data(),
                         in.key_lengths.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(program, stream_), cudaSuccess);
    data.fetch();
    expect_same_bits(outputs, run_on_device(c, in), "length " + std::to_string(length));
  }
  cudaGraphExecDestroy(program);
}

}  // namespace
}  // namespace lln::test
