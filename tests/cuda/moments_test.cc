// Moments and matching on a device against the CPU's: all dtypes and sizes, layouts and addresses
// that no vector load fits, lengths, masks and packed sequences; running moments; NaN that stays in
// its head; and matching with the attention that follows in one graph.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <deque>
#include <limits>

#include "device_run.h"
#include "expect_error.h"
#include "lln/moments.h"

namespace lln::test {
namespace {

using conformance::Layout;

class CudaMoments : public OnDevice {};

Tensor normal_tensor(std::uint64_t seed, DType dtype, const Shape& shape, double mean = 0,
                     double sigma = 1, Layout layout = Layout::bhnd) {
  Tensor x(dtype, shape, layout);
  std::uint64_t index = 0;
  x.for_each([&](auto b, auto h, auto n, auto c) {
    x.set(b, h, n, c, mean + sigma * conformance::normal_number(seed, index++));
  });
  return x;
}

// Copies on the device, and views of them.
class Copies {
 public:
  ConstView of(const Tensor& x, std::size_t shift = 0) {
    ConstView view = on(kDevice, x.view());
    view.data = place(std::as_bytes(std::span(x.bytes())), shift * size_of(x.dtype()));
    return view;
  }
  template <class T>
  IndexView of(const std::vector<T>& values) {
    IndexView view = on(kDevice, IndexView(std::span<const T>(values)));
    view.data = place(std::as_bytes(std::span(values)), 0);
    return view;
  }
  MaskView mask(const std::vector<std::uint8_t>& bytes, std::int64_t batch, std::int64_t tokens) {
    return on(
        kDevice,
        mask_view(reinterpret_cast<const std::uint8_t*>(place(std::as_bytes(std::span(bytes)), 0)),
                  batch, tokens));
  }
  // Memory for an output that is read back by fetch().
  View output(Tensor& x) {
    View view = on(kDevice, x.view());
    view.data = place(std::as_bytes(std::span(x.bytes())), 0);
    return view;
  }
  void fetch(Tensor& x, const View& from) {
    for (const DeviceMemory& memory : memory_) {
      if (memory.data() == from.data) memory.read(x.writable_bytes());
    }
  }

 private:
  std::byte* place(std::span<const std::byte> bytes, std::size_t shift) {
    memory_.emplace_back(kDevice, bytes.size(), shift);
    memory_.back().write(bytes);
    return memory_.back().data();
  }
  std::deque<DeviceMemory> memory_;
};

void expect_near(std::span<const Moments> found, std::span<const Moments> expected,
                 const std::string& what) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double sigma = std::sqrt(expected[i].variance());
    EXPECT_EQ(found[i].count, expected[i].count) << what << ", head " << i;
    EXPECT_NEAR(found[i].mean, expected[i].mean, 1e-6 * sigma) << what << ", head " << i;
    EXPECT_NEAR(found[i].m2, expected[i].m2, 1e-6 * expected[i].m2) << what << ", head " << i;
  }
}

TEST_F(CudaMoments, HeadsOfEverySizeAreTheCpus) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t dim : {1, 7, 64, 100, 256}) {
      for (const std::int64_t tokens : {0, 1, 63, 700, 5000}) {
        if (tokens == 5000 && dim > 64) continue;
        for (const std::size_t shift : {0, 1}) {
          const Tensor x = normal_tensor(1, dtype, {2, 3, tokens, dim}, 3, 0.5,
                                         tokens == 700 ? Layout::bnhd : Layout::bhnd);
          Copies copies;
          std::vector<Moments> found(6, {-1, 0, 0}), expected(6);
          head_moments({.x = copies.of(x, shift)}, found);
          head_moments({.x = x.view()}, expected);
          expect_near(found, expected,
                      fmt::format("{} {} shift {}", to_string(dtype), to_string(x.shape()), shift));
        }
      }
    }
  }
}

TEST_F(CudaMoments, LargeMeansCostNothing) {
  const Tensor x = normal_tensor(2, DType::f32, {1, 2, 3000, 64}, 1e4, 1);
  Copies copies;
  std::vector<Moments> found(2), expected(2);
  head_moments({.x = copies.of(x)}, found);
  head_moments({.x = x.view()}, expected);
  expect_near(found, expected, "mean 1e4");
}

