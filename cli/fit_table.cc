// Gaussian heads of every size of the table, at a ladder of scales st = alpha sigma_q = beta
// sigma_k: their log-variance and entropy rise with st, and are inverted at every target.
// SPDX-License-Identifier: Apache-2.0
#include "fit_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "concentration.h"
#include "interruption.h"
#include "io/output_file.h"
#include "lln/error.h"
#include "lln/exec.h"
#include "progress.h"
#include "tasks.h"

namespace lln::cli {
namespace {

constexpr std::array<std::int64_t, 6> kDims = {8, 16, 32, 64, 128, 256};
constexpr std::array<std::int64_t, 7> kTokens = {16, 64, 256, 1024, 4096, 16384, 65536};
// Targets sigma_q^2 sigma_k^2, from 1/64 to 16 in steps of a third of an octave.
constexpr std::size_t kTargets = 31;
constexpr std::size_t kRungs = 16;     // of the ladder
constexpr std::int64_t kBaseDim = 16;  // of the heads that --samples counts
constexpr std::int64_t kLeastSamples = 12;

double target(std::size_t i) { return std::exp2(static_cast<double>(i) / 3 - 6); }

// From below the least target to above the largest, in both modes; invert() finds out where not.
double rung(std::int64_t dim, std::size_t i) {
  const double octaves = std::log2(static_cast<double>(dim) / 8);
  const double least = 0.2 * std::exp2(0.4 * octaves), most = 5.5 * std::exp2(0.12 * octaves);
  return least * std::pow(most / least, static_cast<double>(i) / (kRungs - 1));
}

// Mean and standard error of something over the samples.
struct Estimate {
  double mean = 0;
  double error = 0;
};

// What is measured of one head.
struct Curves {
  std::array<double, kRungs> log_variance = {};
  std::array<double, kRungs> deficit = {};            // ln N minus the entropy of LLN
  std::array<double, kTargets> softmax_deficit = {};  // the same of softmax
};

struct Node {
  std::int64_t dim = 0, tokens = 0, samples = 0;
  std::array<double, kTargets> exact = {}, entropy = {};  // st
  // Standard errors, the largest for targets up to 4: of Var(ln P), relative, and in nats.
  double variance_error = 0, entropy_error = 0;
};

// Few channels: the keys make most of the scatter, and another head says more than another row.
std::int64_t rows_of(std::int64_t dim) { return std::clamp<std::int64_t>(dim, 16, 64); }

// Heads scatter less where they have more channels. Where they are long there are fewer of them,
// and where they are short, and cheap, more.
std::int64_t samples_of(std::int64_t samples, std::int64_t dim, std::int64_t tokens) {
  const std::int64_t heads = samples * kBaseDim / dim;
  if (tokens <= 256) return heads * 4;
  return std::max(tokens <= 4096 ? heads : heads * 1024 / tokens, kLeastSamples);
}

Curves measure(std::int64_t dim, std::int64_t tokens, std::uint64_t stream) {
  const Tokens q = normal_tokens(stream * 2, rows_of(dim), dim);
  const Tokens k = normal_tokens(stream * 2 + 1, tokens, dim);
  const double uniform = std::log(static_cast<double>(tokens));
  Curves curves;
  for (std::size_t i = 0; i < kRungs; ++i) {
    const Concentration lln = lln_concentration(q, k, rung(dim, i), rung(dim, i));
    curves.log_variance[i] = lln.log_variance;
    curves.deficit[i] = uniform - lln.entropy;
  }
  const SoftmaxScores softmax(q, k);
  for (std::size_t i = 0; i < kTargets; ++i) {
    curves.softmax_deficit[i] = uniform - softmax.entropy(std::sqrt(target(i)));
  }
  return curves;
}

template <std::size_t kSize>
std::array<Estimate, kSize> estimate(const std::vector<Curves>& samples,
                                     std::array<double, kSize> Curves::*curve) {
  std::array<Estimate, kSize> estimates;
  const auto count = static_cast<double>(samples.size());
  for (std::size_t i = 0; i < kSize; ++i) {
    double mean = 0, squares = 0;
    for (const Curves& sample : samples) mean += (sample.*curve)[i] / count;
    for (const Curves& sample : samples) {
      squares += std::pow((sample.*curve)[i] - mean, 2);
    }
    estimates[i] = {mean, std::sqrt(squares / (count - 1) / count)};
  }
  return estimates;
}

// Value at `x` of the cubic through points whose slopes are those of parabolas through three
// neighbours. `xs` rises and x is inside.
double interpolated(std::span<const double> xs, std::span<const double> ys, double x) {
  const auto above =
      static_cast<std::size_t>(std::upper_bound(xs.begin(), xs.end(), x) - xs.begin());
  const std::size_t i = std::clamp<std::size_t>(above, 1, xs.size() - 1) - 1;
  const auto secant = [&](std::size_t j) { return (ys[j + 1] - ys[j]) / (xs[j + 1] - xs[j]); };
  const auto slope = [&](std::size_t j) {
    if (j == 0) return secant(0);
    if (j + 1 == xs.size()) return secant(j - 1);
    const double before = xs[j] - xs[j - 1], after = xs[j + 1] - xs[j];
    return (secant(j - 1) * after + secant(j) * before) / (before + after);
  };
  const double width = xs[i + 1] - xs[i], t = (x - xs[i]) / width;
  return ys[i] * (1 + 2 * t) * (1 - t) * (1 - t) + ys[i + 1] * t * t * (3 - 2 * t) +
         width * t * (1 - t) * (slope(i) * (1 - t) - slope(i + 1) * t);
}

// st where the curve over the rungs has the given value, in logarithms, in which it is smooth.
double invert(const Node& node, const std::array<Estimate, kRungs>& curve, double value) {
  std::array<double, kRungs> logs{}, scales{};
  for (std::size_t i = 0; i < kRungs; ++i) {
    logs[i] = std::log(curve[i].mean);
    scales[i] = std::log(rung(node.dim, i));
  }
  const double x = std::log(value);
  if (!std::is_sorted(logs.begin(), logs.end()) || !(logs.front() <= x && x <= logs.back())) {
    throw Error(ErrorCode::internal,
                fmt::format("lln fit: dim {}, {} tokens: {} is not between {} and {}, or the curve "
                            "does not rise",
                            node.dim, node.tokens, value, curve.front().mean, curve.back().mean));
  }
  return std::exp(interpolated(logs, scales, x));
}

// The estimate nearest to a value.
const Estimate& nearest(const std::array<Estimate, kRungs>& curve, double value) {
  return *std::min_element(curve.begin(), curve.end(), [&](const Estimate& x, const Estimate& y) {
    return std::abs(x.mean - value) < std::abs(y.mean - value);
  });
}

Node simulate(const TableRequest& request, std::int64_t dim, std::int64_t tokens,
              Parallel& parallel) {
  Node node{.dim = dim, .tokens = tokens};
  node.samples = samples_of(request.samples, dim, tokens);
  std::vector<Curves> samples(static_cast<std::size_t>(node.samples));
  for_each_task(parallel, node.samples, [&](std::int64_t sample) {
    const std::uint64_t stream =
        ((request.seed * 1000003 + static_cast<std::uint64_t>(dim)) * 1000003 +
         static_cast<std::uint64_t>(tokens)) *
            1000003 +
        static_cast<std::uint64_t>(sample);
    samples[static_cast<std::size_t>(sample)] = measure(dim, tokens, stream);
  });
  const auto log_variance = estimate(samples, &Curves::log_variance);
  const auto deficit = estimate(samples, &Curves::deficit);
  const auto softmax = estimate(samples, &Curves::softmax_deficit);
  for (std::size_t i = 0; i < kTargets; ++i) {
    node.exact[i] = invert(node, log_variance, target(i));
    node.entropy[i] = invert(node, deficit, softmax[i].mean);
    if (target(i) > 4) continue;
    const Estimate& variance = nearest(log_variance, target(i));
    node.variance_error = std::max(node.variance_error, variance.error / variance.mean);
    node.entropy_error = std::max(
        node.entropy_error, std::hypot(nearest(deficit, softmax[i].mean).error, softmax[i].error));
  }
  return node;
}

std::string array_text(const std::vector<Node>& nodes, std::array<double, kTargets> Node::*values) {
  std::string text;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    text += fmt::format("{}    // dim {}, {} tokens\n    {{",
                        i % kTokens.size() == 0 ? "  {{\n" : "", nodes[i].dim, nodes[i].tokens);
    for (std::size_t j = 0; j < kTargets; ++j) {
      text += fmt::format("{}{:.4f}",
                          j == 0        ? ""
                          : j % 11 == 0 ? ",\n     "
                                        : ", ",
                          (nodes[i].*values)[j]);
    }
    text += fmt::format("}},\n{}", (i + 1) % kTokens.size() == 0 ? "  }},\n" : "");
  }
  return text;
}

std::string header_text(const TableRequest& request, const std::vector<Node>& nodes,
                        double minutes) {
  return fmt::format(
      "// Tables of the matching modes exact and entropy: st = alpha sigma_q = beta sigma_k by "
      "dim,\n"
      "// tokens and target sigma_q^2 sigma_k^2, from simulated Gaussian heads "
      "(docs/matching.md).\n"
      "// Written by   lln fit --table FILE --samples {} --seed {}\n"
      "// in {:.0f} minutes of processor time; not to be edited by hand.\n"
      "// SPDX-License-Identifier: Apache-2.0\n"
      "#pragma once\n\n"
      "#include <array>\n\n#include \"math/matching_rule.h\"\n\n"
      "namespace lln {{\n\n"
      "using MatchingTable =\n"
      "    std::array<std::array<std::array<float, kTableTargets>, kTableTokens>, kTableDims>;\n\n"
      "// clang-format off\n"
      "inline constexpr MatchingTable kExactTable = {{{{\n{}}}}};\n\n"
      "inline constexpr MatchingTable kEntropyTable = {{{{\n{}}}}};\n"
      "// clang-format on\n\n"
      "}}  // namespace lln\n",
      request.samples, request.seed, minutes, array_text(nodes, &Node::exact),
      array_text(nodes, &Node::entropy));
}

void report(const TableRequest& request, const std::vector<Node>& nodes) {
  if (request.json) {
    Json list = Json::array();
    for (const Node& node : nodes) {
      list.push_back({{"dim", node.dim},
                      {"tokens", node.tokens},
                      {"samples", node.samples},
                      {"variance_error", node.variance_error},
                      {"entropy_error", node.entropy_error},
                      {"exact", node.exact},
                      {"entropy", node.entropy}});
    }
    print_json({{"output", request.path}, {"nodes", list}});
    return;
  }
  fmt::print(
      "Standard errors for targets up to 4: of Var(ln P), and of the entropy in nats.\n\n"
      "   dim  tokens  samples   Var(ln P)   entropy\n");
  for (const Node& node : nodes) {
    fmt::print("  {:>4}  {:>6}  {:>7}  {:>9.2f}%  {:>8.4f}\n", node.dim, node.tokens, node.samples,
               100 * node.variance_error, node.entropy_error);
  }
  fmt::print("\nwrote {}\n", request.path);
}

}  // namespace

int make_table(const TableRequest& request) {
  if (const std::string obstacle = io::write_obstacle(request.path); !obstacle.empty()) {
    throw Error(ErrorCode::io, obstacle);
  }
  const std::clock_t start = std::clock();
  ThreadPool threads(request.threads);
  Progress progress("lln fit");
  CountedTasks tasks(threads, progress);
  std::vector<Node> nodes;
  for (const std::int64_t dim : kDims) {
    for (const std::int64_t tokens : kTokens) {
      progress.stage(fmt::format("lln fit: dim {}, {} tokens", dim, tokens));
      nodes.push_back(simulate(request, dim, tokens, tasks));
    }
  }
  const double minutes = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / 60;
  const std::string text = header_text(request, nodes, minutes);
  const NotedSignals signals;
  const std::function<bool()> interrupted = [&] { return signals.arrived(); };
  io::OutputFile file(request.path, interrupted);
  file.write(std::as_bytes(std::span(text)));
  file.rename_to_target();
  report(request, nodes);
  return kOk;
}

}  // namespace lln::cli
