// Heads through match_moments, their concentration by concentration.h, and the verdict.
// SPDX-License-Identifier: Apache-2.0
#include "fit_verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "concentration.h"
#include "lln/moments.h"
#include "progress.h"
#include "tasks.h"

namespace lln::cli {
namespace {

constexpr std::array<double, 5> kSigmas = {0.6, 0.8, 1.0, 1.2, 1.4};  // of q and of k
constexpr double kVarianceTolerance = 0.03;  // of Var(ln P) in mode exact, relative
constexpr double kEntropyTolerance = 0.02;   // of the mean entropy in mode entropy, in nats
constexpr std::int64_t kRows = 64;           // of a head that are looked at
constexpr std::int64_t kLeastHeads = 4;

// Channels of a token one after another, as the library takes them.
using LibraryRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct Scales {
  float alpha = 0, beta = 0;
};

Scales matched(const ConstView& q, const ConstView& k, Matching mode) {
  Scales scales;
  match_moments({.q = q, .k = k},
                {view(&scales.alpha, {1, 1, 1, 1}), view(&scales.beta, {1, 1, 1, 1})},
                {.mode = mode});
  return scales;
}

double variance(const ConstView& x) {
  Moments moments;
  head_moments({.x = x}, std::span(&moments, 1));
  return moments.variance();
}

// How far one head is from what was promised.
struct Miss {
  double variance = 0;  // Var(ln P) of mode exact against its target, relative
  double entropy = 0;   // mode entropy minus softmax, in nats
  double softmax = 0;   // entropy of softmax
};

std::array<Miss, kSigmas.size()> measure(std::int64_t dim, std::int64_t tokens,
                                         std::uint64_t stream) {
  const Tokens q = normal_tokens(stream * 2, tokens, dim);
  const Tokens k = normal_tokens(stream * 2 + 1, tokens, dim);
  const Tokens queries = q.topRows(std::min(kRows, tokens));
  const SoftmaxScores softmax(queries, k);
  const Shape shape{1, 1, tokens, dim};
  std::array<Miss, kSigmas.size()> misses;
  for (std::size_t i = 0; i < kSigmas.size(); ++i) {
    const auto sigma = static_cast<float>(kSigmas[i]);
    const LibraryRows scaled_q = sigma * q, scaled_k = sigma * k;
    const ConstView q_view = view(scaled_q.data(), shape), k_view = view(scaled_k.data(), shape);
    const auto reached = [&](Matching mode) {
      const Scales scales = matched(q_view, k_view, mode);
      return lln_concentration(queries, k, scales.alpha * sigma, scales.beta * sigma);
    };
    const double target = variance(q_view) * variance(k_view);
    misses[i].variance = reached(Matching::exact).log_variance / target - 1;
    misses[i].softmax = softmax.entropy(sigma * sigma);
    misses[i].entropy = reached(Matching::entropy).entropy - misses[i].softmax;
  }
  return misses;
}

struct Estimate {
  double mean = 0;
  double error = 0;  // standard error
};

struct Row {
  std::int64_t dim = 0, tokens = 0, samples = 0;
  double sigma = 0;
  Estimate variance, entropy, softmax;
  bool passed() const {
    return std::abs(variance.mean) <= kVarianceTolerance &&
           std::abs(entropy.mean) <= kEntropyTolerance;
  }
};

using Samples = std::vector<std::array<Miss, kSigmas.size()>>;

Estimate estimate(const Samples& samples, std::size_t sigma, double Miss::*what) {
  const auto count = static_cast<double>(samples.size());
  Estimate result;
  double squares = 0;
  for (const auto& sample : samples) result.mean += sample[sigma].*what / count;
  for (const auto& sample : samples) squares += std::pow(sample[sigma].*what - result.mean, 2);
  result.error = std::sqrt(squares / (count - 1) / count);
  return result;
}

std::vector<Row> verify(const VerifyRequest& request, std::int64_t dim, std::int64_t tokens,
                        Parallel& parallel) {
  // As many numbers for every dim: heads scatter more where they have fewer channels.
  Samples samples(static_cast<std::size_t>(std::max(request.samples * 128 / dim, kLeastHeads)));
  for_each_task(parallel, std::ssize(samples), [&](std::int64_t sample) {
    // Not the streams of lln fit --table, whose heads would flatter the tables.
    const std::uint64_t stream =
        (((~request.seed * 1000003 + static_cast<std::uint64_t>(dim)) * 1000003) +
         static_cast<std::uint64_t>(tokens)) *
            1000003 +
        static_cast<std::uint64_t>(sample);
    samples[static_cast<std::size_t>(sample)] = measure(dim, tokens, stream);
  });
  std::vector<Row> rows;
  for (std::size_t i = 0; i < kSigmas.size(); ++i) {
    rows.push_back({.dim = dim,
                    .tokens = tokens,
                    .samples = std::ssize(samples),
                    .sigma = kSigmas[i],
                    .variance = estimate(samples, i, &Miss::variance),
                    .entropy = estimate(samples, i, &Miss::entropy),
                    .softmax = estimate(samples, i, &Miss::softmax)});
  }
  return rows;
}

Json to_json(const Estimate& e) { return {{"mean", e.mean}, {"standard_error", e.error}}; }

void report(const VerifyRequest& request, const std::vector<Row>& rows) {
  if (request.json) {
    Json list = Json::array();
    for (const Row& row : rows) {
      list.push_back({{"dim", row.dim},
                      {"tokens", row.tokens},
                      {"sigma", row.sigma},
                      {"samples", row.samples},
                      {"exact_variance_miss", to_json(row.variance)},
                      {"entropy_miss", to_json(row.entropy)},
                      {"softmax_entropy", row.softmax.mean},
                      {"passed", row.passed()}});
    }
    print_json({{"variance_tolerance", kVarianceTolerance},
                {"entropy_tolerance", kEntropyTolerance},
                {"results", list}});
    return;
  }
  fmt::print(
      "Gaussian heads, seed {}: Var(ln P) of mode exact against sigma_q^2 sigma_k^2 (at most "
      "{:.0f}%"
      " off), and\nthe mean entropy of rows in mode entropy against softmax (at most {} nats), "
      "each "
      "with its standard error.\n\n"
      "   dim  tokens  sigma  samples        Var(ln P)      entropy of softmax      LLN - "
      "softmax\n",
      request.seed, 100 * kVarianceTolerance, kEntropyTolerance);
  for (const Row& row : rows) {
    fmt::print(
        "  {:>4}  {:>6}  {:>5.1f}  {:>7}  {:>+6.2f}% +- {:.2f}%  {:>18.3f}  {:>+8.4f} +- "
        "{:.4f}{}\n",
        row.dim, row.tokens, row.sigma, row.samples, 100 * row.variance.mean,
        100 * row.variance.error, row.softmax.mean, row.entropy.mean, row.entropy.error,
        row.passed() ? "" : "  failed");
  }
}

}  // namespace

int verify_tables(const VerifyRequest& request) {
  ThreadPool threads(request.threads);
  std::vector<Row> rows;
  {
    Progress progress("lln fit");
    CountedTasks tasks(threads, progress);
    for (const std::int64_t dim : request.dims) {
      for (const std::int64_t tokens : request.tokens) {
        progress.stage(fmt::format("lln fit: dim {}, {} tokens", dim, tokens));
        const std::vector<Row> found = verify(request, dim, tokens, tasks);
        rows.insert(rows.end(), found.begin(), found.end());
      }
    }
  }
  report(request, rows);
  return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.passed(); })
             ? kOk
             : kCheckFailed;
}

}  // namespace lln::cli
