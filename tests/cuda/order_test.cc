// Calls one behind the other on a stream. Kernels start before the ones before them have ended
// (src/cuda/launch.h): each must wait before it reads what these write, also the first of a call.
// SPDX-License-Identifier: Apache-2.0
#include "decode_stream.h"

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

// Steps of a state, each of which takes for its token what the one before gave.
TEST_F(CudaOrder, StepsReadWhatTheOnesBeforeThemWrote) {
  const Case c = make_case("append:bf16:cpu:b8h12n1d64:lln");
  const Inputs in = conformance::make_inputs(c, DType::bf16);
  TensorSet even_out = conformance::make_outputs(c, in, DType::bf16);
  TensorSet odd_out = conformance::make_outputs(c, in, DType::bf16);
  DeviceData even(kDevice, in, even_out), odd(kDevice, in, odd_out);
  const auto run = [&](bool waiting) {
    OwnedState state(conformance::decode_config(c), kDevice, stream_);
    AttentionInputs token = even.views().in;
    for (int i = 0; i < 40; ++i) {
      const View row = (i % 2 == 0 ? even : odd).views().out.o;
      poison(row);
      state->step(token, row);
      token.q = token.k = token.v = row;
      if (waiting) wait();
    }
    wait();
    return saved(state);
  };
  const std::vector<std::byte> expected = run(true);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(run(false), expected);
}

}  // namespace
}  // namespace lln::test
