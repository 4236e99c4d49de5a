// A decode state on a device: reads, forks, merges and travels to the CPU and back; and steps that
// were captured in a graph go on when they are replayed.
// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "decode_stream.h"
#include "expect_error.h"

namespace lln::test {
namespace {

class CudaDecode : public OnDevice {};

TEST_F(CudaDecode, ReadIsTheRowOfTheLastToken) {
  for (const char* problem :
       {"append:f32:cpu:b2h6k2n131d20v12:lln", "append:f32:cpu:b1h2n128d16:lln+diag32",
        "append:f32:cpu:b1h5k1n97d16:lln+diag32"}) {
    Stream stream(problem);
    const std::int64_t last = stream.c.problem.tokens - 1;
    OwnedState state(stream.config, kDevice);
    stream.append(state, 0, last, false);
    stream.append(state, last, last + 1);
    const Tensor& rows = stream.rows();
    EXPECT_EQ(first_difference(stream.read(state, last, last + 1), 1e-6,
                               [&](auto b, auto h, auto, auto channel) {
                                 return std::optional(rows.get(b, h, last, channel));
                               }),
              "")
        << problem;
    // Many rows of one read are what the same rows give one by one.
    const Tensor together = stream.read(state, 0, 9), alone = stream.read(state, 4, 5);
    EXPECT_EQ(first_difference(alone, 1e-6,
                               [&](auto b, auto h, auto, auto channel) {
                                 return std::optional(together.get(b, h, 4, channel));
                               }),
              "")
        << problem;
  }
}

TEST_F(CudaDecode, ResetMakesAPlaceForAnotherSequence) {
  Stream stream("append:f32:cpu:b2h4k2n300d20:lln+diag16");
  OwnedState state(stream.config, kDevice), fresh(stream.config, kDevice);
  stream.append(state, 0, 300, false);
  state->reset(1);
  EXPECT_EQ(state->tokens(0), 300);
  EXPECT_EQ(state->tokens(1), 0);
  state->reset();
  EXPECT_EQ(saved(state), saved(fresh));
}

TEST_F(CudaDecode, ForkAndRollbackAreBitwise) {
  Stream stream("append:bf16:cpu:b1h4k2n400d16:lln+diag32");
  OwnedState state(stream.config, kDevice), fork(stream.config, kDevice);
  stream.append(state, 0, 150);
  const std::vector<std::byte> point = saved(state);
  fork->copy_from(*state);
  stream.append(state, 150, 400);
  stream.append(fork, 150, 400);
  const std::vector<std::byte> end = saved(state);
  EXPECT_EQ(saved(fork), end);
  EXPECT_NE(end, point);
  state->load(point);
  EXPECT_EQ(saved(state), point);
  stream.append(state, 150, 400);
  EXPECT_EQ(saved(state), end);
}

TEST_F(CudaDecode, MergeFollowsWithLaterTokens) {
  for (const char* problem :
       {"append:f32:cpu:b2h4k2n200d20v12:lln", "append:f32:cpu:b1h2n200d16:lln+diag20"}) {
    Stream stream(problem);
    OwnedState whole(stream.config, kDevice), first(stream.config, kDevice),
        second(stream.config, kDevice);
    stream.append(whole, 0, 200, false);
    stream.append(first, 0, 60, false);
    stream.append(second, 60, 200, false);
    first->merge(*second);
    EXPECT_EQ(first->tokens(), 200);
    EXPECT_EQ(first_difference(stream.read(first, 0, 5), 2e-6, stream.read(whole, 0, 5)), "")
        << problem;
  }
  Stream stream("append:f32:cpu:b1h2n70d16:lln+diag32");
  OwnedState state(stream.config, kDevice), later(stream.config, kDevice);
  stream.append(state, 0, 65, false);
  stream.append(later, 65, 70, false);
  const std::vector<std::byte> before = saved(state);
  expect_error([&] { state->merge(*later); },
               {"65 tokens, which is no multiple of the block of 32"});
  EXPECT_EQ(saved(state), before);
}

// A prompt on the CPU, its continuation on the device, and back.
TEST_F(CudaDecode, StatesTravelBetweenCpuAndDevice) {
  for (const char* kind : {"lln", "lln+diag48"}) {
    Stream stream((std::string("append:f32:cpu:b2h4k2n600d20v12:") + kind).c_str());
    const Tensor expected = stream.causal_rows();
    std::vector<std::int32_t> lengths;
    OwnedState host(stream.config), device(stream.config, kDevice), back(stream.config);
    Tensor rows(DType::f32, stream.in.g.shape());
    const auto append_on_host = [&](OwnedState& state, std::int64_t begin, std::int64_t end) {
      state->append(token_range(stream.in.views(), begin, end - begin, lengths),
                    token_range(rows.view(), begin, end - begin));
    };
    append_on_host(host, 0, 290);
    const std::vector<std::byte> bytes = saved(host);
    device->load(bytes);
    EXPECT_EQ(saved(device), bytes);
    stream.append(device, 290, 295);
    for (std::int64_t i = 295; i < 300; ++i) stream.append(device, i, i + 1);
    back->load(saved(device));
    append_on_host(back, 300, 600);
    EXPECT_EQ(back->tokens(1), 600);
    const Tensor& middle = stream.rows();
    EXPECT_EQ(
        first_difference(expected, 1e-5,
                         [&](auto b, auto h, auto n, auto channel) {
                           const bool on_device = n >= 290 && n < 300;
                           return std::optional((on_device ? middle : rows).get(b, h, n, channel));
                         }),
        "")
        << kind;
  }
}

// Heads that share no keys step by kernels of their own, one for each number of channels that a
// lane has; over the token at which recent sums join the others.
TEST_F(CudaDecode, StepsOfEveryWidth) {
  for (const char* problem :
       {"append:f32:cpu:b1h2n262d5v3:lln", "append:bf16:cpu:b2h1n262d32v64:lln",
        "append:bf16:cpu:b1h2n262d64:lln", "append:f16:cpu:b1h2n262d52v100:lln",
        "append:bf16:cpu:b1h1n262d128:lln", "append:f32:cpu:b1h1n262d100v40:lln",
        "append:f32:cpu:b1h1n262d256:lln", "append:bf16:cpu:b1h1n262d200v250:lln"}) {
    Stream stream(problem);
    OwnedState state(stream.config, kDevice);
    for (std::int64_t n = 0; n < stream.c.problem.tokens; ++n) stream.append(state, n, n + 1);
    const Tensor expected = stream.causal_rows();
    EXPECT_EQ(first_difference(stream.rows(), tolerance(stream),
                               [&](auto b, auto h, auto n, auto channel) {
                                 return std::optional(expected.get(b, h, n, channel));
                               }),
              "")
        << problem;
    state.check_guards();
  }
}

TEST_F(CudaDecode, LengthsOfAStepOutOfRangeAreReportedAndCut) {
  Stream stream("append:f32:cpu:b3h2n1d16:lln");
  const DeviceLengths<std::int64_t> lengths({1, 2, -1});
  AttentionInputs in = stream.views().in;
  in.key_lengths = lengths.view();
  OwnedState state(stream.config, kDevice);
  state->step(in, stream.views().out.o);
  expect_error([&] { state->tokens(); }, {"key_lengths"});
  state.check_guards();
  for (std::int64_t b = 0; b < 3; ++b) EXPECT_EQ(state->tokens(b), b < 2 ? 1 : 0);
  const Tensor& rows = stream.rows();
  rows.for_each([&](auto b, auto h, auto n, auto channel) {
    // The row of the only token is its value.
    const double expected = b < 2 ? stream.in.v.get(b, h, n, channel) : 0;
    EXPECT_NEAR(rows.get(b, h, n, channel), expected, 1e-6);
  });
}

// One captured step, replayed: the counts are on the device, so that it goes on, over the token at
// which recent sums join the others and over the borders of blocks.
TEST_F(CudaDecode, ReplayedStepsGoOn) {
  cudaStream_t queue = nullptr;
  ASSERT_EQ(cudaStreamCreate(&queue), cudaSuccess);
  for (const char* kind : {"h4k2n560d16:lln", "h4k2n560d16:lln+diag48", "h2n560d16:lln"}) {
    Stream stream((std::string("append:f32:cpu:b2") + kind).c_str());
    const Problem& p = stream.c.problem;
    const AttentionInputs all = stream.views().in;
    OwnedState state(stream.config, kDevice, queue), plain(stream.config, kDevice);
    // The token of a step lies where the graph expects it; rows come from the same place.
    const auto token_tensor = [](std::int64_t heads) {
      return Tensor(DType::f32, {2, heads, 1, 16});
    };
    Tensor q = token_tensor(p.heads), k = token_tensor(p.heads_k), v = token_tensor(p.heads_k);
    Tensor o = token_tensor(p.heads);
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    const auto on_device = [&](Tensor& tensor) {
      memory.push_back(std::make_unique<DeviceMemory>(kDevice, tensor.bytes().size()));
      View view = on(kDevice, tensor.view());
      view.data = memory.back()->data();
      return view;
    };
    AttentionInputs token = all;
    token.q = on_device(q);
    token.k = on_device(k);
    token.v = on_device(v);
    const View row = on_device(o);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(queue, cudaStreamCaptureModeGlobal), cudaSuccess);
    state->step(token, row);  // into the state's own stream
    ASSERT_EQ(cudaStreamEndCapture(queue, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&program, graph, 0), cudaSuccess);
    EXPECT_EQ(state->tokens(), 0);  // captured, not run
    for (std::int64_t n = 0; n < 560; ++n) {
      const auto fill = [&](Tensor& tensor, const Tensor& from, std::size_t place) {
        tensor.for_each([&](auto b, auto h, auto, auto channel) {
          tensor.set(b, h, 0, channel, from.get(b, h, n, channel));
        });
        memory[place]->write(tensor.bytes());
      };
      fill(q, stream.in.q, 0);
      fill(k, stream.in.k, 1);
      fill(v, stream.in.v, 2);
      ASSERT_EQ(cudaGraphLaunch(program, queue), cudaSuccess);
      stream.append(plain, n, n + 1);
      memory[3]->read(o.writable_bytes());
      if (n % 50 != 5 && n < 550) continue;
      const Tensor& rows = stream.rows();
      EXPECT_EQ(first_difference(o, 0,
                                 [&](auto b, auto h, auto, auto channel) {
                                   return std::optional(rows.get(b, h, n, channel));
                                 }),
                "")
          << kind << ", token " << n;
    }
    EXPECT_EQ(state->tokens(1), 560);
    EXPECT_EQ(saved(state), saved(plain));
    cudaGraphExecDestroy(program);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(queue);
}

TEST_F(CudaDecode, StateAndTensorsBelongToOneDevice) {
  Stream stream("append:f32:cpu:b1h2n8d16:lln");
  OwnedState state(stream.config, kDevice), host(stream.config);
  Tensor rows(DType::f32, stream.in.g.shape());
  expect_error([&] { state->append(stream.in.views(), rows.view()); },
               {"the tensors are on cpu and the state is on cuda"});
  expect_error([&] { host->append(stream.views().in, stream.views().out.o); },
               {"the tensors are on cuda and the state is on cpu"});
  expect_error([&] { host->merge(*state); }, {"a state on cpu and one on cuda"});
  expect_error([&] { state->copy_from(*host); }, {"a state on cuda and one on cpu"});
  // Never touched: there is no such device.
  std::byte* const memory = host.memory().data();
  expect_error(
      [&] {
        DecodeState(stream.config, {memory, decode_state_bytes(stream.config, cuda_device(63))},
                    cuda_device(63));
      },
      {"on cuda:63", "no device 63"}, ErrorCode::unsupported);
  EXPECT_EQ(state->tokens(), 0);
}

}  // namespace
}  // namespace lln::test
