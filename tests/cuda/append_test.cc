// Appending to a decode state on a device: the rows are those of the CPU's causal forward, in any
// pieces, ragged, long, by every kernel, and replayed.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "decode_stream.h"
#include "expect_error.h"

namespace lln::test {
namespace {

class CudaAppend : public OnDevice {};

TEST_F(CudaAppend, RandomPiecesGiveTheCausalForward) {
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

TEST_F(CudaAppend, LongAppendsGiveTheCausalForward) {
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
TEST_F(CudaAppend, AppendsGoFromKernelToKernel) {
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
        const bool walks = end - begin >= 64;
        stream.append(state, begin, end, true, {.kernel = walks ? kernel : "cuda"});
        begin = end;
      }
      EXPECT_EQ(first_difference(stream.rows(), tolerance(stream), expected), "")
          << problem << " by " << kernel;
      EXPECT_EQ(state->tokens(), 600);
      return stream.rows();
    };
    const Tensor plain = append_by("cuda");
    ASSERT_FALSE(walks(problem).empty());
    for (const std::string& kernel : walks(problem)) {
      EXPECT_NE(first_difference(append_by(kernel), 0, plain), "") << kernel << " did not run";
    }
  }
}

// Longer than what one block walks.
TEST_F(CudaAppend, PromptsOfSeveralPiecesGoOnFromWhatIsThere) {
  constexpr const char* kProblem = "append:bf16:cpu:b1h2k1n9300d16:lln";
  Stream stream(kProblem, [](Inputs& in) {  // what is left out is missed
    in.v.for_each([&](auto b, auto h, auto n, auto channel) {
      in.v.set(b, h, n, channel, in.v.get(b, h, n, channel) + (n < 4000 ? 3 : -3));
    });
  });
  ASSERT_FALSE(walks(kProblem).empty());
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

// What a state of so many sequences saves of one of them, but for its count of tokens.
std::vector<std::byte> sums_of(OwnedState& state, std::size_t batch, std::size_t sequence) {
  constexpr std::size_t kHead = 80, kCount = 8, kChecksum = 8;  // docs/decoding.md
  const std::vector<std::byte> bytes = saved(state);
  const std::size_t begin = kHead + batch * kCount;
  const std::size_t each = (bytes.size() - begin - kChecksum) / batch;
  const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(begin + sequence * each);
  return {from, from + static_cast<std::ptrdiff_t>(each)};
}

// A sequence gives the same bits alone and in a batch whose other sequences add more or fewer; here
// all have 10 tokens already, which end inside of a block.
TEST_F(CudaAppend, RaggedSequencesAreBitwiseThoseAlone) {
  for (const char* problem :
       {"append:f32:cpu:b6h4k2n700d24:lln", "append:f32:cpu:b6h4k2n700d24:lln+diag24",
        "append:bf16:cpu:b6h4k2n700d24:lln", "append:bf16:cpu:b6h4k2n700d64:lln+diag32"}) {
    // Of 80 fewer than 64 lie behind the border of a block of 32.
    const std::vector<std::int32_t> lengths = {700, 3, 270, 0, 40, 80};
    Stream stream(problem, [&](Inputs& in) {
      for (Tensor* tensor : {&in.q, &in.k, &in.v}) {
        tensor->for_each([&](auto b, auto h, auto n, auto channel) {
          const bool behind = n >= std::max(10, lengths[static_cast<std::size_t>(b)]);
          if (behind) tensor->set(b, h, n, channel, std::numeric_limits<double>::quiet_NaN());
        });
      }
    });
    const auto size = static_cast<std::int64_t>(size_of(stream.c.problem.dtype));
    const DeviceLengths device_lengths(lengths);
    AttentionInputs in = stream.views().in;
    in.key_lengths = device_lengths.view();
    OwnedState state(stream.config, kDevice);
    stream.append(state, 0, 10);
    state->append(in, stream.views().out.o);
    const Tensor together = stream.rows();

    DecodeConfig one = stream.config;
    one.batch = 1;
    for (std::int64_t b = 0; b < 6; ++b) {
      const std::int64_t length = lengths[static_cast<std::size_t>(b)];
      EXPECT_EQ(state->tokens(b), 10 + length);
      OwnedState alone(one, kDevice);
      AttentionInputs own = in;
      own.key_lengths = {};
      const auto sequence = [&](auto view, std::int64_t tokens) {
        using Byte =
            std::conditional_t<std::is_same_v<decltype(view), View>, std::byte, const std::byte>;
        const std::int64_t at = b * view.stride[0] * size;
        view.data = static_cast<Byte*>(view.data) + at;
        view.shape[0] = 1;
        view.shape[2] = tokens;
        return view;
      };
      for (const std::int64_t tokens : {std::int64_t{10}, length}) {
        own.q = sequence(in.q, tokens);
        own.k = sequence(in.k, tokens);
        own.v = sequence(in.v, tokens);
        if (tokens > 0) alone->append(own, sequence(stream.views().out.o, tokens));
      }
      const Tensor& rows = stream.rows();
      EXPECT_EQ(
          first_difference(together, 0,
                           [&](auto s, auto h, auto n, auto channel) {
                             if (s != b) return std::optional<double>();
                             return std::optional(n < length ? rows.get(s, h, n, channel) : 0.0);
                           }),
          "")
          << problem << ", sequence " << b;
      EXPECT_EQ(sums_of(state, 6, b), sums_of(alone, 1, 0)) << problem << ", sequence " << b;
    }
  }
}

TEST_F(CudaAppend, LengthsOutOfRangeAreReportedAndCut) {
  Stream stream("append:f32:cpu:b2h2n40d16:lln+diag16");
  const DeviceLengths<std::int64_t> lengths({41, -7});
  AttentionInputs in = stream.views().in;
  in.key_lengths = lengths.view();
  OwnedState state(stream.config, kDevice);
  state->append(in, stream.views().out.o);
  expect_error([&] { state->tokens(); }, {"key_lengths"});
  state.check_guards();
  EXPECT_EQ(state->tokens(0), 40);
  EXPECT_EQ(state->tokens(1), 0);
}

TEST_F(CudaAppend, NaNScaleStaysInItsHead) {
  for (const char* problem :
       {"append:bf16:cpu:b2h4k2n200d64:lln", "append:bf16:cpu:b2h4k2n200d64:lln+diag32"}) {
    Case c = make_case(problem);
    c.parameters = conformance::ParameterForm::sequence;
    Stream whole(c), broken(c, [](Inputs&in) {
      in.alpha.set(1, 2, 0, 0, std::numeric_limits<double>::quiet_NaN());
    });
    OwnedState state(whole.config, kDevice), other(broken.config, kDevice);
    whole.append(state, 0, 200);
    broken.append(other, 0, 200);
    const Tensor& expected = whole.rows();
    broken.rows().for_each([&](auto b, auto h, auto n, auto channel) {
      const double found = broken.rows().get(b, h, n, channel);
      if (b == 1 && h == 2) {
        EXPECT_TRUE(std::isnan(found)) << problem;
      } else if (b != 1 || h != 3) {  // which shares its keys, and may go with it to other kernels
        EXPECT_EQ(found, expected.get(b, h, n, channel)) << problem << ", head " << h;
      }
    });
  }
}

// Where the next border of a block is changes from replay to replay.
TEST_F(CudaAppend, ReplayedAppendsGoOn) {
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

}  // namespace
}  // namespace lln::test
