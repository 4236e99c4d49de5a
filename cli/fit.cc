// lln fit: the constants of moment matching, re-estimated. Gaussian q and k of one sigma go through
// the library, and the variance of ln P over all entries against t = sigma_q^2 + sigma_k^2 is
// fitted by a line.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>
#include <vector>

#include "conformance/data.h"
#include "fit_table.h"
#include "fit_verify.h"
#include "lln/attention.h"
#include "lln/error.h"
#include "lln/moments.h"
#include "log_weights.h"
#include "progress.h"
#include "tasks.h"
#include "verb.h"

namespace lln::cli {
namespace {

constexpr std::int64_t kSamplesAtOnce = 8;  // the batch of a call

// Where the tables are verified unless --dim and --tokens say otherwise.
const std::vector<std::int64_t> kVerifiedDims = {16, 32, 64, 128}, kVerifiedTokens = {256, 4096};

struct Request {
  std::vector<std::int64_t> dims = {16, 32, 48, 64, 80, 96, 128};
  std::int64_t tokens = 512;
  std::vector<double> range = {0.75, 3};
  std::int64_t samples = 128;
  std::uint64_t seed = 1;
  int threads = 0;
  bool json = false;
  std::string table;    // a file to write: tables instead of lines
  bool verify = false;  // the tables of the library instead
};

struct Point {
  double t = 0;         // sigma_q^2 + sigma_k^2, as measured
  double variance = 0;  // of ln P
};

struct Fit {
  std::int64_t dim = 0;
  std::vector<Point> points = {};
  MatchingConstants line = {};
  double residual = 0;  // root mean square
};

// Memory of a few samples at once, and their way through the library.
class Simulation {
 public:
  Simulation(const Request& request, std::int64_t dim, Parallel& parallel)
      : request_(request),
        shape_{kSamplesAtOnce, 1, request.tokens, dim},
        parallel_(parallel),
        q_(static_cast<std::size_t>(kSamplesAtOnce * request.tokens * dim)),
        k_(q_.size()),
        log_weights_(kSamplesAtOnce, request.tokens) {}

  // Samples [first, first + count) of the fit, count at most kSamplesAtOnce.
  std::vector<Point> run(std::int64_t first, std::int64_t count) {
    shape_[0] = count;
    for_each_task(parallel_, count, [&](std::int64_t i) { draw(first + i, i); });
    const float one = 1;
    const AttentionInputs in{.q = view(q_.data(), shape_),
                             .k = view(k_.data(), shape_),
                             .alpha = scalar(&one),
                             .beta = scalar(&one)};
    const std::vector<Moments> q = sequence_moments(in.q, parallel_),
                               k = sequence_moments(in.k, parallel_),
                               logs = log_weights_.moments(in, Kind::lln, parallel_);
    std::vector<Point> points;
    for (std::size_t i = 0; i < logs.size(); ++i) {
      points.push_back({q[i].variance() + k[i].variance(), logs[i].variance()});
    }
    return points;
  }

 private:
  // Sigmas are drawn one from each of equal parts of the range: uniform, with less noise.
  void draw(std::int64_t sample, std::int64_t slot) {
    const auto stream = [&](std::uint64_t which) {
      const auto dim = static_cast<std::uint64_t>(shape_[3]);
      return ((request_.seed * 1000003 + dim) * 1000003 + static_cast<std::uint64_t>(sample)) * 4 +
             which;
    };
    // The normal distribution function of a normal number is uniform.
    const double u =
        0.5 * std::erfc(-conformance::normal_number(stream(0), 0) / std::numbers::sqrt2);
    const double place = (static_cast<double>(sample) + u) / static_cast<double>(request_.samples);
    const double sigma = request_.range[0] + (request_.range[1] - request_.range[0]) * place;
    const std::int64_t size = shape_[2] * shape_[3];
    for (std::int64_t i = 0; i < size; ++i) {
      const auto index = static_cast<std::uint64_t>(i);
      const auto at = static_cast<std::size_t>(slot * size + i);
      q_[at] = static_cast<float>(sigma * conformance::normal_number(stream(1), index));
      k_[at] = static_cast<float>(sigma * conformance::normal_number(stream(2), index));
    }
  }

