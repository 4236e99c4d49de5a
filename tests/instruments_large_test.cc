// Long sequences: what the instruments cost in time and memory. Time is that of the processors, so
// that a busy machine does not fail the test.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <ctime>

#include "instruments_data.h"

namespace lln::test {
namespace {

constexpr int kThreads = 2;

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double peak_gigabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1e6;
}

// First in this file: the peak is that of the process.
TEST(InstrumentsLarge, GapOfAMillionTokens) {
  const std::int64_t n = 1 << 20, d = 64;
  std::vector<float> x(static_cast<std::size_t>(2 * n * d));
  for (std::size_t i = 0; i < x.size(); ++i) {  // 2^16 normal numbers, scattered
    static const std::vector<float> block = [] {
      std::vector<float> numbers(1 << 16);
      for (std::size_t j = 0; j < numbers.size(); ++j) {
        numbers[j] = static_cast<float>(normal_number(1, j));
      }
      return numbers;
    }();
    x[i] = block[mixed_bits(i) % block.size()];
  }
  AttentionMatrix m;
  m.q = view(static_cast<const float*>(x.data()), {1, 1, n, d});
  m.k = view(static_cast<const float*>(x.data() + n * d), {1, 1, n, d});
  m.alpha = m.beta = 2;
  ThreadPool pool(kThreads);
  const double before = processor_seconds();
  const Spectrum found = spectrum(m, {}, {.parallel = &pool});
  const double seconds = (processor_seconds() - before) / kThreads;
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_GT(found.gap, 0.9);
  EXPECT_LT(found.gap, 1);
  EXPECT_LT(seconds, 1);
  EXPECT_LT(peak_gigabytes(), 1.5);
}

TEST(InstrumentsLarge, SoftmaxOf16384Tokens) {
  const GaussianHead x(16384, 64, 1);
  const double memory = peak_gigabytes();
  const AttentionMatrix m = x.matrix("softmax");
  ThreadPool pool(kThreads);
  const double before = processor_seconds();
  const RowStatistics rows = row_statistics(m, {}, {.parallel = &pool});
  const Spectrum found = spectrum(m, {}, {.parallel = &pool});
  const double seconds = (processor_seconds() - before) / kThreads;
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_EQ(rows.entropy.rows, 16384);
  EXPECT_NEAR(rows.entropy.mean, std::log(16384) - 0.5, 0.03);
  EXPECT_TRUE(found.converged);
  EXPECT_NEAR(found.gap, 1 - std::sqrt(std::expm1(1) / 16384), 0.005);
  EXPECT_LT(seconds, 60);
  EXPECT_LT(peak_gigabytes() - memory, 0.1);  // P alone would be 2.1 in f64
}

}  // namespace
}  // namespace lln::test