TEST_F(CudaMoments, LengthsMasksAndPacking) {
  Tensor x = normal_tensor(3, DType::bf16, {3, 2, 1500, 32});
  const std::vector<std::int32_t> lengths = {1500, 0, 700};
  Copies copies;
  std::vector<Moments> found(6), expected(6);
  head_moments({.x = copies.of(x), .lengths = copies.of(lengths)}, found);
  head_moments({.x = x.view(), .lengths = IndexView(std::span<const std::int32_t>(lengths))},
               expected);
  expect_near(found, expected, "lengths");

  std::vector<std::uint8_t> mask(3 * 1500);
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % 1500 > 40 && i % 3 != 0 && i < 4000;
  // What does not count is not read.
  for (std::int64_t n = 0; n < 1500; ++n) {
    if (mask[static_cast<std::size_t>(n)] == 0) {
      x.set(0, 1, n, 5, std::numeric_limits<double>::quiet_NaN());
    }
  }
  head_moments({.x = copies.of(x), .mask = copies.mask(mask, 3, 1500)}, found);
  head_moments({.x = x.view(), .mask = mask_view(mask.data(), 3, 1500)}, expected);
  expect_near(found, expected, "mask");

  const Tensor packed = normal_tensor(4, DType::f32, {1, 2, 6000, 16});
  const std::vector<std::int64_t> cu = {0, 0, 700, 705, 6000};
  found.assign(8, {});
  expected.assign(8, {});
  head_moments({.x = copies.of(packed), .cu_seqlens = copies.of(cu)}, found);
  head_moments({.x = packed.view(), .cu_seqlens = IndexView(std::span<const std::int64_t>(cu))},
               expected);
  expect_near(found, expected, "packed");
}

struct Matched {
  Tensor alpha, beta;
};

Matched match_on_host(const MatchingInputs& in, const MatchingOptions& options,
                      std::int64_t sequences) {
  Matched m{Tensor(DType::f32, {sequences, in.q.shape[1], 1, 1}),
            Tensor(DType::f32, {sequences, in.k.shape[1], 1, 1})};
  match_moments(in, {m.alpha.view(), m.beta.view()}, options);
  return m;
}

Matched match_on_device(const MatchingInputs& in, const MatchingOptions& options,
                        std::int64_t sequences, const Exec& exec = {}) {
  Matched m{Tensor(DType::f32, {sequences, in.q.shape[1], 1, 1}),
            Tensor(DType::f32, {sequences, in.k.shape[1], 1, 1})};
  Copies copies;
  const MatchingOutputs out{copies.output(m.alpha), copies.output(m.beta)};
  const MatchingReport report = match_moments(in, out, options, exec);
  EXPECT_TRUE(report.clamped.empty());
  copies.fetch(m.alpha, out.alpha);
  copies.fetch(m.beta, out.beta);
  return m;
}

void expect_matched(const Matched& found, const Matched& expected, const std::string& what) {
  EXPECT_EQ(first_difference(found.alpha, 2e-6, expected.alpha), "") << what << ", alpha";
  EXPECT_EQ(first_difference(found.beta, 2e-6, expected.beta), "") << what << ", beta";
}

TEST_F(CudaMoments, ModesGiveTheCpusScales) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor q = normal_tensor(5, dtype, {2, 6, 900, 64}, 0, 0.7);
    const Tensor k = normal_tensor(6, dtype, {2, 2, 900, 64}, 0.3, 1.3);
    const Tensor alpha = normal_tensor(7, DType::f32, {1, 6, 1, 1}),
                 beta = normal_tensor(8, DType::f32, {2, 1, 1, 1});
    Copies copies;
    const MatchingInputs host{.q = q.view(), .k = k.view()};
    const MatchingInputs device{.q = copies.of(q), .k = copies.of(k)};
    for (const Matching mode : {Matching::none, Matching::paper, Matching::per_head,
                                Matching::exact, Matching::entropy}) {
      expect_matched(match_on_device(device, {.mode = mode}, 2),
                     match_on_host(host, {.mode = mode}, 2), to_string(mode));
    }
    MatchingInputs frozen_host = host, frozen = device;
    frozen_host.alpha = alpha.view();
    frozen_host.beta = beta.view();
    frozen.alpha = copies.of(alpha);
    frozen.beta = copies.of(beta);
    expect_matched(match_on_device(frozen, {.mode = Matching::frozen}, 2),
                   match_on_host(frozen_host, {.mode = Matching::frozen}, 2), "frozen");
    const MatchingOptions own{.constants = MatchingConstants{0.2, 0.5}};
    expect_matched(match_on_device(device, own, 2), match_on_host(host, own, 2), "constants");
  }
}

