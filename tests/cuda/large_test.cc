// Tensors of more than 2^31 elements. All queries and keys are zero, so that every weight is known,
// and the values tell which block of 64 tokens they belong to: an offset that wrapped around would
// read or write the wrong one.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <deque>
#include <functional>
#include <vector>

#include "device_run.h"
#include "math/half.h"

namespace lln::test {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::int64_t kBlock = 64;                 // of Diag
constexpr std::int64_t kValues = 128;               // blocks until the values repeat
constexpr std::int64_t kPeriod = kBlock * kValues;  // tokens
constexpr double kMean = (kValues - 1) / 2.0;

double value_of(std::int64_t token) { return static_cast<double>(token / kBlock % kValues); }

struct LargeCase {
  std::string problem;
  Shape shape;
};

// One long sequence, and many heads: the token, the head and the batch each pass 2^31 elements.
const LargeCase kLarge[] = {
    {"b1h1n33562624d64", {1, 1, 33562624, kDim}},
    {"b9h8n466944d64", {9, 8, 466944, kDim}},
};

class CudaLarge : public OnDevice {
 protected:
  View tensor(const Shape& shape) {
    std::size_t bytes = 2;
    for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
    DeviceMemory& memory = memory_.emplace_back(kDevice, bytes);
    return on(kDevice, view(static_cast<void*>(memory.data()), DType::bf16, shape));
  }

  View zeros(const Shape& shape) {
    const View view = tensor(shape);
    EXPECT_EQ(cudaMemset(view.data, 0, bytes_of(view)), cudaSuccess);
    return view;
  }

