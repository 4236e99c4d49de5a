// Gaussian queries and keys: the input on which the theory of log-normal attention is exact about
// its assumptions, in the form sigma_q=1,sigma_k=1,n=512,d=64,seeds=8.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lln/exec.h"
#include "lln/tensor.h"

namespace lln::cli {

struct GaussianSpec {
  double sigma_q = 1, sigma_k = 1;
  std::int64_t tokens = 512, dim = 64, seeds = 8;
};

// Throws UsageError naming every fault; what is not named keeps its default.
GaussianSpec parse_gaussian(const std::string& text);
std::string to_string(const GaussianSpec& spec);

// The same numbers on every machine and for any number of threads, times sigma.
class GaussianInput {
 public:
  GaussianInput(const GaussianSpec& spec, Parallel& threads);
  ConstView q() const { return view(q_.data(), shape_); }  // [seeds, 1, tokens, dim]
  ConstView k() const { return view(k_.data(), shape_); }

 private:
  Shape shape_;
  std::vector<float> q_, k_;
};

}  // namespace lln::cli
