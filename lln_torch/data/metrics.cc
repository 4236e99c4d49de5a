// Sums in double, ranks by sorting.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "lln/error.h"

namespace lln_torch {
namespace {

template <class Value>
void check_sizes(std::span<const Value> predicted, std::span<const Value> expected) {
  if (predicted.size() == expected.size()) return;
  throw lln::Error(
      lln::ErrorCode::invalid_argument,
      fmt::format("metrics: {} predictions for {} examples", predicted.size(), expected.size()));
}

double correlation(const std::vector<double>& x, const std::vector<double>& y) {
  if (x.empty()) return 0;
  const auto n = static_cast<double>(x.size());
  const double mean_x = std::accumulate(x.begin(), x.end(), 0.0) / n;
  const double mean_y = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xx = 0, yy = 0, xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    yy += (y[i] - mean_y) * (y[i] - mean_y);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
}

std::vector<double> ranks(std::span<const float> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  std::vector<double> result(values.size());
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin + 1;
    while (end < order.size() && values[order[end]] == values[order[begin]]) ++end;
    const double shared = static_cast<double>(begin + end - 1) / 2;
    for (std::size_t i = begin; i < end; ++i) result[order[i]] = shared;
    begin = end;
  }
  return result;
}

// NaN has no place in an order: a model that predicts one has no correlation with anything.
bool all_numbers(std::span<const float> values) {
  return std::none_of(values.begin(), values.end(), [](float x) { return std::isnan(x); });
}

}  // namespace

double accuracy(std::span<const std::int32_t> predicted, std::span<const std::int32_t> labels) {
  check_sizes(predicted, labels);
  if (labels.empty()) return 0;
  std::int64_t right = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) right += predicted[i] == labels[i] ? 1 : 0;
  return static_cast<double>(right) / static_cast<double>(labels.size());
}

double f1(std::span<const std::int32_t> predicted, std::span<const std::int32_t> labels) {
  check_sizes(predicted, labels);
  std::int64_t both = 0, either = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    both += predicted[i] == 1 && labels[i] == 1 ? 1 : 0;
    either += (predicted[i] == 1 ? 1 : 0) + (labels[i] == 1 ? 1 : 0);
  }
  return either > 0 ? 2 * static_cast<double>(both) / static_cast<double>(either) : 0;
}

double matthews(std::span<const std::int32_t> predicted, std::span<const std::int32_t> labels) {
  check_sizes(predicted, labels);
  const auto n = static_cast<double>(labels.size());
  double right = 0;
  std::map<std::int32_t, std::pair<double, double>> counts;  // predicted, true
  for (std::size_t i = 0; i < labels.size(); ++i) {
    right += predicted[i] == labels[i] ? 1 : 0;
    counts[predicted[i]].first += 1;
    counts[labels[i]].second += 1;
  }
  double predicted_squares = 0, label_squares = 0, products = 0;
  for (const auto& [label, count] : counts) {
    predicted_squares += count.first * count.first;
    label_squares += count.second * count.second;
    products += count.first * count.second;
  }
  const double scale = (n * n - predicted_squares) * (n * n - label_squares);
  return scale > 0 ? (right * n - products) / std::sqrt(scale) : 0;
}

double pearson(std::span<const float> predicted, std::span<const float> scores) {
  check_sizes(predicted, scores);
  if (!all_numbers(predicted)) return 0;
  return correlation({predicted.begin(), predicted.end()}, {scores.begin(), scores.end()});
}

double spearman(std::span<const float> predicted, std::span<const float> scores) {
  check_sizes(predicted, scores);
  if (!all_numbers(predicted)) return 0;
  return correlation(ranks(predicted), ranks(scores));
}

double class_metric(std::string_view name, std::span<const std::int32_t> predicted,
                    std::span<const std::int32_t> labels) {
  if (name == "accuracy") return accuracy(predicted, labels);
  if (name == "f1") return f1(predicted, labels);
  if (name == "matthews") return matthews(predicted, labels);
  throw lln::Error(
      lln::ErrorCode::invalid_argument,
      fmt::format("metric of classes: expected accuracy, f1 or matthews, found {}", name));
}

double score_metric(std::string_view name, std::span<const float> predicted,
                    std::span<const float> scores) {
  if (name == "pearson") return pearson(predicted, scores);
  if (name == "spearman") return spearman(predicted, scores);
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   fmt::format("metric of scores: expected pearson or spearman, found {}", name));
}

}  // namespace lln_torch
