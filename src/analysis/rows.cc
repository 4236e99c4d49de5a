// One pass over rows of P: entropy, moments and histogram of ln P, largest weights, column means.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "analysis/instruments.h"
#include "analysis/normality.h"
#include "api/kernel.h"
#include "math/random.h"

namespace lln::analysis {
namespace {

// Rows are cut into at most so many groups with sums of their own: a vector of column sums each.
constexpr std::int64_t kGroups = 16;
// In place of the entropy of a row that has no weights.
constexpr double kNoWeights = -1;

// One row of each of `count` equal strata.
std::vector<std::int64_t> choose_rows(std::int64_t tokens, std::int64_t count, std::uint64_t seed) {
  std::vector<std::int64_t> rows(size(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t first = i * tokens / count, end = (i + 1) * tokens / count;
    const double u = count == tokens ? 0 : uniform_number(seed, static_cast<std::uint64_t>(i));
    rows[size(i)] = first + static_cast<std::int64_t>(u * static_cast<double>(end - first));
  }
  return rows;
}

// The largest weights of the rows of a block so far, a heap for each with its smallest in front.
class LargestWeights {
 public:
  LargestWeights(std::int64_t keep) : keep_(size(keep)), heaps_(kRowBlock) {
    for (std::vector<double>& heap : heaps_) heap.reserve(keep_ + 1);
  }
  void clear() {
    for (std::vector<double>& heap : heaps_) heap.assign(keep_, 0.0);
  }
  void add(std::size_t row, double p) {
    std::vector<double>& heap = heaps_[row];
    if (p <= heap.front()) return;
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.back() = p;
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  }
  // Sums of the k largest for each k; the heap of the row is gone afterwards.
  void take(std::size_t row, std::span<const std::int64_t> sizes, std::span<double> masses) {
    std::vector<double>& heap = heaps_[row];
    std::sort(heap.begin(), heap.end(), std::greater<>());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      masses[i] += std::accumulate(heap.begin(), heap.begin() + sizes[i], 0.0);
    }
  }

 private:
  std::size_t keep_;
  std::vector<std::vector<double>> heaps_;
};

// Sums of one group of rows.
struct Group {
  std::vector<double> columns;  // [tokens]
  FineHistogram histogram;
  std::vector<double> top;  // one per size
  PowerSums log_p, log_a;
  double squares = 0;
  double zeros = 0;  // weights that are 0 although the row sees the key
};

// Sums of the rows of a block, [ld] each, as add_weights() wants them.
struct BlockSums {
  std::array<std::vector<double>, 7> columns;
  BlockSums() {
    for (std::vector<double>& column : columns) column.resize(kRowBlock);
  }
  void clear() {
    for (std::vector<double>& column : columns) std::fill(column.begin(), column.end(), 0.0);
  }
  cpu::WeightSums view() {
    return {columns[0].data(), columns[1].data(), columns[2].data(), columns[3].data(),
            columns[4].data(), columns[5].data(), columns[6].data()};
  }
  PowerSums log_p(std::size_t row, double pivot) const {
    return {pivot,
            columns[0][row],
            {columns[3][row], columns[4][row], columns[5][row], columns[6][row]}};
  }
};

struct Worker {
  Scratch scratch;
  LargestWeights largest;
  BlockSums sums;
  std::vector<double> totals;  // of |p|, signed matrices
};

class RowPass {
 public:
  RowPass(const Weights& weights, const InstrumentOptions& options, Parallel* parallel)
      : weights_(weights),
        options_(options),
        parallel_(parallel),
        tokens_(weights.tokens()),
        rows_(choose_rows(tokens_, options.rows == 0 ? tokens_ : std::min(options.rows, tokens_),
                          options.seed)),
        entropy_(rows_.size()),
        sizes_(options.top_k) {
    for (std::int64_t& k : sizes_) k = std::min(k, tokens_);
    const std::int64_t keep = sizes_.empty() ? 1 : *std::max_element(sizes_.begin(), sizes_.end());
    for (int i = 0; i < worker_count(parallel); ++i) {
      workers_.push_back({weights.make_scratch(), LargestWeights(keep), BlockSums(),
                          std::vector<double>(kRowBlock)});
    }
  }

