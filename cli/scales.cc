// Checks and texts of the modes of --matching.
// SPDX-License-Identifier: Apache-2.0
#include "scales.h"

#include <fmt/format.h>

#include <iterator>
#include <nlohmann/json.hpp>

#include "io/printable.h"

namespace lln::cli {

std::optional<Matching> requested_matching(const std::string& name, bool given,
                                           const AttentionOptions& options) {
  if (name.empty()) return std::nullopt;
  const Matching mode = parse_matching(name);
  if (mode == Matching::frozen) return mode;
  const auto contradiction = [&](const std::string& text) {
    return UsageError(fmt::format("--matching {} {}", name, text));
  };
  if (given) {
    throw contradiction("sets alpha and beta itself: leave out --alpha and --beta, or use frozen");
  }
  if (mode == Matching::none) return mode;
  if (options.causal) {
    throw contradiction(
        "reads the whole sequence, so with --causal a row would depend on its future: give alpha "
        "and beta, or use --matching none");
  }
  if (options.feature != Feature::exp) {
    throw contradiction(
        fmt::format("is for --feature exp, found {}: give alpha and beta, or use --matching none",
                    to_string(options.feature)));
  }
  return mode;
}

std::string clamped_text(const std::vector<ClampedHead>& clamped, Matching mode) {
  const ClampedHead& first = clamped.front();
  const bool tables = mode == Matching::exact || mode == Matching::entropy;
  const auto index = [](std::int64_t i) { return i < 0 ? "all" : std::to_string(i); };
  std::vector<std::string> limits;
  if (first.sigma_q) limits.emplace_back("sigma of q counts as 1e-4");
  if (first.sigma_k) limits.emplace_back("sigma of k counts as 1e-4");
  if (first.target) {
    limits.emplace_back(tables
                            ? "sigma_q^2 sigma_k^2 is outside 1/64 to 16 and counts as the nearest"
                            : "sigma_q^2 sigma_k^2 is not above b of the fitted line, so alpha "
                              "sigma_q counts as 1e-4");
  }
  if (first.size) {
    limits.emplace_back(
        "dim is outside 8 to 256 or tokens outside 16 to 65536, and counts as the nearest");
  }
  return fmt::format("limits set alpha and beta of {} pair{}, first sequence {}, key head {}: {}",
                     clamped.size(), clamped.size() == 1 ? "" : "s", index(first.sequence),
                     index(first.head_k), fmt::join(limits, ", "));
}

std::string calibration_obstacle(const CalibratedLayer& layer, std::int64_t heads,
                                 std::int64_t heads_k, std::int64_t dim) {
  const auto alphas = std::ssize(layer.alpha), betas = std::ssize(layer.beta);
  if (alphas == heads && betas == heads_k && layer.dim == dim) return "";
  return fmt::format(
      "calibration of layer {}: {} heads, {} key heads and {} channels: expected {}, {} and {}",
      io::printable(layer.name), alphas, betas, layer.dim, heads, heads_k, dim);
}

Json to_json(const std::vector<ClampedHead>& clamped) {
  Json list = Json::array();
  for (const ClampedHead& c : clamped) {
    list.push_back({{"sequence", c.sequence},
                    {"head_k", c.head_k},
                    {"sigma_q", c.sigma_q},
                    {"sigma_k", c.sigma_k},
                    {"target", c.target},
                    {"size", c.size}});
  }
  return list;
}

Json to_json(const Scales& scales) {
  if (!scales.mode) return nullptr;
  Json constants;  // null where the mode uses none
  const MatchingConstants& line = scales.report.constants;
  if (line.a > 0) constants = {{"a", line.a}, {"b", line.b}};
  return {{"mode", to_string(*scales.mode)},
          {"constants", constants},
          {"clamped", to_json(scales.report.clamped)}};
}

}  // namespace lln::cli
