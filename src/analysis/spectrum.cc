// The leading eigenvalues of P: exact where a small matrix has the same ones, otherwise by Arnoldi
// iterations that see P through products alone.
// SPDX-License-Identifier: Apache-2.0
#include <Spectra/GenEigsSolver.h>
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>

#include "analysis/instruments.h"
#include "math/random.h"

namespace lln::analysis {
namespace {

using Eigenvalue = std::complex<double>;
using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Up to here all eigenvalues cost less than an Arnoldi iteration can save: half a megabyte.
constexpr std::int64_t kDenseTokens = 256;
// The Krylov space: large enough that the crowded rim of a spectrum is resolved with few restarts.
constexpr std::int64_t kKrylov = 48;
// |lambda_2| is what must converge, and it may be that of a conjugate pair.
constexpr std::int64_t kConverging = 2;
// A product smaller than this against its vector is rounding.
constexpr double kNothing = 1e-13;

// By falling modulus; conjugates stand together, the one above the axis first.
void sort_eigenvalues(std::vector<Eigenvalue>& values) {
  std::sort(values.begin(), values.end(), [](const Eigenvalue& x, const Eigenvalue& y) {
    const double a = std::abs(x), b = std::abs(y);
    if (std::abs(a - b) > 1e-12 * std::max(a, b)) return a > b;
    return x.real() != y.real() ? x.real() > y.real() : x.imag() > y.imag();
  });
}

Spectrum from_all(std::vector<Eigenvalue> values, std::int64_t wanted, bool is_signed,
                  SpectrumMethod method) {
  sort_eigenvalues(values);
  Spectrum out;
  out.method = method;
  out.is_signed = is_signed;
  const double second = values.size() > 1 ? std::abs(values[1]) : 0;
  const double first = std::abs(values.front());
  out.lambda_2 = !is_signed ? std::min(second, 1.0) : first > 0 ? second / first : 0;
  out.gap = 1 - out.lambda_2;
  values.resize(std::min(values.size(), size(wanted)));
  out.eigenvalues = std::move(values);
  return out;
}

std::vector<Eigenvalue> dense_eigenvalues(const std::vector<double>& numbers, std::int64_t n) {
  const Eigen::Map<const Matrix> matrix(numbers.data(), n, n);
  const Eigen::EigenSolver<Eigen::MatrixXd> solver(matrix, false);
  return {solver.eigenvalues().begin(), solver.eigenvalues().end()};
}

Spectrum dense_spectrum(const Weights& weights, std::int64_t wanted) {
  const std::int64_t n = weights.tokens();
  std::vector<double> p(size(n * n));
  copy_rows(weights, {0, n}, p.data());
  return from_all(dense_eigenvalues(p, n), wanted, weights.is_signed(), SpectrumMethod::dense);
}

// x -> P x less its mean: on vectors modulo constants P has the eigenvalues that are left when the
// first, 1 with the vector of ones, is taken out. Nothing of the left eigenvector need be known.
class Deflated {
 public:
  using Scalar = double;

  Deflated(const Weights& weights, const InstrumentOptions& options, Parallel* parallel)
      : weights_(weights), options_(options), parallel_(parallel) {}
  Eigen::Index rows() const { return weights_.tokens(); }
  Eigen::Index cols() const { return weights_.tokens(); }
  std::int64_t applications() const { return applications_; }

  void perform_op(const double* x, double* y) const {
    report(options_, "spectrum", applications_,
           std::max(options_.max_applications, applications_ + 1));
    ++applications_;
    weights_.apply({x, 1}, {y, 1}, parallel_);
    Eigen::Map<Eigen::VectorXd> out(y, rows());
    out.array() -= out.mean();
  }

 private:
  const Weights& weights_;
  const InstrumentOptions& options_;
  Parallel* parallel_;
  mutable std::int64_t applications_ = 0;
};

// Spectra gives out eigenvalues that have converged; an instrument wants the best estimates of all
// with their errors as well. They are in order already, and sorting would drop those beyond the
// first few.
class Arnoldi : public Spectra::GenEigsSolver<Deflated> {
 public:
  using GenEigsSolver::GenEigsSolver;
  Eigenvalue ritz_value(Eigen::Index i) const { return m_ritz_val[i]; }
  double ritz_residual(Eigen::Index i) const { return std::abs(m_ritz_est[i]) * m_fac.f_norm(); }

 protected:
  void sort_ritzpair(Spectra::SortRule) override {}
};

Spectrum arnoldi_spectrum(const Weights& weights, const InstrumentOptions& options,
                          Parallel* parallel) {
  const std::int64_t n = weights.tokens();
  Deflated op(weights, options, parallel);
  Spectrum out;
  out.method = SpectrumMethod::arnoldi;
  out.eigenvalues = {1};
  Eigen::VectorXd start(n), image(n);
  for (std::int64_t i = 0; i < n; ++i) {
    start[i] = uniform_number(options.seed, static_cast<std::uint64_t>(i)) - 0.5;
  }
  start.array() -= start.mean();
  op.perform_op(start.data(), image.data());
  if (image.norm() > kNothing * start.norm()) {
    Arnoldi solver(op, kConverging, kKrylov);
    solver.init(image.data());
    const std::int64_t restarts =
        std::max<std::int64_t>(0, (options.max_applications - kKrylov) / (kKrylov - kConverging));
    solver.compute(Spectra::SortRule::LargestMagn, restarts, options.tolerance);
    for (std::int64_t i = 0; i < options.eigenvalues - 1; ++i) {
      out.eigenvalues.push_back(solver.ritz_value(i));
    }
    out.restarts = solver.num_iterations() - 1;
    out.residual = solver.ritz_residual(0);
    out.converged = out.residual <= options.tolerance * std::abs(out.eigenvalues[1]);
  } else {
    out.eigenvalues.push_back(0);
  }
  out.lambda_2 = std::min(1.0, std::abs(out.eigenvalues[1]));
  out.gap = 1 - out.lambda_2;
  out.applications = op.applications();
  report(options, "spectrum", out.applications, out.applications);
  return out;
}

}  // namespace

Spectrum spectrum(Weights& weights, const InstrumentOptions& options, Parallel* parallel) {
  if (weights.has_factors()) {
    const std::vector<double> product = weights.factor_product(parallel);
    const auto width = static_cast<std::int64_t>(std::lround(std::sqrt(product.size())));
    return from_all(dense_eigenvalues(product, width), options.eigenvalues, weights.is_signed(),
                    SpectrumMethod::features);
  }
  if (weights.blocks() > 1) {
    return from_all(std::vector<Eigenvalue>(size(weights.blocks()), 1.0), options.eigenvalues,
                    false, SpectrumMethod::blocks);
  }
  if (weights.tokens() <= kDenseTokens) return dense_spectrum(weights, options.eigenvalues);
  weights.prepare(parallel);
  return arnoldi_spectrum(weights, options, parallel);
}

}  // namespace lln::analysis
