// The border of the instruments: its rules, each call one Error with every fault.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/faults.h"
#include "lln/instruments.h"

namespace lln {

// Why a causal matrix has no spectral gap, for errors and for Examination.
extern const char* const kWhyNoSpectrum;

// Faults of the matrix and, where given, of the options.
void check_matrix(Faults& faults, const AttentionMatrix& matrix, const Exec& exec);
void check_options(Faults& faults, const InstrumentOptions& options);
void check_bidirectional(Faults& faults, const AttentionMatrix& matrix);
// q and k alone.
void check_inputs(Faults& faults, const ConstView& q, const ConstView& k, const Exec& exec);

// "lln of 512 tokens, dim 64", as errors name it.
std::string describe(const AttentionMatrix& matrix);

}  // namespace lln