TEST_F(CudaMoments, WhichTokensCountInMatching) {
  const Tensor q = normal_tensor(9, DType::f32, {2, 2, 800, 16}),
               k = normal_tensor(10, DType::f32, {2, 2, 800, 16}, 0, 2);
  Copies copies;
  const std::vector<std::int64_t> lengths = {800, 37};
  std::vector<std::uint8_t> mask(1600), query_mask(1600);
  for (std::size_t i = 0; i < 1600; ++i) {
    mask[i] = i % 5 != 1;
    query_mask[i] = i % 800 > 400;
  }
  const MatchingInputs plain_host{.q = q.view(), .k = k.view()};
  const MatchingInputs plain{.q = copies.of(q), .k = copies.of(k)};
  MatchingInputs host = plain_host, device = plain;
  host.key_lengths = IndexView(std::span<const std::int64_t>(lengths));
  device.key_lengths = copies.of(lengths);
  for (const bool cross : {false, true}) {
    host.cross = device.cross = cross;
    expect_matched(match_on_device(device, {}, 2), match_on_host(host, {}, 2),
                   cross ? "lengths, cross" : "lengths");
  }
  host = plain_host;
  device = plain;
  host.key_mask = mask_view(mask.data(), 2, 800);
  device.key_mask = copies.mask(mask, 2, 800);
  expect_matched(match_on_device(device, {}, 2), match_on_host(host, {}, 2), "mask");
  host.query_mask = mask_view(query_mask.data(), 2, 800);
  device.query_mask = copies.mask(query_mask, 2, 800);
  expect_matched(match_on_device(device, {}, 2), match_on_host(host, {}, 2), "query mask");

  const Tensor one_q = normal_tensor(11, DType::f32, {1, 2, 900, 16}),
               one_k = normal_tensor(12, DType::f32, {1, 2, 1000, 16});
  const std::vector<std::int32_t> cu_q = {0, 600, 600, 900}, cu_k = {0, 10, 700, 1000};
  const MatchingInputs packed_host{.q = one_q.view(),
                                   .k = one_k.view(),
                                   .cu_seqlens_q = IndexView(std::span<const std::int32_t>(cu_q)),
                                   .cu_seqlens_k = IndexView(std::span<const std::int32_t>(cu_k))};
  const MatchingInputs packed{.q = copies.of(one_q),
                              .k = copies.of(one_k),
                              .cu_seqlens_q = copies.of(cu_q),
                              .cu_seqlens_k = copies.of(cu_k)};
  expect_matched(match_on_device(packed, {}, 3), match_on_host(packed_host, {}, 3), "packed");
}

// Batch neighbours change no bit, whatever their lengths.
TEST_F(CudaMoments, NeighboursChangeNoBit) {
  const Tensor q = normal_tensor(13, DType::bf16, {3, 2, 5000, 16}),
               k = normal_tensor(14, DType::bf16, {3, 2, 5000, 16});
  const std::vector<std::int64_t> lengths = {5000, 4100, 500};
  Copies copies;
  MatchingInputs all{.q = copies.of(q), .k = copies.of(k), .key_lengths = copies.of(lengths)};
  const Matched together = match_on_device(all, {}, 3);
  for (std::int64_t b = 0; b < 3; ++b) {
    MatchingInputs own{.q = all.q, .k = all.k};
    for (ConstView* view : {&own.q, &own.k}) {
      view->data = static_cast<const std::byte*>(view->data) + 2 * b * view->stride[0];
      view->shape[0] = 1;
      view->shape[2] = lengths[static_cast<std::size_t>(b)];
    }
    const Matched alone = match_on_device(own, {}, 1);
    for (std::int64_t h = 0; h < 2; ++h) {
      EXPECT_EQ(together.alpha.get(b, h, 0, 0), alone.alpha.get(0, h, 0, 0)) << b;
      EXPECT_EQ(together.beta.get(b, h, 0, 0), alone.beta.get(0, h, 0, 0)) << b;
    }
  }
}

TEST_F(CudaMoments, NaNStaysInItsHead) {
  Tensor q = normal_tensor(15, DType::f32, {2, 4, 300, 8}),
         k = normal_tensor(16, DType::f32, {2, 2, 300, 8});
  const MatchingInputs host{.q = q.view(), .k = k.view()};
  const Matched expected = match_on_host(host, {}, 2);
  q.set(1, 1, 299, 7, std::numeric_limits<double>::infinity());
  k.set(0, 1, 3, 0, std::numeric_limits<double>::quiet_NaN());
  Copies copies;
  const Matched found = match_on_device({.q = copies.of(q), .k = copies.of(k)}, {}, 2);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      const bool spoilt = (b == 1 && h < 2) || (b == 0 && h >= 2);
      EXPECT_EQ(std::isnan(found.alpha.get(b, h, 0, 0)), spoilt) << b << ' ' << h;
      EXPECT_EQ(std::isnan(found.beta.get(b, h / 2, 0, 0)), spoilt) << b << ' ' << h;
      if (spoilt) continue;
      EXPECT_NEAR(found.alpha.get(b, h, 0, 0), expected.alpha.get(b, h, 0, 0), 2e-6);
    }
  }
}