  RowStatistics run();

 private:
  std::span<const std::int64_t> block(std::int64_t number) const {
    const Range range = piece(static_cast<std::int64_t>(rows_.size()), kRowBlock, number);
    return std::span(rows_).subspan(size(range.first), size(range.count));
  }
  template <class Body>
  void each_tile(std::span<const std::int64_t> rows, Worker& worker, Body&& body) const;
  void guess_range();
  void read_rows();
  void read_block(std::int64_t number, Group& group, Worker& worker);
  void read_tile(Group& group, Worker& worker) const;
  void join_groups();
  void drop_empty_rows();
  RowStatistics joined();
  EntropyStatistics entropy_statistics() const;
  std::vector<PositionEntropy> entropy_by_position() const;
  LogNormality log_normality(const Group& all) const;

  const Weights& weights_;
  const InstrumentOptions& options_;
  Parallel* parallel_;
  std::int64_t tokens_;
  std::vector<std::int64_t> rows_;  // once drop_empty_rows() was called: those with weights
  std::vector<double> entropy_;     // of rows_
  std::int64_t looked_at_ = static_cast<std::int64_t>(rows_.size());
  std::vector<std::int64_t> sizes_;
  std::vector<Worker> workers_;
  std::vector<Group> groups_;
  double pivot_ = 0, sigma_ = 0;
};

// Tiles of |P| with rows that sum to one, and ln of them.
template <class Body>
void RowPass::each_tile(std::span<const std::int64_t> rows, Worker& worker, Body&& body) const {
  Scratch& scratch = worker.scratch;
  const std::int64_t end = weights_.visible(rows.back());
  const auto walk = [&](bool with_log, auto&& use) {
    for (std::int64_t tile = 0; tile < pieces(end, kKeyTile); ++tile) {
      weights_.take_keys(piece(end, kKeyTile, tile), scratch);
      weights_.make_tile(scratch, with_log);
      use();
    }
  };
  weights_.take_rows(rows, scratch);
  if (!weights_.is_signed()) return walk(true, body);
  std::fill(worker.totals.begin(), worker.totals.end(), 0.0);
  const auto each_entry = [&](auto&& change) {
    for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        change(scratch.p[size(j * scratch.ld) + r], worker.totals[r]);
      }
    }
  };
  walk(false, [&] { each_entry([](double p, double& total) { total += std::abs(p); }); });
  walk(false, [&] {
    each_entry([](double& p, double total) { p = total > 0 ? std::abs(p) / total : 0; });
    cpu::logarithms(scratch.p.data(), scratch.keys.count * scratch.ld, scratch.log_p.data());
    body();
  });
}

// Mean and deviation of ln P in some rows, so that the bins of all lie where they are needed.
void RowPass::guess_range() {
  const auto count = static_cast<std::int64_t>(rows_.size());
  std::vector<std::int64_t> some;
  for (std::int64_t i = 0; i < std::min(count, kRowBlock); ++i) {
    some.push_back(rows_[size(i * count / std::min(count, kRowBlock))]);
  }
  Worker& worker = workers_.front();
  worker.sums.clear();
  each_tile(some, worker, [&] {
    cpu::add_weights(worker.scratch.p.data(), worker.scratch.log_p.data(),
                     worker.scratch.keys.count, worker.scratch.ld, 0, worker.sums.view());
  });
  PowerSums sums;
  for (std::size_t r = 0; r < some.size(); ++r) sums.add(worker.sums.log_p(r, 0));
  const CentralMoments moments = central_moments(sums);
  pivot_ = moments.mean;
  sigma_ = std::sqrt(moments.variance);
}