  // Every channel of token n is value(n), which has the period of the blocks.
  View filled(const Shape& shape, const std::function<double(std::int64_t)>& value) {
    const View view = tensor(shape);
    std::vector<std::uint16_t> pattern(static_cast<std::size_t>(kPeriod * kDim));
    for (std::size_t i = 0; i < pattern.size(); ++i) {
      pattern[i] = bf16_from_f32(static_cast<float>(value(static_cast<std::int64_t>(i) / kDim)));
    }
    const std::size_t bytes = pattern.size() * 2;
    auto* to = static_cast<std::byte*>(view.data);
    EXPECT_EQ(cudaMemcpy(to, pattern.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    for (std::size_t done = bytes; done < bytes_of(view); done *= 2) {
      const std::size_t more = std::min(done, bytes_of(view) - done);
      EXPECT_EQ(cudaMemcpy(to + done, to, more, cudaMemcpyDeviceToDevice), cudaSuccess);
    }
    return view;
  }

  static std::size_t bytes_of(const View& view) {
    std::size_t bytes = 2;
    for (const std::int64_t size : view.shape) bytes *= static_cast<std::size_t>(size);
    return bytes;
  }

  // Every element against expected(token), which is asked row by row, with this relative and
  // absolute tolerance, or allowed(token).
  static void expect_rows(const View& view, const std::function<double(std::int64_t)>& expected,
                          double tolerance, const std::string& what) {
    double last = 0;
    expect_rows(
        view, [&](std::int64_t n) { return last = expected(n); },
        [&](std::int64_t) { return tolerance * (1 + std::abs(last)); }, what);
  }
  static void expect_rows(const View& view, const std::function<double(std::int64_t)>& expected,
                          const std::function<double(std::int64_t)>& allowed,
                          const std::string& what) {
    std::vector<std::uint16_t> rows(static_cast<std::size_t>(kPeriod * kDim));
    const auto* from = static_cast<const std::byte*>(view.data);
    for (std::size_t at = 0; at < bytes_of(view); at += rows.size() * 2) {
      ASSERT_EQ(cudaMemcpy(rows.data(), from + at, rows.size() * 2, cudaMemcpyDeviceToHost),
                cudaSuccess);
      for (std::size_t i = 0; i < rows.size(); i += kDim) {
        const std::int64_t row = static_cast<std::int64_t>((at / 2 + i) / kDim);
        const double wanted = expected(row % view.shape[2]);
        const double most = allowed(row % view.shape[2]);
        for (std::size_t c = 0; c < kDim; ++c) {
          const double found = f32_from_bf16(rows[i + c]);
          if (std::abs(found - wanted) <= most) continue;
          FAIL() << what << ": row " << row << " channel " << c << " is " << found << ": expected "
                 << wanted;
        }
      }
    }
  }

  AttentionInputs inputs(const Shape& shape) {
    DeviceMemory& one = memory_.emplace_back(kDevice, sizeof(float));
    const float value = 1;
    one.write(std::as_bytes(std::span(&value, 1)));
    const ConstView scale = on(kDevice, lln::scalar(reinterpret_cast<const float*>(one.data())));
    return {.q = zeros(shape),
            .k = zeros(shape),
            .v = filled(shape, value_of),
            .alpha = scale,
            .beta = scale};
  }

  void TearDown() override {
    OnDevice::TearDown();
    memory_.clear();
  }

 private:
  std::deque<DeviceMemory> memory_;
};

constexpr double kTolerance = 0.01;  // bf16 keeps 8 bits

TEST_F(CudaLarge, Forward) {
  for (const LargeCase& large : kLarge) {
    const AttentionInputs in = inputs(large.shape);
    const View o = tensor(large.shape);
    attention_forward(in, {.o = o}, {.kind = Kind::lln});
    expect_rows(
        o, [](std::int64_t) { return kMean; }, kTolerance, large.problem + ":lln");
    attention_forward(in, {.o = o}, {.kind = Kind::diag, .diag_block = kBlock});
    expect_rows(o, value_of, kTolerance, large.problem + ":diag64");
    attention_forward(in, {.o = o}, {.kind = Kind::lln_diag, .diag_block = kBlock});
    expect_rows(
        o, [](std::int64_t n) { return (kMean + value_of(n)) / 2; }, kTolerance,
        large.problem + ":lln+diag64");
    TearDown();
  }
}

TEST_F(CudaLarge, CausalForward) {
  for (const LargeCase& large : kLarge) {
    const AttentionInputs in = inputs(large.shape);
    const View o = tensor(large.shape);
    attention_forward(in, {.o = o}, {.kind = Kind::lln, .causal = true});
    double sum = 0;  // of the values up to a token
    const auto mean_so_far = [&](std::int64_t n) {
      sum = (n == 0 ? 0 : sum) + value_of(n);
      return sum / static_cast<double>(n + 1);
    };
    expect_rows(o, mean_so_far, kTolerance, large.problem + ":lln:causal");
    TearDown();
  }
}

// dq cancels numbers of 64 * mean, each rounded to about 1e-3 of itself.
constexpr double kToleranceOfZero = 64 * kMean * 1e-3;
constexpr double kToleranceOfKeys = 0.03;

// With all weights equal and g = 1: dq = 0, dk = v - mean of v, dv = 1 (dim = dim_v). Inside a
// block of Diag the values are equal and k and q are 0, so that LLN+Diag halves dk.
TEST_F(CudaLarge, Backward) {
  for (const LargeCase& large : kLarge) {
    const AttentionInputs in = inputs(large.shape);
    const View g = filled(large.shape, [](std::int64_t) { return 1.0; });
    const View dq = tensor(large.shape), dk = tensor(large.shape), dv = tensor(large.shape);
    for (const Kind kind : {Kind::lln, Kind::lln_diag}) {
      const double part = kind == Kind::lln ? 1 : 0.5;
      const std::string what = large.problem + (kind == Kind::lln ? ":lln " : ":lln+diag64 ");
      for (const View& view : {dq, dk, dv}) {  // what the other kind left would pass
        ASSERT_EQ(cudaMemset(view.data, 0xFF, bytes_of(view)), cudaSuccess);
      }
      attention_backward(in, {.g = g, .dq = dq, .dk = dk, .dv = dv},
                         {.kind = kind, .diag_block = kBlock});
      expect_rows(
          dq, [](std::int64_t) { return 0.0; }, kToleranceOfZero, what + "dq");
      expect_rows(
          dk, [&](std::int64_t n) { return part * (value_of(n) - kMean); }, kToleranceOfKeys,
          what + "dk");
      expect_rows(
          dv, [](std::int64_t) { return 1.0; }, kTolerance, what + "dv");
    }
    TearDown();
  }
}

// Row i gives 1 / (i + 1) to each key up to it: dv is the sum of that over i >= j, and dk that of
// (v - mean of the values up to i) / (i + 1).
TEST_F(CudaLarge, CausalBackward) {
  for (const LargeCase& large : kLarge) {
    const auto tokens = static_cast<std::size_t>(large.shape[2]);
    std::vector<double> weights(tokens), means(tokens);  // sums from a token to the end
    double sum = 0;
    for (std::size_t n = 0; n < tokens; ++n) {
      sum += value_of(static_cast<std::int64_t>(n));
      weights[n] = 1 / static_cast<double>(n + 1);
      means[n] = sum * weights[n] * weights[n];
    }
    for (std::size_t n = tokens - 1; n-- > 0;) {
      weights[n] += weights[n + 1];
      means[n] += means[n + 1];
    }
    const auto at = [](const std::vector<double>& sums, std::int64_t n) {
      return sums[static_cast<std::size_t>(n)];
    };
    const AttentionInputs in = inputs(large.shape);
    const View g = filled(large.shape, [](std::int64_t) { return 1.0; });
    const View dq = tensor(large.shape), dk = tensor(large.shape), dv = tensor(large.shape);
    const std::string what = large.problem + ":lln:causal ";
    attention_backward(in, {.g = g, .dq = dq, .dk = dk, .dv = dv},
                       {.kind = Kind::lln, .causal = true});
    expect_rows(
        dq, [](std::int64_t) { return 0.0; }, kToleranceOfZero, what + "dq");
    expect_rows(
        dk, [&](std::int64_t n) { return value_of(n) * at(weights, n) - at(means, n); },
        [&](std::int64_t n) {  // a difference of numbers of this size, which are small at the end
          return kTolerance * (value_of(n) * at(weights, n) + at(means, n));
        },
        what + "dk");
    expect_rows(
        dv, [&](std::int64_t n) { return at(weights, n); },
        [&](std::int64_t n) { return kTolerance * at(weights, n); }, what + "dv");
    TearDown();
  }
}

}  // namespace
}  // namespace lln::test