  const Request& request_;
  Shape shape_;
  Parallel& parallel_;
  std::vector<float> q_, k_;  // [sample, 1, token, dim]
  LogWeights log_weights_;
};

void fit_line(Fit& fit) {
  const auto n = static_cast<double>(fit.points.size());
  double mean_t = 0, mean_v = 0;
  for (const Point& p : fit.points) {
    mean_t += p.t / n;
    mean_v += p.variance / n;
  }
  double tt = 0, tv = 0, squares = 0;
  for (const Point& p : fit.points) {
    tt += (p.t - mean_t) * (p.t - mean_t);
    tv += (p.t - mean_t) * (p.variance - mean_v);
  }
  fit.line.a = tv / tt;
  fit.line.b = mean_v - fit.line.a * mean_t;
  for (const Point& p : fit.points) {
    squares += std::pow(p.variance - fit.line.a * p.t - fit.line.b, 2) / n;
  }
  fit.residual = std::sqrt(squares);
}

std::vector<Fit> simulate(const Request& request) {
  ThreadPool threads(request.threads);
  Progress progress("lln fit");
  std::vector<Fit> fits;
  for (const std::int64_t dim : request.dims) {
    progress.stage(fmt::format("lln fit: dim {}", dim));
    progress.step(request.samples);
    Simulation simulation(request, dim, threads);
    Fit& fit = fits.emplace_back(Fit{.dim = dim});
    for (std::int64_t first = 0; first < request.samples; first += kSamplesAtOnce) {
      const std::int64_t count = std::min(kSamplesAtOnce, request.samples - first);
      for (const Point& point : simulation.run(first, count)) {
        fit.points.push_back(point);
        progress.advance();
      }
    }
    fit_line(fit);
  }
  return fits;
}

// Measured points as letters, one for each dim, over the fitted lines as dots.
std::string plot(const std::vector<Fit>& fits) {
  constexpr int kColumns = 64, kRows = 16;
  double most_t = 0, most_v = 0;
  for (const Fit& fit : fits) {
    for (const Point& p : fit.points) {
      most_t = std::max(most_t, p.t);
      most_v = std::max(most_v, p.variance);
    }
  }
  std::array<std::string, kRows> rows;
  rows.fill(std::string(kColumns, ' '));
  const auto mark = [&](double t, double v, char symbol) {
    const int column = std::clamp(static_cast<int>(t / most_t * kColumns), 0, kColumns - 1);
    const int row = static_cast<int>(v / most_v * kRows);
    if (v >= 0 && row <= kRows) {
      rows[static_cast<std::size_t>(kRows - 1 - std::min(row, kRows - 1))]
          [static_cast<std::size_t>(column)] = symbol;
    }
  };
  for (const Fit& fit : fits) {
    for (int c = 0; c < kColumns; ++c) {
      const double t = (c + 0.5) / kColumns * most_t;
      mark(t, fit.line.a * t + fit.line.b, '.');
    }
  }
  std::string legend;
  for (std::size_t i = 0; i < fits.size(); ++i) {
    const char letter = static_cast<char>('a' + i % 26);
    for (const Point& p : fits[i].points) mark(p.t, p.variance, letter);
    legend += fmt::format("{}{} dim {}", i == 0 ? "" : ", ", letter, fits[i].dim);
  }
  std::string text = fmt::format("\nVar(ln P); dots are the lines; {}\n", legend);
  for (int r = 0; r < kRows; ++r) {
    text += fmt::format("{:6.2f} |{}\n", most_v * (kRows - r) / kRows,
                        rows[static_cast<std::size_t>(r)]);
  }
  return text + fmt::format("       +{}\n        0{:>{}.1f}  t\n", std::string(kColumns, '-'),
                            most_t, kColumns - 1);
}

std::string to_text(const Request& request, const std::vector<Fit>& fits) {
  std::string text = fmt::format(
      "Var(ln P) = a t + b for LLN attention with t = alpha^2 sigma_q^2 + beta^2 sigma_k^2;\n"
      "Gaussian q and k, {} tokens, sigma {} to {}, {} samples, seed {}.\n\n"
      "   dim        a         b   residual    library a         b\n",
      request.tokens, request.range[0], request.range[1], request.samples, request.seed);
  for (const Fit& fit : fits) {
    const MatchingConstants library = matching_constants(fit.dim);
    text += fmt::format("  {:>4} {:>8.4f} {:>9.4f} {:>10.4f} {:>12.4f} {:>9.4f}\n", fit.dim,
                        fit.line.a, fit.line.b, fit.residual, library.a, library.b);
  }
  return text + plot(fits);
}

Json to_json(const MatchingConstants& c) { return {{"a", c.a}, {"b", c.b}}; }

Json to_json(const Request& request, const std::vector<Fit>& fits) {
  Json results = Json::array();
  for (const Fit& fit : fits) {
    Json points = Json::array();
    for (const Point& p : fit.points) points.push_back({{"t", p.t}, {"variance", p.variance}});
    results.push_back({{"dim", fit.dim},
                       {"a", fit.line.a},
                       {"b", fit.line.b},
                       {"residual", fit.residual},
                       {"library", to_json(matching_constants(fit.dim))},
                       {"points", points}});
  }
  return {{"tokens", request.tokens},
          {"range", request.range},
          {"samples", request.samples},
          {"seed", request.seed},
          {"results", results}};
}

int run(const Request& request) {
  if (!(request.range[0] < request.range[1])) {
    throw UsageError(fmt::format("--range {} {} is empty: give the lower end first",
                                 request.range[0], request.range[1]));
  }
  const std::vector<Fit> fits = simulate(request);
  for (const Fit& fit : fits) {
    if (std::isfinite(fit.residual)) continue;
    throw Error(ErrorCode::invalid_argument,
                fmt::format("dim {}: a weight fell below what f32 holds: lower the end of --range, "
                            "{}",
                            fit.dim, request.range[1]));
  }
  if (request.json) {
    print_json(to_json(request, fits));
  } else {
    fmt::print("{}", to_text(request, fits));
  }
  return kOk;
}

}  // namespace

Verb add_fit(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("fit", "Re-estimate the constants of moment matching by simulation");
  const auto request = std::make_shared<Request>();
  CLI::Option* const dim =
      command->add_option("--dim", request->dims, "Channels of q and k, one fit for each")
          ->check(CLI::Range(1, 256))
          ->capture_default_str();
  CLI::Option* const tokens = command->add_option("--tokens", request->tokens, "Queries, and keys")
                                  ->check(CLI::Range(2, 65536))
                                  ->capture_default_str();
  CLI::Option* const range =
      command->add_option("--range", request->range, "Least and largest sigma of q and k")
          ->expected(2)
          ->check(CLI::Range(1e-3, 20.0))
          ->capture_default_str();
  command
      ->add_option("--samples", request->samples,
                   "Heads of a fit; --table: of 16 channels; --verify: of 128")
      ->check(CLI::Range(3, 1000000))
      ->capture_default_str();
  command->add_option("--seed", request->seed, "Of the random numbers")->capture_default_str();
  CLI::Option* const verify =
      command
          ->add_flag("--verify", request->verify,
                     "Hold exact and entropy against their promises instead")
          ->excludes(range);
  command
      ->add_option("--table", request->table,
                   "Write the tables of exact and entropy to this file instead")
      ->excludes(dim)
      ->excludes(tokens)
      ->excludes(range)
      ->excludes(verify);
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(
      help_footer("  lln fit\n"
                  "  lln fit --dim 64 --samples 512 --seed 7\n"
                  "  lln fit --dim 40 56 --tokens 1024 --range 0.5 2 --json\n"
                  "  lln fit --verify --samples 256\n"
                  "  lln fit --table src/math/matching_table.h --samples 4096\n"));
  return {command, [request, dim, tokens] {
            if (!request->table.empty()) {
              return make_table({.path = request->table,
                                 .samples = request->samples,
                                 .seed = request->seed,
                                 .threads = request->threads,
                                 .json = request->json});
            }
            if (!request->verify) return run(*request);
            return verify_tables(
                {.dims = dim->empty() ? kVerifiedDims : request->dims,
                 .tokens = tokens->empty() ? kVerifiedTokens : std::vector{request->tokens},
                 .samples = request->samples,
                 .seed = request->seed,
                 .threads = request->threads,
                 .json = request->json});
          }};
}

}  // namespace lln::cli
