// Wrong calls: one Error that names every fault with the values found, and outputs that keep every
// bit that they had.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention_run.h"
#include "expect_error.h"

namespace lln::test {
namespace {

using Texts = std::vector<std::string>;

// A call of LLN+Diag whose views a test breaks.
struct BrokenCall {
  explicit BrokenCall(const char* problem = "forward:f32:cpu:b2h4k2n6d3v5:lln+diag2")
      : c(make_case(problem)), inputs(conformance::make_inputs(c, c.problem.dtype)) {
    c.parameter_gradients = true;
    outputs = conformance::make_outputs(c, inputs, c.problem.dtype);
    in = inputs.views();
    out = conformance::forward_views(outputs);
    grads = conformance::backward_views(outputs, inputs);
    options = conformance::options(c);
  }

  void run() const {
    if (c.problem.op == Op::forward) {
      attention_forward(in, out, options, exec);
    } else {
      attention_backward(in, grads, options, exec);
    }
  }

  bool outputs_untouched() const {  // new tensors hold nothing but 0xFF
    for (const TensorSet::Entry& entry : outputs.entries()) {
      for (const std::byte byte : entry.tensor.bytes()) {
        if (byte != std::byte{0xFF}) return false;
      }
    }
    return true;
  }

  Case c;
  Inputs inputs;
  TensorSet outputs;
  AttentionInputs in;
  AttentionOutputs out;
  AttentionGradients grads;
  AttentionOptions options;
  Exec exec;
};

void expect_error(const BrokenCall& call, const Texts& texts,
                  ErrorCode code = ErrorCode::invalid_argument) {
  test::expect_error([&] { call.run(); }, texts, code);
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(Errors, TheUnbrokenCallRuns) {
  for (const char* op : {"forward", "backward"}) {
    BrokenCall call((std::string(op) + ":f32:cpu:b2h4k2n6d3v5:lln+diag2").c_str());
    EXPECT_NO_THROW(call.run());
    EXPECT_FALSE(call.outputs_untouched());
  }
}

TEST(Errors, MismatchedShapes) {
  BrokenCall call;
  call.in.k.shape[3] = 4;
  call.in.v.shape[2] = 7;
  call.out.o.shape[3] = 6;
  expect_error(call, {"attention_forward", "3 faults", "forward:f32:cpu:b2h4k2n6d3v5:lln+diag2",
                      "k has shape [2, 2, 6, 4]: expected [2, 2, 6, 3]",
                      "v has shape [2, 2, 7, 5]: expected [2, 2, 6, 5]",
                      "o has shape [2, 4, 6, 6]: expected [2, 4, 6, 5]"});
}

TEST(Errors, MismatchedTypesAndDevices) {
  BrokenCall call;
  call.in.k.dtype = DType::bf16;
  call.in.v.device = {DeviceKind::cuda, 1};
  call.in.alpha.dtype = DType::f16;
  expect_error(call, {"3 faults", "k is bf16: expected f32", "v is on cuda:1: expected cpu",
                      "alpha is f16: expected f32"});
}

TEST(Errors, MissingTensors) {
  BrokenCall call;
  call.in.v = {};
  call.in.beta = {};
  call.out.o.data = nullptr;
  expect_error(call,
               {"v is not given", "beta is not given", "o has elements but its data is null"});
}

TEST(Errors, ChannelsMustBeContiguous) {
  BrokenCall call;
  call.in.q.stride[3] = 2;
  call.out.o.stride[3] = -1;
  expect_error(call, {"2 faults", "q has stride 2 between channels: expected 1",
                      "o has stride -1 between channels: expected 1"});
}

TEST(Errors, OutputsMustNotOverlap) {
  BrokenCall call;
  call.out.o.stride[1] = 0;
  expect_error(call, {"o is written and must not have stride 0 in dimension 1 of size 4"});
  BrokenCall alias("forward:f32:cpu:b1h2n6d3:softmax");
  alias.out.o.data = const_cast<void*>(alias.in.q.data);
  expect_error(alias, {"o and q start at the same address"});
}

TEST(Errors, ChannelsAndHeadsOutOfRange) {
  BrokenCall call;
  call.in.q.shape[3] = call.in.k.shape[3] = 0;
  call.in.k.shape[1] = call.in.v.shape[1] = 3;
  expect_error(call, {"channels of q and k must be 1 to 256: 0",
                      "query heads must be a multiple of key heads: 4 and 3"});
  BrokenCall wide;
  wide.in.v.shape[3] = wide.out.o.shape[3] = 257;
  expect_error(wide, {"channels of v must be 1 to 256: 257"});
}

TEST(Errors, AlphaAndBetaMustBeFinite) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    BrokenCall call;
    call.inputs.alpha.set(0, 2, 0, 0, bad);
    call.inputs.beta.set(0, 1, 0, 0, bad);
    const std::string value = std::isnan(bad) ? "nan" : "inf";
    expect_error(call, {"2 faults", "alpha[0, 2, 0, 0] is " + value + ": expected a finite number",
                        "beta[0, 1, 0, 0] is " + value});
  }
  BrokenCall call;
  call.in.alpha.shape = {2, 3, 1, 1};
  expect_error(call, {"alpha has shape [2, 3, 1, 1]: expected [2 or 1, 4 or 1, 1, 1]"});
}

TEST(Errors, Weights) {
  const float half = 0.5F;
  BrokenCall both;
  both.in.mix = scalar(&half);
  both.in.lln_weight = scalar(&half);
  expect_error(both, {"mix and lln_weight or diag_weight are both given",
                      "lln_weight and diag_weight go together"});
  BrokenCall shape;
  shape.in.mix = view(&half, {1, 2, 1, 1});
  expect_error(shape, {"mix has shape [1, 2, 1, 1]", "[1, 4, 1, 1] per head",
                       "[1, 4, 1, 5] per head and channel", "[2, 4, 6, 1] per head and token"});
  BrokenCall constant;
  constant.options.mix = std::numeric_limits<float>::quiet_NaN();
  expect_error(constant, {"mix is nan: expected a finite number"});
}

// Weights per token are data like q, k and v, and nobody reads those twice to check them.
TEST(Errors, WeightsMustBeFinite) {
  struct Form {
    Shape shape;
    std::size_t at;
    const char* index;
  };
  const Form forms[] = {{{1, 1, 1, 1}, 0, "[0, 0, 0, 0]"},
                        {{1, 4, 1, 1}, 2, "[0, 2, 0, 0]"},
                        {{1, 4, 1, 5}, 13, "[0, 2, 0, 3]"}};
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::pair<float, const char*> values[] = {
      {std::numeric_limits<float>::quiet_NaN(), "nan"}, {kInfinity, "inf"}, {-kInfinity, "-inf"}};
  for (const auto& [shape, at, index] : forms) {
    for (const auto& [value, text] : values) {
      const std::vector<float> good(20, 0.5F);
      std::vector<float> bad = good;
      bad[at] = value;
      const std::string fault = fmt::format("{} is {}: expected a finite number", index, text);
      for (const char* op : {"forward", "backward"}) {
        BrokenCall call((std::string(op) + ":f32:cpu:b2h4k2n6d3v5:lln+diag2").c_str());
        call.in.mix = view(bad.data(), shape);
        expect_error(call, {"mix" + fault});
        call.in.mix = {};
        call.in.lln_weight = view(bad.data(), shape);
        call.in.diag_weight = view(good.data(), shape);
        expect_error(call, {"lln_weight" + fault});
        std::swap(call.in.lln_weight, call.in.diag_weight);
        expect_error(call, {"diag_weight" + fault});
      }
    }
  }
}

TEST(Errors, WeightsOfTokensAreNotChecked) {
  std::vector<float> weights(48, 0.5F);  // [2, 4, 6, 1]
  weights[7] = std::numeric_limits<float>::quiet_NaN();
  BrokenCall call;
  call.in.mix = view(weights.data(), {2, 4, 6, 1});
  EXPECT_NO_THROW(call.run());
  const Tensor& o = call.outputs.at("o");
  o.for_each([&](auto b, auto h, auto n, auto c) {
    EXPECT_EQ(std::isnan(o.get(b, h, n, c)), b == 0 && h == 1 && n == 1) << b << h << n << c;
  });
}

TEST(Errors, KeyLengthsAndMasks) {
  const std::vector<std::int32_t> lengths = {7, -1};
  const std::vector<std::uint8_t> mask(12, 1);
  BrokenCall range;
  range.in.key_lengths = IndexView(std::span(lengths));
  expect_error(range, {"key_lengths[0] is 7: expected 0 to 6", "key_lengths[1] is -1"});
  BrokenCall count;
  count.in.key_lengths = IndexView(std::span(lengths).first(1));
  count.in.key_mask = mask_view(mask.data(), 2, 5);
  expect_error(count, {"key_lengths and key_mask are both given", "key_lengths has 1 entries",
                       "key_mask has shape [2, 5]: expected [2, 6]"});
}

TEST(Errors, CumulativeLengths) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::string>> wrong = {
      {{1, 6}, "cu_seqlens_q[0] is 1: expected 0"},
      {{0, 4, 3, 6}, "cu_seqlens_q[2] is 3: expected at least the entry before it, 4"},
      {{0, 9, 6}, "cu_seqlens_q[1] is 9: expected at most the number of tokens, 6"},
      {{0, 4}, "cu_seqlens_q[1] is 4: expected the number of tokens, 6"},
  };
  for (const auto& [cu, text] : wrong) {
    BrokenCall call("forward:f32:cpu:b1h2n6d3:softmax");
    call.in.cu_seqlens_q = IndexView(std::span(cu));
    expect_error(call, {text});
  }
  const std::vector<std::int64_t> cu = {0, 2, 6};
  BrokenCall batch;
  batch.in.cu_seqlens_q = IndexView(std::span(cu));
  expect_error(batch, {"packed sequences need batch 1: batch 2"});
  const std::vector<std::int64_t> other = {0, 3, 6};
  BrokenCall causal("forward:f32:cpu:b1h2n6d3:softmax:causal");
  causal.in.cu_seqlens_q = IndexView(std::span(cu));
  causal.in.cu_seqlens_k = IndexView(std::span(other));
  expect_error(causal, {"cu_seqlens_q[1] is 2 and cu_seqlens_k[1] is 3"});
}

