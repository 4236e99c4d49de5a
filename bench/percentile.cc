// Percentiles by sorting: there are at most some thousand samples.
// SPDX-License-Identifier: Apache-2.0
#include "bench/percentile.h"

#include <algorithm>
#include <cmath>

namespace lln::bench {

double percentile(std::vector<double> samples, double percent) {
  std::sort(samples.begin(), samples.end());
  const double at = percent / 100 * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(at));
  const std::size_t above = std::min(below + 1, samples.size() - 1);
  const double share = at - static_cast<double>(below);
  return samples[below] + share * (samples[above] - samples[below]);
}

}  // namespace lln::bench
