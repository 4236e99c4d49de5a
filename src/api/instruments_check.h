// The border of the instruments: its rules, each call one Error with every fault.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "analysis/weights.h"
#include "api/faults.h"
#include "lln/instruments.h"

namespace lln {

// Why the matrix has no spectral gap, for errors and for Examination; empty where it has one.
std::string spectrum_refusal(analysis::Weights& weights, Parallel* parallel);

// Faults of the matrix and, where given, of the options.
void check_matrix(Faults& faults, const AttentionMatrix& matrix, const Exec& exec);
void check_options(Faults& faults, const InstrumentOptions& options);
// q and k alone.
void check_inputs(Faults& faults, const ConstView& q, const ConstView& k, const Exec& exec);

// "lln of 512 tokens, dim 64", as errors name it.
std::string describe(const AttentionMatrix& matrix);

}  // namespace lln
