// Results of an earlier `lln bench --json` and what became of them: ratios to the floor, old and
// new. Apart from bench.cc, which measures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/measure.h"

namespace lln::cli {

class EarlierResults {
 public:
  // Throws lln::Error where the file is not of the form that --json prints.
  explicit EarlierResults(const std::string& path);

  const std::string& path() const noexcept { return path_; }
  std::vector<Problem> problems() const;
  // Whether the ratio of the result is more than `tolerance` times the earlier one.
  bool regressed(const bench::Result& result, double tolerance) const;
  bool has(const bench::Result& result) const { return ratios_.contains(result.problem); }
  double ratio(const bench::Result& result) const { return ratios_.at(result.problem); }

 private:
  std::string path_;
  std::vector<std::string> order_;
  std::map<std::string, double> ratios_;  // by problem text
};

// Characters of the longest problem text: the width of a table's first column.
std::size_t problem_width(const std::vector<bench::Result>& results);

// One line per result: both ratios, their quotient and the verdict.
std::string comparison_text(const std::vector<bench::Result>& results,
                            const EarlierResults& earlier, double tolerance);
nlohmann::ordered_json comparison_json(const std::vector<bench::Result>& results,
                                       const EarlierResults& earlier, double tolerance);

}  // namespace lln::cli
