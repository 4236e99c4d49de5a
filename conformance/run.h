// Judges kernels on one case: outputs start as NaN, the workspace is full of NaN and exactly as
// long as the kernel asked for, and every output must lie within the tolerance of compare.h around
// the f64 reference.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "conformance/cases.h"
#include "conformance/compare.h"
#include "conformance/data.h"
#include "conformance/plain.h"

namespace lln::conformance {

enum class Verdict : std::uint8_t { passed, failed, skipped };

struct CaseResult {
  std::string kernel;
  Verdict verdict = Verdict::passed;
  std::string text;  // skipped: the kernel's refusal; otherwise one line per output
  double worst = 0;  // largest error / tolerance of all outputs
};

// What a kernel's outputs are held against, computed once per case.
struct Truth {
  TensorSet reference;  // f64
  Plain plain;
};
Truth make_truth(const Case& c, Parallel* parallel);

// One result for each kernel name, in order.
std::vector<CaseResult> run_case(const Case& c, std::span<const std::string> kernels,
                                 Parallel* parallel = nullptr);

}  // namespace lln::conformance
