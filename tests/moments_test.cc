// Moments of q and k against a plain computation in two passes of f64, and what must not change
// them: threads, layout, neighbours, padding, the cut into parts.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "conformance/data.h"
#include "lln/error.h"
#include "lln/moments.h"

namespace lln {
namespace {

using conformance::Layout;
using conformance::Tensor;

Tensor normal_tensor(DType dtype, const Shape& shape, double mean = 0, double sigma = 1,
                     Layout layout = Layout::bhnd) {
  Tensor x(dtype, shape, layout);
  std::uint64_t index = 0;
  x.for_each([&](auto b, auto h, auto n, auto c) {
    x.set(b, h, n, c, mean + sigma * conformance::normal_number(7, index++));
  });
  return x;
}

std::vector<Moments> moments(const MomentsInputs& in, std::int64_t sequences,
                             Parallel* parallel = nullptr) {
  std::vector<Moments> out(static_cast<std::size_t>(sequences * in.x.shape[1]), {-1, 0, 0});
  head_moments(in, out, {.parallel = parallel});
  return out;
}

using Counts = std::function<bool(std::int64_t batch, std::int64_t token)>;

// Mean first, deviations from it second.
Moments two_pass(const Tensor& x, std::int64_t batch, std::int64_t head, const Counts& counts) {
  Moments m;
  const auto for_each = [&](auto&& body) {
    x.for_each([&](auto b, auto h, auto n, auto c) {
      if (b == batch && h == head && counts(b, n)) body(x.get(b, h, n, c));
    });
  };
  double sum = 0;
  for_each([&](double value) {
    sum += value;
    m.count += 1;
  });
  if (m.count == 0) return m;
  m.mean = sum / m.count;
  for_each([&](double value) { m.m2 += (value - m.mean) * (value - m.mean); });
  return m;
}

void expect_near(const Moments& found, const Moments& expected, const std::string& what) {
  EXPECT_EQ(found.count, expected.count) << what;
  const double scale = std::sqrt(expected.variance()) + std::abs(expected.mean);
  EXPECT_NEAR(found.mean, expected.mean, 1e-12 * scale) << what;
  EXPECT_NEAR(found.m2, expected.m2, 1e-9 * expected.m2) << what;
}

void expect_all(const Tensor& x, const MomentsInputs& in, const Counts& counts,
                const std::string& what) {
  const std::vector<Moments> found = moments(in, x.shape()[0]);
  for (std::int64_t b = 0; b < x.shape()[0]; ++b) {
    for (std::int64_t h = 0; h < x.shape()[1]; ++h) {
      expect_near(found[static_cast<std::size_t>(b * x.shape()[1] + h)], two_pass(x, b, h, counts),
                  what + ", head " + std::to_string(h));
    }
  }
}

TEST(Moments, EveryTypeWidthAndLayout) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    for (const std::int64_t dim : {1, 3, 8, 31, 64, 100, 256}) {
      for (const Layout layout : {Layout::bhnd, Layout::bnhd, Layout::gaps}) {
        const Tensor x = normal_tensor(dtype, {2, 3, 37, dim}, 0.5, 2, layout);
        expect_all(
            x, {.x = x.view()}, [](auto, auto) { return true; },
            std::string(to_string(dtype)) + " of dim " + std::to_string(dim));
      }
    }
  }
}