void RowPass::read_tile(Group& group, Worker& worker) const {
  Scratch& scratch = worker.scratch;
  const std::size_t rows = scratch.rows.size();
  cpu::add_weights(scratch.p.data(), scratch.log_p.data(), scratch.keys.count, scratch.ld, pivot_,
                   worker.sums.view());
  for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
    const double* const p = scratch.p.data() + j * scratch.ld;
    const double* const log_p = scratch.log_p.data() + j * scratch.ld;
    double column = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      column += p[r];
      worker.largest.add(r, p[r]);
      if (log_p[r] > -HUGE_VAL) group.histogram.add(log_p[r]);
    }
    group.columns[size(scratch.keys.first + j)] += column;
  }
}

void RowPass::read_block(std::int64_t number, Group& group, Worker& worker) {
  const std::span<const std::int64_t> rows = block(number);
  worker.sums.clear();
  worker.largest.clear();
  each_tile(rows, worker, [&] { read_tile(group, worker); });
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const PowerSums log_p = worker.sums.log_p(r, pivot_);
    double& entropy = entropy_[size(number * kRowBlock) + r];
    entropy = kNoWeights;
    if (log_p.count == 0) continue;
    entropy = std::max(0.0, -worker.sums.columns[2][r]);
    group.log_p.add(log_p);
    if (weights_.has_mass()) group.log_a.add(log_p.shifted(worker.scratch.mass[r]));
    group.squares += worker.sums.columns[1][r];
    group.zeros += static_cast<double>(weights_.visible(rows[r])) - log_p.count;
    worker.largest.take(r, sizes_, group.top);
  }
}

// The pass again where the rows that the bins were made for were unlike the others.
RowStatistics RowPass::run() {
  guess_range();
  read_rows();
  const CentralMoments moments = central_moments(groups_.front().log_p);
  const double sigma = std::sqrt(moments.variance);
  const bool unlike =
      std::abs(moments.mean - pivot_) > 2 * sigma_ || sigma > 4 * sigma_ || sigma < sigma_ / 4;
  if (sigma > 0 && unlike && !weights_.causal()) {
    pivot_ = moments.mean;
    sigma_ = sigma;
    read_rows();
  }
  return joined();
}

void RowPass::read_rows() {
  const std::int64_t blocks = pieces(static_cast<std::int64_t>(rows_.size()), kRowBlock);
  const std::int64_t groups = std::min(kGroups, blocks);
  Group empty{std::vector<double>(size(tokens_)), FineHistogram(pivot_, sigma_),
              std::vector<double>(sizes_.size())};
  empty.log_p.pivot = empty.log_a.pivot = pivot_;
  groups_.assign(size(groups), empty);
  for (std::int64_t first = 0; first < blocks; first += groups) {
    report(options_, "rows", first, blocks);
    parallel_for(parallel_, std::min(groups, blocks - first), [&](std::int64_t task, int worker) {
      read_block(first + task, groups_[size(task)], workers_[static_cast<std::size_t>(worker)]);
    });
  }
  report(options_, "rows", blocks, blocks);
  join_groups();
}

EntropyStatistics RowPass::entropy_statistics() const {
  const auto n = static_cast<double>(entropy_.size());
  std::vector<double> sorted = entropy_;
  std::sort(sorted.begin(), sorted.end());
  PowerSums sums{sorted[sorted.size() / 2]};
  for (const double h : entropy_) sums.add(h);
  const CentralMoments moments = central_moments(sums);
  const auto quantile = [&](double probability) {
    const double at = probability * (n - 1);
    const auto low = static_cast<std::size_t>(at);
    const std::size_t high = std::min(low + 1, sorted.size() - 1);
    return std::lerp(sorted[low], sorted[high], at - static_cast<double>(low));
  };
  // Rows that were drawn without replacement say all about themselves.
  const double unseen = 1 - static_cast<double>(looked_at_) / static_cast<double>(tokens_);
  EntropyStatistics out{static_cast<std::int64_t>(entropy_.size()), moments.mean};
  if (n > 1) out.standard_error = std::sqrt(moments.variance / (n - 1) * unseen);
  out.min = sorted.front();
  out.max = sorted.back();
  out.p05 = quantile(0.05);
  out.p25 = quantile(0.25);
  out.p50 = quantile(0.5);
  out.p75 = quantile(0.75);
  out.p95 = quantile(0.95);
  return out;
}