TEST(Errors, CrossAttentionOfCausalAndDiag) {
  BrokenCall call("forward:f32:cpu:b1h2n6m8d3:softmax");
  call.options.causal = true;
  expect_error(call, {"causal attention needs as many keys as queries", "6 queries, 8 keys"});
  call.options = {.kind = Kind::diag, .diag_block = 2};
  expect_error(call, {"block-diagonal attention needs as many keys as queries"});
}

TEST(Errors, StatesOfOtherKeys) {
  float number = 0;
  BrokenCall shape("forward:f32:cpu:b2h4k2n6d3v5:lln:state");
  shape.in.state.key_lse.shape[3] = 2;
  shape.in.state.channel_values.dtype = DType::f64;
  expect_error(shape, {"state.key_lse has shape [2, 2, 1, 2]: expected [2, 2, 1, 3]",
                       "state.channel_values is f64: expected f32"});
  BrokenCall half("backward:f32:cpu:b2h4k2n6d3v5:lln:state");
  half.in.state.key_lse = {};
  half.grads.dsaved.channel_values = {};
  half.grads.dstate.key_lse = {};
  expect_error(half, {"state.key_lse and state.channel_values go together",
                      "dsaved.key_lse and dsaved.channel_values go together",
                      "dstate.key_lse and dstate.channel_values go together"});
  BrokenCall unasked("backward:f32:cpu:b2h4k2n6d3v5:lln:state");
  unasked.in.state = {};
  expect_error(unasked, {"dstate is asked for but state is not given"});
  BrokenCall kind("forward:f32:cpu:b2h4k2n6d3v5:softmax");
  kind.in.state = {view(&number, {2, 2, 1, 3}), view(&number, {2, 2, 3, 5})};
  expect_error(kind, {"state belongs to LLN"});
  BrokenCall overlap("forward:f32:cpu:b2h4k2n6d3v5:lln:state");
  overlap.out.saved = {overlap.inputs.state_lse.view(), overlap.inputs.state_values.view()};
  expect_error(overlap, {"saved.key_lse and state.key_lse start at the same address"});
}