// Highway chooses the target by itself; here each has its turn.
TEST(Moments, EveryTargetOfThisCpu) {
  const std::int64_t all = hwy::SupportedTargets();
  int seen = 0;
  for (const std::int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_NEON}) {
    if ((all & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
      const Tensor x = normal_tensor(dtype, {1, 2, 37, 29}, 0.5, 2);
      expect_all(
          x, {.x = x.view()}, [](auto, auto) { return true; },
          std::string(hwy::TargetName(target)) + ", " + to_string(dtype));
    }
    ++seen;
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  EXPECT_GT(seen, 0);
}

TEST(Moments, LongSequencesAndLengths) {
  const Tensor x = normal_tensor(DType::f32, {3, 2, 3000, 16});
  const std::vector<std::int32_t> lengths = {3000, 0, 1025};
  expect_all(
      x, {.x = x.view(), .lengths = IndexView(std::span(lengths))},
      [&](auto b, auto n) { return n < lengths[static_cast<std::size_t>(b)]; }, "lengths");
}

// What does not count holds NaN: reading it would show.
TEST(Moments, MasksSelect) {
  Tensor x = normal_tensor(DType::f32, {3, 2, 2500, 12});
  std::vector<std::uint8_t> mask(3 * 2500);
  for (std::size_t i = 0; i < mask.size(); ++i) {
    mask[i] = i / 2500 != 1 && conformance::normal_number(3, i) > 0 ? 9 : 0;
  }
  const Counts counts = [&](auto b, auto n) {
    return mask[static_cast<std::size_t>(b * 2500 + n)] != 0;
  };
  x.for_each([&](auto b, auto h, auto n, auto c) {
    if (!counts(b, n)) x.set(b, h, n, c, std::numeric_limits<double>::quiet_NaN());
  });
  expect_all(x, {.x = x.view(), .mask = mask_view(mask.data(), 3, 2500)}, counts, "mask");
}

TEST(Moments, PackedEqualsSeparate) {
  const std::vector<std::int64_t> cu = {0, 1500, 1500, 1501, 2600};
  const Tensor x = normal_tensor(DType::bf16, {1, 3, 2600, 20});
  const std::vector<Moments> packed =
      moments({.x = x.view(), .cu_seqlens = IndexView(std::span(cu))}, 4);
  for (std::size_t s = 0; s < 4; ++s) {
    ConstView alone = x.view();
    alone.data = static_cast<const std::byte*>(alone.data) + cu[s] * alone.stride[2] * 2;
    alone.shape[2] = cu[s + 1] - cu[s];
    const std::vector<Moments> separate = moments({.x = alone}, 1);
    for (std::size_t h = 0; h < 3; ++h) EXPECT_EQ(packed[s * 3 + h], separate[h]) << s << ", " << h;
  }
}

TEST(Moments, LargeMeansLoseNothing) {
  for (const double mean : {1e4, -1e4}) {
    const Tensor x = normal_tensor(DType::f32, {1, 1, 5000, 64}, mean, 1);
    const Moments m = moments({.x = x.view()}, 1)[0];
    EXPECT_NEAR(std::sqrt(m.variance()), 1, 5e-3);  // of the sample
    const Moments exact = two_pass(x, 0, 0, [](auto, auto) { return true; });
    EXPECT_NEAR(std::sqrt(m.variance()), std::sqrt(exact.variance()), 1e-9);
    EXPECT_NEAR(m.mean, exact.mean, 1e-8);
  }
  // Squares of these overflow f32.
  const Tensor huge = normal_tensor(DType::f32, {1, 1, 50, 8}, 1e30, 1e30);
  expect_all(
      huge, {.x = huge.view()}, [](auto, auto) { return true; }, "huge");
}

TEST(Moments, ThreadsLayoutNeighboursAndPaddingChangeNoBit) {
  const Tensor x = normal_tensor(DType::f32, {3, 4, 4000, 24});
  const std::vector<Moments> expected = moments({.x = x.view()}, 3);
  for (const int count : {2, 3, 8}) {
    ThreadPool threads(count);
    EXPECT_EQ(moments({.x = x.view()}, 3, &threads), expected) << count << " threads";
  }
  const Tensor other = normal_tensor(DType::f32, {3, 4, 4000, 24}, 0, 1, Layout::bnhd);
  EXPECT_EQ(moments({.x = other.view()}, 3), expected);

  Tensor alone(DType::f32, {1, 4, 4000, 24});
  Tensor padded(DType::f32, {1, 4, 4200, 24});  // 120 in front, 80 behind, all NaN
  alone.for_each([&](auto, auto h, auto n, auto c) {
    alone.set(0, h, n, c, x.get(1, h, n, c));
    padded.set(0, h, n + 120, c, x.get(1, h, n, c));
  });
  const std::vector<Moments> own = {expected.begin() + 4, expected.begin() + 8};
  EXPECT_EQ(moments({.x = alone.view()}, 1), own);
  std::vector<std::uint8_t> mask(4200, 0);
  std::fill_n(mask.begin() + 120, 4000, std::uint8_t{1});
  EXPECT_EQ(moments({.x = padded.view(), .mask = mask_view(mask.data(), 1, 4200)}, 1), own);
}

TEST(Moments, MergeIsAssociativeAndTheEmptySetNeutral) {
  const Tensor x = normal_tensor(DType::f64, {1, 1, 300, 5}, 3, 2);
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    ConstView view = x.view();
    view.data = static_cast<const double*>(view.data) + begin * 5;
    view.shape[2] = end - begin;
    return moments({.x = view}, 1)[0];
  };
  const Moments a = part(0, 10), b = part(10, 11), c = part(11, 300), whole = part(0, 300);
  expect_near(merge(merge(a, b), c), whole, "(ab)c");
  expect_near(merge(a, merge(b, c)), whole, "a(bc)");
  expect_near(merge(c, merge(b, a)), whole, "c(ba)");
  EXPECT_EQ(merge(a, {}), a);
  EXPECT_EQ(merge({}, a), a);
  EXPECT_EQ(Moments().variance(), 0);
  EXPECT_EQ((Moments{1, 5, 0}.variance()), 0);
}

TEST(Moments, NothingIsReadOfEmptyTensors) {
  for (const Shape& shape : {Shape{2, 3, 0, 8}, Shape{2, 3, 8, 0}}) {
    EXPECT_EQ(moments({.x = view(static_cast<const float*>(nullptr), shape)}, 2),
              std::vector<Moments>(6));
  }
}

TEST(Moments, OneErrorNamesEveryFault) {
  Tensor x = normal_tensor(DType::f32, {2, 2, 6, 4});
  const std::vector<std::int32_t> lengths = {7, 2};
  const std::vector<std::uint8_t> mask(10, 1);
  std::vector<Moments> out(3);
  try {
    head_moments({.x = x.view(),
                  .lengths = IndexView(std::span(lengths)),
                  .mask = mask_view(mask.data(), 2, 5)},
                 out);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (const char* text :
         {"head_moments: 4 faults in [2, 2, 6, 4]", "lengths and mask are both given",
          "lengths[0] is 7: expected 0 to 6", "mask has shape [2, 5]: expected [2, 6]",
          "out has 3 entries: expected one per sequence and head, 4"}) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(out, std::vector<Moments>(3));
  EXPECT_THROW(head_moments({}, {}), Error);
  ConstView on_device = x.view();
  on_device.device = cuda_device(63);  // which no machine has
  out.resize(4);
  try {
    head_moments({.x = on_device}, out);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
  }
}

}  // namespace
}  // namespace lln
