// A decode state on a device: its rows are those of the CPU's causal forward, in any pieces,
// ragged, after forks, merges and travels to the CPU and back; and steps that were captured in a
// graph go on when they are replayed.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>

#include "conformance/compare.h"
#include "conformance/decode.h"
#include "device_run.h"
#include "expect_error.h"

namespace lln::test {
namespace {

using conformance::OwnedState;
using conformance::token_range;

class CudaDecode : public OnDevice {};

// A case whose tokens go through states on the device.
class Stream {
 public:
  explicit Stream(const Case& of, const std::function<void(Inputs&)>& change = {})
      : c(of),
        in(changed(conformance::make_inputs(c, c.problem.dtype), change)),
        config(conformance::decode_config(c)),
        outputs_(conformance::make_outputs(c, in, c.problem.dtype)),
        data_(kDevice, in, outputs_) {}
  explicit Stream(const char* problem, const std::function<void(Inputs&)>& change = {})
      : Stream(make_case(problem), change) {}

  // Tokens [begin, end) of the case; rows go to their place in rows() where they are wanted.
  void append(OwnedState& state, std::int64_t begin, std::int64_t end, bool rows = true,
              const Exec& exec = {}) {
    AttentionInputs piece = token_range(data_.views().in, begin, end - begin, no_lengths_);
    const View o = token_range(data_.views().out.o, begin, end - begin);
    if (!rows) {
      piece.q = piece.alpha = {};
      state->append(piece, {}, exec);
    } else if (end - begin == 1) {
      state->step(piece, o, exec);
    } else {
      state->append(piece, o, exec);
    }
  }

  void append_in_pieces(OwnedState& state, std::uint64_t seed, std::int64_t longest) {
    std::mt19937_64 random(seed);
    for (std::int64_t begin = 0; begin < c.problem.tokens;) {
      const auto count = static_cast<std::int64_t>(1 + random() % static_cast<unsigned>(longest));
      const std::int64_t end = std::min(c.problem.tokens, begin + count);
      append(state, begin, end);
      begin = end;
    }
  }

  // The rows that were written so far.
  const Tensor& rows() {
    data_.fetch();
    return outputs_.at("o");
  }

  // Queries [begin, end) of the case against the state.
  Tensor read(OwnedState& state, std::int64_t begin, std::int64_t end) {
    AttentionInputs queries = token_range(data_.views().in, begin, end - begin, no_lengths_);
    queries.k = queries.v = queries.beta = {};
    Tensor o(c.problem.dtype, {c.problem.batch, c.problem.heads, end - begin, c.problem.dim_v});
    DeviceMemory memory(kDevice, o.bytes().size());
    View view = on(kDevice, o.view());
    view.data = memory.data();
    state->read(queries, view);
    memory.read(o.writable_bytes());
    return o;
  }

  Tensor causal_rows() const { return run(conformance::causal_case(host_case()), in).at("o"); }
  const CaseViews& views() const { return data_.views(); }

  Case c;
  Inputs in;
  DecodeConfig config;

 private:
  static Inputs changed(Inputs inputs, const std::function<void(Inputs&)>& change) {
    if (change) change(inputs);
    return inputs;
  }

  Case host_case() const {
    Case host = c;
    host.problem.device = {};
    return host;
  }