TEST(Errors, BlockOrigins) {
  const std::vector<std::int64_t> three = {-5, 0, 1000};
  BrokenCall count;
  count.in.block_origins = IndexView(std::span(three));
  expect_error(count, {"lln+diag2:block_origins", "1 fault",
                       "block_origins has 3 entries: expected one per sequence, 2"});
  BrokenCall kind("backward:f32:cpu:b3h4k2n6d3v5:lln");
  kind.in.block_origins = on(cuda_device(), IndexView(std::span(three)));
  expect_error(kind, {"2 faults", "block_origins belongs to Diag and LLN+Diag; lln has no blocks",
                      "block_origins is on cuda: expected cpu"});
  BrokenCall null("forward:f32:cpu:b3h4k2n6d3v5:diag2");
  null.in.block_origins = IndexView(std::span(three));
  null.in.block_origins.data = nullptr;
  expect_error(null, {"1 fault", "block_origins has entries but its data is null"});
}

TEST(Errors, SavedStateAndGradients) {
  float number = 0;
  BrokenCall half;
  half.out.saved.key_lse = view(&number, {2, 2, 1, 3});
  expect_error(half, {"saved.key_lse and saved.channel_values go together"});
  BrokenCall grads("backward:f32:cpu:b2h4k2n6d3v5:lln+diag2");
  grads.grads.dmix = view(&number, {1, 1, 1, 1});
  grads.grads.dq.shape[2] = 5;
  grads.grads.g = {};
  expect_error(grads, {"dmix is asked for but mix is not given", "g is not given",
                       "dq has shape [2, 4, 5, 3]: expected [2, 4, 6, 3]"});
}

