// The text of a Gaussian input, and its numbers.
// SPDX-License-Identifier: Apache-2.0
#include "gaussian_input.h"

#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "conformance/data.h"
#include "tasks.h"
#include "verb.h"

namespace lln::cli {
namespace {

constexpr double kMostSigma = 20;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 22, kMostDim = 256, kMostSeeds = 4096;

template <class Number>
void set(const std::string& name, const std::string& text, Number least, Number most, Number& out,
         std::vector<std::string>& faults) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= least && value <= most)) {
    faults.push_back(
        fmt::format("{}={}: expected a number from {} to {}", name, text, least, most));
  } else {
    out = value;
  }
}

}  // namespace

GaussianSpec parse_gaussian(const std::string& text) {
  GaussianSpec spec;
  std::vector<std::string> faults;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals),
                      value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (name == "sigma_q") {
      set(name, value, 1e-3, kMostSigma, spec.sigma_q, faults);
    } else if (name == "sigma_k") {
      set(name, value, 1e-3, kMostSigma, spec.sigma_k, faults);
    } else if (name == "n") {
      set(name, value, std::int64_t{2}, kMostTokens, spec.tokens, faults);
    } else if (name == "d") {
      set(name, value, std::int64_t{1}, kMostDim, spec.dim, faults);
    } else if (name == "seeds") {
      set(name, value, std::int64_t{1}, kMostSeeds, spec.seeds, faults);
    } else {
      faults.push_back(fmt::format("'{}': expected sigma_q, sigma_k, n, d or seeds", part));
    }
  }
  if (!faults.empty()) {
    throw UsageError(fmt::format("--gaussian {}: {}", text, fmt::join(faults, "; ")));
  }
  return spec;
}

std::string to_string(const GaussianSpec& spec) {
  return fmt::format("sigma_q={},sigma_k={},n={},d={},seeds={}", spec.sigma_q, spec.sigma_k,
                     spec.tokens, spec.dim, spec.seeds);
}

GaussianInput::GaussianInput(const GaussianSpec& spec, Parallel& threads)
    : shape_{spec.seeds, 1, spec.tokens, spec.dim},
      q_(static_cast<std::size_t>(spec.seeds * spec.tokens * spec.dim)),
      k_(q_.size()) {
  const std::int64_t size = spec.tokens * spec.dim;
  for_each_task(threads, spec.seeds, [&](std::int64_t s) {
    const auto stream = static_cast<std::uint64_t>(2 * s + 1);
    for (std::int64_t i = 0; i < size; ++i) {
      const auto index = static_cast<std::uint64_t>(i);
      const auto at = static_cast<std::size_t>(s * size + i);
      q_[at] = static_cast<float>(spec.sigma_q * conformance::normal_number(stream, index));
      k_[at] = static_cast<float>(spec.sigma_k * conformance::normal_number(stream + 1, index));
    }
  });
}

}  // namespace lln::cli