  std::vector<std::int32_t> no_lengths_;
  TensorSet outputs_;
  DeviceData data_;
};

std::vector<std::byte> saved(OwnedState& state) {
  std::vector<std::byte> bytes(state->saved_bytes());
  state->save(bytes);
  return bytes;
}

double tolerance(const Stream& stream) {
  return 8 * conformance::unit_roundoff(stream.c.problem.dtype) + 1e-5;
}

TEST_F(CudaDecode, RandomPiecesGiveTheCausalForward) {
  const char* const problems[] = {"append:f32:cpu:b2h4k2n700d20v12:lln",
                                  "append:f32:cpu:b1h2n700d64:lln+diag32",
                                  "append:bf16:cpu:b1h2n300d64v128:lln+diag48",
                                  "append:f16:cpu:b1h2n300d16:lln",
                                  "append:f32:cpu:b1h5k1n300d7:lln+diag100:feature=elu",
                                  "append:f32:cpu:b1h1n300d256:lln"};
  for (const char* problem : problems) {
    Stream stream(problem);
    const Tensor expected = stream.causal_rows();
    for (const std::int64_t longest : {2, 30, 400}) {
      OwnedState state(stream.config, kDevice);
      stream.append_in_pieces(state, 7, longest);
      EXPECT_EQ(first_difference(stream.rows(), tolerance(stream), expected), "")
          << problem << " in pieces of up to " << longest;
      EXPECT_EQ(state->tokens(), stream.c.problem.tokens);
    }
  }
}

TEST_F(CudaDecode, LongAppendsGiveTheCausalForward) {
  for (const char* problem :
       {"append:f32:cpu:b1h2n9001d16:lln", "append:f32:cpu:b1h2n2500d16:lln+diag64"}) {
    Stream stream(problem);
    OwnedState state(stream.config, kDevice);
    stream.append(state, 0, stream.c.problem.tokens);
    EXPECT_EQ(first_difference(stream.rows(), 1e-5, stream.causal_rows()), "") << problem;
  }
}

// The kernels of long prompts that this device has.
std::vector<std::string> walks(const char* problem) {
  Problem p = make_case(problem).problem;
  p.device = kDevice;
  std::vector<std::string> names;
  for (const Explanation::Candidate& candidate : explain(p).candidates) {
    const bool walks = candidate.kernel.ends_with("-causal");
    if (walks && candidate.refusal.empty()) names.push_back(candidate.kernel);
  }
  return names;
}

// They have the causal walks of attention, and beside them others for what is out of their reach:
// here tokens before the border of a block, then exponents that are not moderate, and then sums of
// keys that were not.
TEST_F(CudaDecode, AppendsGoFromKernelToKernel) {
  for (const char* problem :
       {"append:bf16:cpu:b2h4k2n600d64:lln", "append:bf16:cpu:b2h4k2n600d64:lln+diag32",
        "append:bf16:cpu:b1h2k1n600d40v72:lln+diag64"}) {
    Stream stream(problem, [](Inputs& in) {
      in.k.for_each([&](auto b, auto h, auto n, auto channel) {
        if (b == 0 && h == 0 && n >= 400 && n < 500) in.k.set(b, h, n, channel, 40);
      });
    });
    const Tensor expected = stream.causal_rows();
    const auto append_by = [&](std::string_view kernel) {
      OwnedState state(stream.config, kDevice);
      std::int64_t begin = 0;
      for (const std::int64_t end : {128, 138, 256, 400, 500, 600}) {
        stream.append(state, begin, end, true, {.kernel = kernel});
        begin = end;
      }
      EXPECT_EQ(first_difference(stream.rows(), tolerance(stream), expected), "")
          << problem << " by " << kernel;
      EXPECT_EQ(state->tokens(), 600);
      return stream.rows();
    };
    const Tensor plain = append_by("cuda");
    for (const std::string& kernel : walks(problem)) {
      EXPECT_NE(first_difference(append_by(kernel), 0, plain), "") << kernel << " did not run";
    }
  }
}

// Longer than what one block walks.
TEST_F(CudaDecode, PromptsOfSeveralPiecesGoOnFromWhatIsThere) {
  constexpr const char* kProblem = "append:bf16:cpu:b1h2k1n9300d16:lln";
  Stream stream(kProblem);
  const Tensor expected = stream.causal_rows();
  for (const std::string& kernel : walks(kProblem)) {
    OwnedState state(stream.config, kDevice);
    stream.append(state, 0, 4000, true, {.kernel = kernel});
    stream.append(state, 4000, 9300, true, {.kernel = kernel});
    EXPECT_EQ(first_difference(stream.rows(), tolerance(stream), expected), "") << kernel;
    const Tensor last = stream.read(state, 9299, 9300);
    EXPECT_EQ(first_difference(last, tolerance(stream),
                               [&](auto b, auto h, auto, auto channel) {
                                 return std::optional(expected.get(b, h, 9299, channel));
                               }),
              "")
        << kernel;
  }
}

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

// A sequence gives the same bits alone and in a batch whose other sequences add more or fewer.
TEST_F(CudaDecode, RaggedSequencesAreBitwiseThoseAlone) {
  for (const char* problem :
       {"append:f32:cpu:b4h4k2n700d24:lln", "append:f32:cpu:b4h4k2n700d24:lln+diag24",
        "append:bf16:cpu:b4h4k2n700d24:lln", "append:bf16:cpu:b4h4k2n700d64:lln+diag32"}) {
    const std::vector<std::int32_t> lengths = {700, 3, 270, 0};
    Stream stream(problem, [&](Inputs& in) {
      for (Tensor* tensor : {&in.q, &in.k, &in.v}) {
        tensor->for_each([&](auto b, auto h, auto n, auto channel) {
          const bool behind = n >= lengths[static_cast<std::size_t>(b)];
          if (behind) tensor->set(b, h, n, channel, std::numeric_limits<double>::quiet_NaN());
        });
      }
    });
    const auto size = static_cast<std::int64_t>(size_of(stream.c.problem.dtype));
    DeviceMemory memory(kDevice, 4 * lengths.size());
    memory.write(std::as_bytes(std::span(lengths)));
    AttentionInputs in = stream.views().in;
    in.key_lengths = on(kDevice, IndexView(std::span<const std::int32_t>(lengths)));
    in.key_lengths.data = memory.data();
    OwnedState state(stream.config, kDevice);
    state->append(in, stream.views().out.o);
    const Tensor together = stream.rows();

    DecodeConfig one = stream.config;
    one.batch = 1;
    for (std::int64_t b = 0; b < 4; ++b) {
      const std::int64_t length = lengths[static_cast<std::size_t>(b)];
      EXPECT_EQ(state->tokens(b), length);
      OwnedState alone(one, kDevice);
      AttentionInputs own = in;
      own.key_lengths = {};
      const auto sequence = [&](auto view) {
        using Byte =
            std::conditional_t<std::is_same_v<decltype(view), View>, std::byte, const std::byte>;
        const std::int64_t at = b * view.stride[0] * size;
        view.data = static_cast<Byte*>(view.data) + at;
        view.shape[0] = 1;
        if (view.shape[2] == 700) view.shape[2] = length;
        return view;
      };
      own.q = sequence(in.q);
      own.k = sequence(in.k);
      own.v = sequence(in.v);
      if (length > 0) alone->append(own, sequence(stream.views().out.o));
      const Tensor& rows = stream.rows();
      EXPECT_EQ(
          first_difference(together, 0,
                           [&](auto s, auto h, auto n, auto channel) {
                             if (s != b) return std::optional<double>();
                             return std::optional(n < length ? rows.get(s, h, n, channel) : 0.0);
                           }),
          "")
          << problem << ", sequence " << b;
    }
  }
}

TEST_F(CudaDecode, LengthsOutOfRangeAreReportedAndCut) {
  Stream stream("append:f32:cpu:b2h2n40d16:lln+diag16");
  const std::vector<std::int64_t> lengths = {41, -7};
  DeviceMemory memory(kDevice, 16);
  memory.write(std::as_bytes(std::span(lengths)));
  AttentionInputs in = stream.views().in;
  in.key_lengths = on(kDevice, IndexView(std::span<const std::int64_t>(lengths)));
  in.key_lengths.data = memory.data();
  OwnedState state(stream.config, kDevice);
  state->append(in, stream.views().out.o);
  expect_error([&] { state->tokens(); }, {"key_lengths"});
  state.check_guards();
  EXPECT_EQ(state->tokens(0), 40);
  EXPECT_EQ(state->tokens(1), 0);
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

// One captured step, replayed: the counts are on the device, so that it goes on, over the token at
// which recent sums join the others and over the borders of blocks.
TEST_F(CudaDecode, ReplayedStepsGoOn) {
  cudaStream_t queue = nullptr;
  ASSERT_EQ(cudaStreamCreate(&queue), cudaSuccess);
  for (const char* kind : {"lln", "lln+diag48"}) {
    Stream stream((std::string("append:f32:cpu:b2h4k2n560d16:") + kind).c_str());
    const AttentionInputs all = stream.views().in;
    OwnedState state(stream.config, kDevice, queue), plain(stream.config, kDevice);
    // The token of a step lies where the graph expects it; rows come from the same place.
    const auto token_tensor = [](std::int64_t heads) {
      return Tensor(DType::f32, {2, heads, 1, 16});
    };
    Tensor q = token_tensor(4), k = token_tensor(2), v = token_tensor(2), o = token_tensor(4);
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

// Where the next border of a block is changes from replay to replay.
TEST_F(CudaDecode, ReplayedAppendsGoOn) {
  cudaStream_t queue = nullptr;
  ASSERT_EQ(cudaStreamCreate(&queue), cudaSuccess);
  Stream stream("append:bf16:cpu:b1h2n150d64:lln+diag32");
  OwnedState state(stream.config, kDevice, queue), plain(stream.config, kDevice);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t program = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(queue, cudaStreamCaptureModeGlobal), cudaSuccess);
  stream.append(state, 0, 150);
  ASSERT_EQ(cudaStreamEndCapture(queue, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&program, graph, 0), cudaSuccess);
  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(cudaGraphLaunch(program, queue), cudaSuccess);
    EXPECT_EQ(state->tokens(), 150 * i);  // waits
    const Tensor replayed = stream.rows();
    stream.append(plain, 0, 150);
    EXPECT_EQ(first_difference(stream.rows(), 0, replayed), "") << "replay " << i;
    EXPECT_EQ(saved(state), saved(plain)) << "replay " << i;
  }
  cudaGraphExecDestroy(program);
  cudaGraphDestroy(graph);
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