TEST(Errors, WorkspaceTooSmall) {
  for (const char* op : {"forward", "backward"}) {
    BrokenCall call((std::string(op) + ":f32:cpu:b2h4k2n6d3v5:lln+diag2").c_str());
    const std::size_t needed = workspace_bytes(call.c.problem);
    if (needed < 2) GTEST_SKIP() << "the default kernel needs no workspace";
    std::vector<std::byte> workspace(needed - 1);
    call.exec.workspace = workspace;
    expect_error(call, {"workspace of " + std::to_string(needed - 1) + " bytes is too small",
                        std::to_string(needed) + " bytes"});
  }
}

// On devices as well, whether there is one or not: views are checked before one is asked.
TEST(Errors, DifferentDevices) {
  BrokenCall call("forward:f32:cpu:b1h2n6d3:lln");
  for (ConstView* view : {&call.in.q, &call.in.k, &call.in.alpha}) *view = on(cuda_device(), *view);
  call.in.v = on(cuda_device(1), call.in.v);
  expect_error(call, {"3 faults in forward:f32:cuda:", "v is on cuda:1: expected cuda",
                      "beta is on cpu: expected cuda", "o is on cpu: expected cuda"});
}

// The numbers of lists in device memory cannot be read, but how many there are is known.
TEST(Errors, ListsOnADevice) {
  const auto on_device = [](BrokenCall& call) {
    for (ConstView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.alpha, &call.in.beta}) {
      *view = on(cuda_device(), *view);
    }
    call.out.o = on(cuda_device(), call.out.o);
  };
  const std::vector<std::int32_t> list = {0, 6};
  BrokenCall packed("forward:f32:cpu:b1h2n6d3:lln");
  on_device(packed);
  packed.in.cu_seqlens_q = on(cuda_device(), IndexView(std::span(list).first(1)));
  packed.in.cu_seqlens_k = on(cuda_device(), IndexView(std::span(list)));
  expect_error(packed, {"cu_seqlens_q has one entry, which is no sequence",
                        "cu_seqlens_q has 1 entries and cu_seqlens_k 2: expected as many"});
  packed.in.cu_seqlens_q = IndexView(std::span(list));
  expect_error(packed, {"1 fault", "cu_seqlens_q is on cpu: expected cuda"});
  BrokenCall padded("forward:f32:cpu:b1h2n6d3:lln");
  on_device(padded);
  padded.in.key_lengths = on(cuda_device(), IndexView(std::span(list)));
  expect_error(padded, {"1 fault", "key_lengths has 2 entries: expected one per batch element, 1"});
}

TEST(Errors, NoSuchDevice) {
  BrokenCall call("forward:f32:cpu:b1h2n6d3:softmax");
  for (ConstView* view : {&call.in.q, &call.in.k, &call.in.v}) *view = on(cuda_device(60), *view);
  call.out.o = on(cuda_device(60), call.out.o);
  expect_error(call, {"no kernel takes forward:f32:cuda:60:"}, ErrorCode::unsupported);
}

TEST(Errors, KernelNames) {
  BrokenCall unknown;
  unknown.exec.kernel = "cpu-none";
  expect_error(unknown, {"unknown kernel 'cpu-none'", "reference"});
  BrokenCall device("forward:f32:cpu:b1h2n6d3:softmax");
  for (ConstView* view : {&device.in.q, &device.in.k, &device.in.v}) {
    view->device.kind = DeviceKind::cuda;
  }
  device.out.o.device.kind = DeviceKind::cuda;
  expect_error(device, {"no kernel takes forward:f32:cuda:", "reference: runs on cpu"},
               ErrorCode::unsupported);
  device.exec.kernel = "reference";
  expect_error(device, {"kernel reference does not take", "runs on cpu"}, ErrorCode::unsupported);
}

}  // namespace
}  // namespace lln::test
