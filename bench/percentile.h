// Percentiles of samples, as `lln bench` reports them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace lln::bench {

// The value below which `percent` of the samples lie, interpolated between the two nearest: of
// 1, 2, 3, 4 the 50th is 2.5. There must be at least one sample; their order does not matter.
double percentile(std::vector<double> samples, double percent);

}  // namespace lln::bench
