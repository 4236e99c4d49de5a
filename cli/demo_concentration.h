// The part of lln demo on moment matching: is LLN as concentrated as softmax when alpha and beta
// are matched? Measured on Gaussian q and k as the variance of ln P.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lln/exec.h"
#include "verb.h"

namespace lln::cli {

struct ConcentrationRow {
  double sigma = 0;      // of q and k
  double alpha = 0;      // matched, equal to beta up to the draw; mean over the samples
  double target = 0;     // sigma_q^2 sigma_k^2, as measured
  double softmax = 0;    // Var(ln P) of softmax attention,
  double matched = 0;    // of LLN with the matched scales,
  double unmatched = 0;  // and of LLN with alpha = beta = 1
};

std::vector<ConcentrationRow> measure_concentration(Parallel& parallel);

std::string to_text(const std::vector<ConcentrationRow>& rows);
Json to_json(const std::vector<ConcentrationRow>& rows);

}  // namespace lln::cli
