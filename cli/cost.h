// What attention costs on this machine as the input grows: LLN, LLN+Diag and softmax on the same
// random input, forward, f32. For lln demo and for reports.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <vector>

#include "io/bytes.h"
#include "lln/attention.h"
#include "progress.h"
#include "verb.h"

namespace lln::cli {

inline constexpr std::int64_t kCostHeads = 4;
inline constexpr std::int64_t kCostDim = 64;
inline constexpr std::int64_t kCostBlock = 64;
inline constexpr std::int64_t kCostFirstTokens = 512;
inline constexpr double kLongestCall = 5;  // seconds; a call that would take longer is not made

struct CostMeasurement {
  double seconds = 0;
  bool predicted = false;  // from the shorter input; the call was not made
  double bytes = 0;        // inputs, output and workspace
};

struct CostRow {
  std::int64_t tokens = 0;
  CostMeasurement lln, lln_diag, softmax;
  double matrix_bytes = 0;  // an N x N matrix for each head
};

// q, k, v and o for the longest input; a shorter one is a view of the first tokens.
class CostInput {
 public:
  CostInput(std::int64_t tokens, Parallel& threads);
  std::int64_t tokens() const noexcept { return tokens_; }
  AttentionInputs inputs(std::int64_t tokens) const;
  AttentionOutputs outputs(std::int64_t tokens) const { return {.o = tensor(3, tokens)}; }

 private:
  View tensor(std::size_t index, std::int64_t tokens) const;
  void fill_head(std::int64_t index, std::int64_t head);

  std::int64_t tokens_;
  std::array<io::Bytes, 4> tensors_;
};

AttentionOptions cost_options(Kind kind);

// Rows for 512 tokens and every doubling up to those of the input; `what` begins the line of
// progress.
std::vector<CostRow> measure_cost(const CostInput& input, const std::string& what, const Exec& exec,
                                  Progress& progress);
Json to_json(const std::vector<CostRow>& rows);

}  // namespace lln::cli
