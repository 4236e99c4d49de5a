// The random features of FAVOR+: drawn by a seed, the same on every machine up to rounding.
// SPDX-License-Identifier: Apache-2.0
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "analysis/exponents.h"
#include "analysis/instruments.h"
#include "api/kernel.h"
#include "math/random.h"

namespace lln::analysis {
namespace {

using cpu::padded_f64;

constexpr double kOffset = 1e-4;  // added to every feature, as the authors of FAVOR+ do

// [dim, padded features]: columns are the vectors that q and k are projected on.
struct Projection {
  std::int64_t dim = 0, features = 0;
  std::vector<double> columns;
};

// Directions come from the QR decomposition of a Gaussian matrix, one for every `dim` features;
// lengths from other Gaussian vectors, so that each column alone is Gaussian.
Projection draw_projection(std::int64_t dim, std::int64_t features, std::uint64_t seed) {
  const std::int64_t ld = padded_f64(features);
  Projection projection{dim, features, std::vector<double>(size(dim * ld))};
  std::uint64_t index = 0;
  const auto gaussian = [&](Eigen::Index columns) {
    Eigen::MatrixXd g(dim, columns);
    for (Eigen::Index i = 0; i < g.size(); ++i) g.data()[i] = normal_number(seed, index++);
    return g;
  };
  for (std::int64_t first = 0; first < features; first += dim) {
    const Eigen::HouseholderQR<Eigen::MatrixXd> qr(gaussian(dim));
    const Eigen::MatrixXd directions = qr.householderQ();
    const Eigen::VectorXd lengths = gaussian(dim).colwise().norm();
    for (std::int64_t f = 0; f < std::min(dim, features - first); ++f) {
      for (std::int64_t c = 0; c < dim; ++c) {
        projection.columns[size(c * ld + first + f)] = directions(c, f) * lengths(f);
      }
    }
  }
  return projection;
}

class RandomExponents final : public Exponents {
 public:
  RandomExponents(const ConstView& x, const Projection& projection)
      : x_(cpu::rows_of(x, 0, 0, 0)),
        projection_(projection),
        scale_(std::pow(static_cast<double>(x_.width), -0.25)) {}

  std::int64_t width() const override { return projection_.features; }
  std::int64_t spare() const override { return kKeyTile * padded_f64(x_.width); }

  void load(Range rows, double* out, std::int64_t ld, double* spare) const override {
    const std::int64_t ldx = padded_f64(x_.width), ldp = padded_f64(projection_.features);
    cpu::load_rows(x_, rows.first, rows.count, scale_, spare, ldx);
    cpu::multiply(rows.count, ldp, x_.width, {spare, ldx, 1}, projection_.columns.data(), ldp, out,
                  ld, false);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      double half_norm = 0;
      for (std::int64_t c = 0; c < x_.width; ++c) {
        half_norm += 0.5 * spare[i * ldx + c] * spare[i * ldx + c];
      }
      for (std::int64_t f = 0; f < projection_.features; ++f) {
        double& x = out[i * ld + f];
        x = log_sum(x - half_norm);
      }
    }
  }

 private:
  // ln(e^x + offset) without overflow.
  static double log_sum(double x) {
    return x > 0 ? x + std::log1p(kOffset * std::exp(-x)) : std::log(std::exp(x) + kOffset);
  }

  cpu::ConstRows x_;
  const Projection projection_;
  double scale_;
};

// The share of features whose own part is smaller than the offset.
double floored_share(const Exponents& exponents, std::int64_t tokens, Parallel* parallel) {
  const std::int64_t ld = padded_f64(exponents.width());
  const std::int64_t stride = kKeyTile * ld + exponents.spare();
  const double limit = std::log(2 * kOffset);
  std::vector<double> numbers(size(stride * worker_count(parallel)));
  std::vector<std::int64_t> floored(size(pieces(tokens, kKeyTile)));
  parallel_for(parallel, pieces(tokens, kKeyTile), [&](std::int64_t task, int worker) {
    double* const out = numbers.data() + worker * stride;
    const Range rows = piece(tokens, kKeyTile, task);
    exponents.load(rows, out, ld, out + kKeyTile * ld);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      floored[size(task)] += std::count_if(out + i * ld, out + i * ld + exponents.width(),
                                           [&](double x) { return x < limit; });
    }
  });
  const auto total = std::accumulate(floored.begin(), floored.end(), std::int64_t{0});
  return static_cast<double>(total) / static_cast<double>(tokens * exponents.width());
}

}  // namespace

double floored_features(const AttentionMatrix& matrix, Parallel* parallel) {
  const PerformerFeatures features = performer_exponents(matrix);
  const std::int64_t tokens = matrix.q.shape[2];
  return std::max(floored_share(*features.q, tokens, parallel),
                  floored_share(*features.k, tokens, parallel));
}

PerformerFeatures performer_exponents(const AttentionMatrix& matrix) {
  const Projection projection = draw_projection(matrix.q.shape[3], matrix.features, matrix.seed);
  return {std::make_unique<RandomExponents>(matrix.q, projection),
          std::make_unique<RandomExponents>(matrix.k, projection)};
}

}  // namespace lln::analysis
