// The instruments over Weights, for the calls of the API to put together. Arguments were checked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "analysis/weights.h"

namespace lln::analysis {

RowStatistics row_statistics(Weights& weights, const InstrumentOptions& options,
                             Parallel* parallel);
Spectrum spectrum(Weights& weights, const InstrumentOptions& options, Parallel* parallel);
ChainStatistics chain_statistics(Weights& weights, const Spectrum& spectrum,
                                 const InstrumentOptions& options, Parallel* parallel);
InputStatistics input_statistics(const ConstView& q, const ConstView& k, Parallel* parallel);

// Kind performer: the share of features that are smaller than the 1e-4 added to them, of q or of k,
// whichever is larger.
double floored_features(const AttentionMatrix& matrix, Parallel* parallel);

inline void report(const InstrumentOptions& options, std::string_view stage, std::int64_t done,
                   std::int64_t total) {
  if (options.progress) options.progress({stage, done, total});
}

// -sum x ln x of numbers that sum to one.
double entropy_of(std::span<const double> shares);

}  // namespace lln::analysis
