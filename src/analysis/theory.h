// What log-normal theory predicts, and the rule that names how a matrix concentrates.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lln/instruments.h"

namespace lln::analysis {

Theory predict(const AttentionMatrix& matrix, const InputStatistics& inputs,
               const RowStatistics* rows, const Spectrum* spectrum,
               const InstrumentOptions& options);
Verdict judge(double entropy, double lambda_2, std::int64_t tokens) noexcept;

}  // namespace lln::analysis
