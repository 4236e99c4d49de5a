// Calls one behind the other on a stream. Kernels start before the ones before them have ended
// (src/cuda/launch.h): each must wait before it reads what these write, also the first of a call.
// SPDX-License-Identifier: Apache-2.0
#include "device_run.h"

namespace lln::test {
namespace {

class CudaOrder : public OnStream {
 protected:
  void wait() { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }
  // NaN everywhere, in the order of the stream.
  void poison(const View& view) {
    std::size_t bytes = view.dtype == DType::bf16 ? 2 : 4;
    for (const std::int64_t size : view.shape) bytes *= static_cast<std::size_t>(size);
    ASSERT_EQ(cudaMemsetAsync(view.data, 0xFF, bytes, stream_), cudaSuccess);
  }
};

// A forward call, a second one on what the first gave, and its backward with the state that it
// saved and what it gave as the gradient.
TEST_F(CudaOrder, CallsReadWhatTheOnesBeforeThemWrote) {
  for (const std::string kind : {"lln", "lln+diag64", "lln:causal"}) {
    for (const std::string shape : {"b8h12n512d64", "b2h8n4096d64", "b4h8n1024d128"}) {
      Case forward = make_case("forward:bf16:cpu:" + shape + ":" + kind);
      forward.saved = kind != "lln:causal";
      const Case backward = make_case("backward:bf16:cpu:" + shape + ":" + kind);
      const Inputs in = conformance::make_inputs(forward, DType::bf16);
      TensorSet first_out = conformance::make_outputs(forward, in, DType::bf16);
      TensorSet second_out = conformance::make_outputs(forward, in, DType::bf16);
      TensorSet gradients = conformance::make_outputs(backward, in, DType::bf16);
      DeviceData first(kDevice, in, first_out), second(kDevice, in, second_out),
          third(kDevice, in, gradients);
      CaseViews second_views = second.views(), third_views = third.views();
      second_views.in.q = second_views.in.k = second_views.in.v = first.views().out.o;
      third_views.in = second_views.in;
      third_views.grads.g = second_views.out.o;
      third_views.grads.saved = second_views.out.saved;
      const auto run = [&](bool waiting) {
        poison(first.views().out.o);
        poison(second_views.out.o);
        if (forward.saved) poison(second_views.out.saved.channel_values);
        for (const View& view :
             {third_views.grads.dq, third_views.grads.dk, third_views.grads.dv}) {
          poison(view);
        }
        const Exec exec{.stream = stream_};
        call(forward, first.views(), exec);
        if (waiting) wait();
        call(forward, second_views, exec);
        if (waiting) wait();
        call(backward, third_views, exec);
        wait();
        third.fetch();
        return gradients;
      };
      const TensorSet expected = run(true);
      for (int i = 0; i < 50; ++i) expect_same_bits(run(false), expected, to_string(backward));
    }
  }
}

}  // namespace
}  // namespace lln::test