TEST_F(CudaMoments, RunningMomentsOnTheDevice) {
  Tensor heads(DType::f64, {1, 2, 2, 3});
  heads.for_each([&](auto b, auto h, auto n, auto c) { heads.set(b, h, n, c, 0); });
  Copies copies;
  const DeviceRunningMoments running{.decay = 0.9, .heads = copies.output(heads)};
  RunningMoments host{.decay = 0.9};
  const MatchingOptions on_host{.mode = Matching::ema, .causal = true, .running = &host};
  const MatchingOptions on_the_device{
      .mode = Matching::ema, .causal = true, .running_on_device = &running};
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Tensor q = normal_tensor(20 + step, DType::f32, {3, 4, 200, 16}, 0, 1 + 0.1 * step),
                 k = normal_tensor(30 + step, DType::f32, {3, 2, 200, 16}, 0.5, 0.8);
    const MatchingInputs from{.q = q.view(), .k = k.view()};
    const MatchingInputs device{.q = copies.of(q), .k = copies.of(k)};
    expect_matched(match_on_device(device, on_the_device, 3), match_on_host(from, on_host, 3),
                   fmt::format("step {}", step));
    update_moments(host, from);
    update_moments(running, device);
  }
  copies.fetch(heads, running.heads);
  for (std::int64_t h = 0; h < 2; ++h) {
    const RunningMoments::Head& q = host.q[static_cast<std::size_t>(h)];
    EXPECT_NEAR(heads.get(0, 0, h, 0), q.weight, 1e-12);
    EXPECT_NEAR(heads.get(0, 0, h, 1), q.mean, 1e-6);
    EXPECT_NEAR(heads.get(0, 0, h, 2), q.variance, 1e-6);
  }
  const Tensor q = normal_tensor(1, DType::f32, {1, 4, 8, 16});
  const MatchingInputs device{.q = copies.of(q), .k = copies.of(q)};
  RunningMoments value;
  expect_error([&] { update_moments(value, device); }, {"give running_on_device"});
  expect_error([&] { update_moments(running, {.q = q.view(), .k = q.view()}); }, {"give running"});
}

TEST_F(CudaMoments, BadLengthsAreReported) {
  const Tensor x = normal_tensor(40, DType::f32, {2, 2, 50, 8});
  const std::vector<std::int32_t> lengths = {51, -1};
  Copies copies;
  std::vector<Moments> out(4);
  expect_error([&] { head_moments({.x = copies.of(x), .lengths = copies.of(lengths)}, out); },
               {"key_lengths"});
  head_moments({.x = copies.of(x)}, out);
  EXPECT_EQ(out[3].count, 400);
}

// Scales and the attention that uses them in one graph, with a workspace that is given and without,
// replayed on other data.
TEST_F(CudaMoments, MatchingAndAttentionInOneGraph) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  Case c = make_case("forward:f32:cpu:b2h4k2n600d32:lln");
  c.parameters = conformance::ParameterForm::sequence;
  Inputs in = conformance::make_inputs(c, DType::f32);
  TensorSet outputs = conformance::make_outputs(c, in, DType::f32);
  DeviceData data(kDevice, in, outputs);
  const AttentionInputs views = data.views().in;
  const auto writable = [](const ConstView& v) {
    return View{const_cast<void*>(v.data), v.dtype, v.device, v.shape, v.stride};
  };
  const MatchingInputs matching{.q = views.q, .k = views.k};
  const DeviceMemory memory(kDevice, matching_workspace_bytes(matching));
  for (const bool given : {true, false}) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    Exec exec{.stream = stream};
    if (given) exec.workspace = memory.span();
    match_moments(matching, {writable(views.alpha), writable(views.beta)}, {}, exec);
    attention_forward(views, data.views().out, conformance::options(c), {.stream = stream});
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&program, graph, 0), cudaSuccess);
    for (const double scale : {1.0, 0.4}) {
      Inputs other = in;
      other.q.for_each([&](auto b, auto h, auto n, auto channel) {
        other.q.set(b, h, n, channel, scale * in.q.get(b, h, n, channel));
      });
      ASSERT_EQ(cudaMemcpy(const_cast<void*>(views.q.data), other.q.bytes().data(),
                           other.q.bytes().size(), cudaMemcpyHostToDevice),
                cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(program, stream), cudaSuccess);
      data.fetch();
      match_moments({.q = other.q.view(), .k = other.k.view()},
                    {other.alpha.view(), other.beta.view()}, {});
      EXPECT_EQ(first_difference(outputs.at("o"), 1e-4, run(c, other).at("o")), "") << scale;
    }
    cudaGraphExecDestroy(program);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace lln::test
