// P as a Markov chain: where it ends up, how fast it forgets where it started, and how much one
// step can stretch a vector.
// SPDX-License-Identifier: Apache-2.0
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/instruments.h"

namespace lln::analysis {
namespace {

constexpr double kStationary = 1e-9;  // total variation distance between pi and pi P
constexpr double kNorm = 1e-6;        // residual of |P|_2^2 against it
// Vectors of a Lanczos iteration before it starts anew from the best of what they span.
constexpr std::int64_t kLanczos = 32;
// Beyond this |lambda_2| is 1 up to rounding: rows never agree.
constexpr double kNeverMixes = 1 - 1e-12;

double total_variation(const double* x, const double* y, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += std::abs(x[i] - y[i]);
  return 0.5 * sum;
}

class Chain {
 public:
  Chain(const Weights& weights, const InstrumentOptions& options, Parallel* parallel)
      : weights_(weights), options_(options), parallel_(parallel), n_(size(weights.tokens())) {}

  // pi <- pi P from the uniform distribution on.
  void find_stationary(ChainStatistics& out) const {
    std::vector<double> pi(n_, 1 / static_cast<double>(n_)), next(n_);
    out.stationary_residual = 1;
    for (std::int64_t step = 0; step < options_.max_steps; ++step) {
      report(options_, "stationary", step, options_.max_steps);
      weights_.apply_transposed({pi.data(), 1}, {next.data(), 1}, parallel_);
      out.stationary_residual = total_variation(pi.data(), next.data(), n_);
      pi.swap(next);
      if (out.stationary_residual <= kStationary) break;
    }
    out.stationary_converged = out.stationary_residual <= kStationary;
    out.stationary_entropy = entropy_of(pi);
    out.stationary = std::move(pi);
  }

  // Rows of P^t from some starts, all at once.
  void measure_mixing(ChainStatistics& out, bool mixes) const {
    const std::int64_t starts = std::min(options_.starts, weights_.tokens());
    std::vector<double> rows(size(starts) * n_), next(rows.size());
    for (std::int64_t s = 0; s < starts; ++s) {
      rows[size(s) * n_ + size(s * weights_.tokens() / starts)] = 1;
    }
    for (std::int64_t step = 1; step <= (mixes ? options_.max_steps : 1); ++step) {
      report(options_, "mixing", step - 1, options_.max_steps);
      weights_.apply_transposed({rows.data(), starts}, {next.data(), starts}, parallel_);
      rows.swap(next);
      double largest = 0;
      for (std::int64_t s = 0; s < starts; ++s) {
        largest = std::max(largest,
                           total_variation(rows.data() + size(s) * n_, out.stationary.data(), n_));
      }
      out.distance.push_back(largest);
      if (largest > options_.mixing_distance) continue;
      out.mixing_time = step;
      return;
    }
  }

  // |P|_2 by Lanczos iterations with P^T P from the vector of ones, which P leaves as it is. Steps
  // of P^T P alone would crawl where several singular values are near the largest, as those of the
  // blocks of Diag are.
  double spectral_norm() const {
    const std::int64_t n = weights_.tokens(), columns = std::min(kLanczos, n);
    Eigen::MatrixXd basis(n, columns);
    Eigen::VectorXd diagonal(columns), beside(columns), image(n), next(n);
    Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> projected;
    basis.col(0).setConstant(1 / std::sqrt(static_cast<double>(n)));
    for (std::int64_t step = 0, j = 0;; ++step) {
      report(options_, "norm", step, options_.max_steps);
      weights_.apply({basis.col(j).data(), 1}, {image.data(), 1}, parallel_);
      weights_.apply_transposed({image.data(), 1}, {next.data(), 1}, parallel_);
      diagonal[j] = basis.col(j).dot(next);
      const auto known = basis.leftCols(j + 1);
      for (int twice = 0; twice < 2; ++twice) next -= known * (known.transpose() * next).eval();
      beside[j] = next.norm();
      projected.computeFromTridiagonal(diagonal.head(j + 1), beside.head(j));
      const double largest = projected.eigenvalues()[j];
      const auto vector = projected.eigenvectors().col(j);
      const double residual = beside[j] * std::abs(vector[j]);
      if (residual <= kNorm * largest || step + 1 >= options_.max_steps) return std::sqrt(largest);
      if (++j < columns) {
        basis.col(j) = next / beside[j - 1];
      } else {
        basis.col(0) = (basis * vector).eval().normalized();
        j = 0;
      }
    }
  }

 private:
  const Weights& weights_;
  const InstrumentOptions& options_;
  Parallel* parallel_;
  std::size_t n_;
};

}  // namespace

ChainStatistics chain_statistics(Weights& weights, const Spectrum& spectrum,
                                 const InstrumentOptions& options, Parallel* parallel) {
  weights.prepare(parallel);
  const Chain chain(weights, options, parallel);
  const bool mixes = spectrum.lambda_2 < kNeverMixes;
  ChainStatistics out;
  chain.find_stationary(out);
  if (!mixes) {
    out.mixing_time_from_gap = std::numeric_limits<double>::infinity();
  } else if (spectrum.lambda_2 <= options.mixing_distance) {
    out.mixing_time_from_gap = 1;
  } else {
    out.mixing_time_from_gap =
        std::ceil(std::log(options.mixing_distance) / std::log(spectrum.lambda_2));
  }
  chain.measure_mixing(out, mixes);
  out.spectral_norm = chain.spectral_norm();
  return out;
}

}  // namespace lln::analysis