std::vector<PositionEntropy> RowPass::entropy_by_position() const {
  std::vector<PositionEntropy> list;
  const auto count = static_cast<std::int64_t>(rows_.size());
  const std::int64_t bins = std::min(options_.positions, count);
  for (std::int64_t bin = 0; bin < bins; ++bin) {
    const std::int64_t first = bin * count / bins, end = (bin + 1) * count / bins;
    PositionEntropy entry{rows_[size(first)], rows_[size(end - 1)]};
    for (std::int64_t i = first; i < end; ++i) {
      const auto share = 1 / static_cast<double>(end - first);
      entry.mean += share * entropy_[size(i)];
      entry.limit += share * std::log(static_cast<double>(weights_.visible(rows_[size(i)])));
    }
    list.push_back(entry);
  }
  return list;
}

LogNormality RowPass::log_normality(const Group& all) const {
  const CentralMoments moments = central_moments(all.log_p);
  LogNormality out;
  out.entries = all.log_p.count;
  out.zeros = all.zeros / (all.zeros + all.log_p.count);
  out.mean = moments.mean;
  out.variance = moments.variance;
  out.skewness = moments.skewness;
  out.excess_kurtosis = moments.excess_kurtosis;
  out.ks = all.histogram.ks(moments);
  if (weights_.has_mass()) out.unnormalised_variance = central_moments(all.log_a).variance;
  out.histogram = all.histogram.coarse(options_.bins);
  out.qq = all.histogram.quantiles(moments, options_.qq_points);
  return out;
}

void RowPass::join_groups() {
  Group& all = groups_.front();
  for (std::size_t g = 1; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    for (std::size_t j = 0; j < all.columns.size(); ++j) all.columns[j] += group.columns[j];
    for (std::size_t i = 0; i < all.top.size(); ++i) all.top[i] += group.top[i];
    all.histogram.add(group.histogram);
    all.log_p.add(group.log_p);
    all.log_a.add(group.log_a);
    all.squares += group.squares;
    all.zeros += group.zeros;
  }
}

void RowPass::drop_empty_rows() {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (entropy_[i] == kNoWeights) continue;
    rows_[kept] = rows_[i];
    entropy_[kept++] = entropy_[i];
  }
  rows_.resize(kept);
  entropy_.resize(kept);
}

RowStatistics RowPass::joined() {
  drop_empty_rows();
  Group& all = groups_.front();
  const auto n = static_cast<double>(rows_.size());
  RowStatistics out;
  out.empty_rows = looked_at_ - static_cast<std::int64_t>(rows_.size());
  for (const std::int64_t k : sizes_) out.top.push_back({k, 0});
  if (rows_.empty()) return out;
  out.entropy = entropy_statistics();
  if (weights_.causal()) {
    out.by_position = entropy_by_position();
  } else {
    out.log = log_normality(all);
  }
  const double mean = 1 / static_cast<double>(tokens_);
  out.squares = all.squares / n;
  out.variance = std::max(0.0, mean * (out.squares - mean));
  for (std::size_t i = 0; i < sizes_.size(); ++i) out.top[i].mass = all.top[i] / n;
  for (double& column : all.columns) column /= n;
  out.column_entropy = entropy_of(all.columns);
  return out;
}

}  // namespace

double entropy_of(std::span<const double> shares) {
  double sum = 0;
  for (const double x : shares) {
    if (x > 0) sum -= x * std::log(x);
  }
  return std::max(0.0, sum);
}

RowStatistics row_statistics(Weights& weights, const InstrumentOptions& options,
                             Parallel* parallel) {
  if (options.rows == 0 || options.rows >= weights.tokens()) weights.prepare(parallel);
  return RowPass(weights, options, parallel).run();
}

}  // namespace lln::analysis
