// Reading of earlier results and the comparison. The file comes from outside: everything in it that
// is used is checked.
// SPDX-License-Identifier: Apache-2.0
#include "bench_compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lln/error.h"

namespace lln::cli {
namespace {

using Json = nlohmann::ordered_json;

const char* verdict(const bench::Result& result, const EarlierResults& earlier, double tolerance) {
  if (!earlier.has(result)) return "new";
  return earlier.regressed(result, tolerance) ? "regressed" : "ok";
}

}  // namespace

EarlierResults::EarlierResults(const std::string& path) : path_(path) {
  const auto fail = [&](ErrorCode code, const std::string& text) {
    throw Error(code, fmt::format("{}: {}", path, text));
  };
  errno = 0;
  std::ifstream file(path);
  if (!file) fail(ErrorCode::io, fmt::format("cannot be opened: {}", std::strerror(errno)));
  const Json json = Json::parse(file, nullptr, false);
  if (json.is_discarded()) fail(ErrorCode::io, "is not JSON");
  if (!json.is_object() || !json.contains("results") || !json["results"].is_array()) {
    fail(ErrorCode::invalid_argument, "has no list \"results\": expected what --json prints");
  }
  for (const Json& result : json["results"]) {
    if (!result.is_object() || !result.contains("problem") || !result["problem"].is_string() ||
        !result.contains("ratio") || !result["ratio"].is_number()) {
      fail(ErrorCode::invalid_argument,
           fmt::format("results[{}] has no text \"problem\" and number \"ratio\"", order_.size()));
    }
    // Of results that were recorded together with others, those of this program.
    if (result.contains("peer") && result["peer"] != "lln") continue;
    const auto ratio = result["ratio"].get<double>();
    std::string text;
    try {
      text = to_string(parse_problem(result["problem"].get<std::string>()));
    } catch (const Error& e) {
      fail(e.code(), e.what());
    }
    if (!(ratio > 0) || !std::isfinite(ratio)) {
      fail(ErrorCode::invalid_argument,
           fmt::format("the ratio of {} is {}, expected more than 0", text, ratio));
    }
    if (ratios_.emplace(text, ratio).second) order_.push_back(text);
  }
  if (order_.empty()) fail(ErrorCode::invalid_argument, "holds no result");
}

std::vector<Problem> EarlierResults::problems() const {
  std::vector<Problem> list;
  for (const std::string& text : order_) list.push_back(parse_problem(text));
  return list;
}

bool EarlierResults::regressed(const bench::Result& result, double tolerance) const {
  return has(result) && result.ratio > tolerance * ratio(result);
}

std::size_t problem_width(const std::vector<bench::Result>& results) {
  std::size_t width = 0;
  for (const bench::Result& r : results) width = std::max(width, r.problem.size());
  return width;
}

std::string comparison_text(const std::vector<bench::Result>& results,
                            const EarlierResults& earlier, double tolerance) {
  const std::size_t width = problem_width(results);
  std::string text = fmt::format("\nratio to the floor, against {}\n\n{:<{}} {:>8} {:>8} {:>8}\n",
                                 earlier.path(), "problem", width, "old", "new", "new/old");
  int regressions = 0;
  for (const bench::Result& result : results) {
    const bool known = earlier.has(result);
    text += fmt::format("{:<{}} {:>8} {:>8.2f} {:>8}  {}\n", result.problem, width,
                        known ? fmt::format("{:.2f}", earlier.ratio(result)) : "-", result.ratio,
                        known ? fmt::format("{:.2f}", result.ratio / earlier.ratio(result)) : "-",
                        verdict(result, earlier, tolerance));
    regressions += earlier.regressed(result, tolerance) ? 1 : 0;
  }
  return text +
         fmt::format("{} of {} worse by more than {}\n", regressions, results.size(), tolerance);
}

Json comparison_json(const std::vector<bench::Result>& results, const EarlierResults& earlier,
                     double tolerance) {
  Json rows = Json::array();
  for (const bench::Result& result : results) {
    rows.push_back({{"problem", result.problem},
                    {"old_ratio", earlier.has(result) ? Json(earlier.ratio(result)) : Json()},
                    {"new_ratio", result.ratio},
                    {"verdict", verdict(result, earlier, tolerance)}});
  }
  return {{"file", earlier.path()}, {"tolerance", tolerance}, {"results", rows}};
}

}  // namespace lln::cli
