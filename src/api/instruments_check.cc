// Rules for matrices and for the options of instruments.
// SPDX-License-Identifier: Apache-2.0
#include "api/instruments_check.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <vector>

#include "lln/error.h"

namespace lln {

namespace {

void check_view(Faults& faults, const char* name, const ConstView& view, const Shape& shape,
                DType dtype) {
  if (!view.given()) {
    faults.add(fmt::format("{} is not given: expected [1, 1, tokens, dim]", name));
    return;
  }
  const Shape& found = view.shape;
  if (found[0] != 1 || found[1] != 1 || found[2] < 1 || found[3] < 1) {
    faults.add(
        fmt::format("{} has shape {}: expected [1, 1, tokens, dim], one head with at least "
                    "one token",
                    name, to_string(found)));
    return;
  }
  faults.tensor(name, view, shape, dtype, Device{});
}

void check_finite(Faults& faults, const char* name, const ConstView& view, const Exec& exec) {
  std::array<Moments, 1> moments;
  head_moments({.x = view}, moments, {.parallel = exec.parallel});
  if (!std::isfinite(moments[0].m2)) {
    faults.add(fmt::format("{} holds an infinity, NaN or numbers whose squares overflow", name));
  }
}

// How far a row of rounded probabilities may be from one.
double sum_tolerance(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::f64:
      return 1e-5;
    case DType::f16:
    case DType::bf16:
      return 1e-2;
  }
  return 0;
}

void check_row(Faults& faults, const ConstView& p, bool causal, std::int64_t row,
               std::vector<double>& numbers) {
  cpu::load_rows(cpu::rows_of(p, 0, 0, 0), row, 1, 1, numbers.data(),
                 static_cast<std::int64_t>(numbers.size()));
  double sum = 0;
  for (std::int64_t j = 0; j < p.shape[3]; ++j) {
    const double x = numbers[static_cast<std::size_t>(j)];
    if (!(x >= 0) || !std::isfinite(x)) {
      faults.add(fmt::format("p[0, 0, {}, {}] is {}: expected a probability", row, j, x));
      return;
    }
    if (causal && j > row && x > 0) {
      faults.add(
          fmt::format("p[0, 0, {}, {}] is {}: expected 0 above the diagonal of a causal "
                      "matrix",
                      row, j, x));
      return;
    }
    sum += x;
  }
  if (std::abs(sum - 1) > sum_tolerance(p.dtype)) {
    faults.add(fmt::format("row {} of p sums to {}: expected 1", row, sum));
  }
}

void check_given(Faults& faults, const AttentionMatrix& matrix) {
  const ConstView& p = matrix.p;
  const std::size_t before = faults.count();
  check_view(faults, "p", p, {1, 1, p.shape[2], p.shape[2]}, p.dtype);
  if (matrix.q.given() || matrix.k.given()) {
    faults.add("q or k is given beside p: expected the matrix alone");
  }
  if (faults.count() != before) return;
  constexpr std::size_t kShown = 4;
  std::vector<double> numbers(static_cast<std::size_t>(cpu::padded_f64(p.shape[3])));
  for (std::int64_t i = 0; i < p.shape[2] && faults.count() < before + kShown; ++i) {
    check_row(faults, p, matrix.causal, i, numbers);
  }
}

void expect(Faults& faults, bool right, const char* name, double found, const char* expected) {
  if (!right) faults.add(fmt::format("{} is {}: expected {}", name, found, expected));
}

}  // namespace

void check_inputs(Faults& faults, const ConstView& q, const ConstView& k, const Exec& exec) {
  const std::size_t before = faults.count();
  check_view(faults, "q", q, q.shape, q.dtype);
  check_view(faults, "k", k, q.shape, q.dtype);
  if (faults.count() != before) return;
  check_finite(faults, "q", q, exec);
  check_finite(faults, "k", k, exec);
}

void check_matrix(Faults& faults, const AttentionMatrix& matrix, const Exec& exec) {
  if (matrix.kind == MatrixKind::given) return check_given(faults, matrix);
  check_inputs(faults, matrix.q, matrix.k, exec);
  if (matrix.p.given()) faults.add("p is given: expected q and k alone for this kind");
  if (matrix.kind == MatrixKind::lln || matrix.kind == MatrixKind::lln_diag) {
    expect(faults, std::isfinite(matrix.alpha), "alpha", matrix.alpha, "a finite number");
    expect(faults, std::isfinite(matrix.beta), "beta", matrix.beta, "a finite number");
    expect(faults, matrix.power > 0 && std::isfinite(matrix.power), "power", matrix.power,
           "a positive number");
  }
  if (matrix.kind == MatrixKind::diag || matrix.kind == MatrixKind::lln_diag) {
    expect(faults, matrix.diag_block >= 1, "diag_block", static_cast<double>(matrix.diag_block),
           "at least 1");
    expect(faults, matrix.mix >= 0 && matrix.mix <= 1, "mix", matrix.mix, "0 to 1");
  }
  if (matrix.kind == MatrixKind::performer) {
    expect(faults, matrix.features >= 1, "features", static_cast<double>(matrix.features),
           "at least 1");
  }
}

void check_options(Faults& faults, const InstrumentOptions& options) {
  const auto count = [&](const char* name, std::int64_t found, std::int64_t least,
                         std::int64_t most) {
    if (found >= least && found <= most) return;
    faults.add(fmt::format("{} is {}: expected {} to {}", name, found, least, most));
  };
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  count("rows", options.rows, 0, kMany);
  for (const std::int64_t k : options.top_k) count("top_k", k, 1, 65536);
  count("bins", options.bins, 1, 8192);
  count("qq_points", options.qq_points, 0, 65536);
  count("positions", options.positions, 1, kMany);
  count("eigenvalues", options.eigenvalues, 2, 25);
  count("max_applications", options.max_applications, 1, kMany);
  count("max_steps", options.max_steps, 1, kMany);
  count("starts", options.starts, 1, 4096);
  expect(faults, options.tolerance > 0 && options.tolerance < 1, "tolerance", options.tolerance,
         "more than 0 and less than 1");
  expect(faults, options.mixing_distance > 0 && options.mixing_distance < 1, "mixing_distance",
         options.mixing_distance, "more than 0 and less than 1");
}

std::string spectrum_refusal(analysis::Weights& weights, Parallel* parallel) {
  if (weights.causal()) {
    return "the matrix is causal: P is triangular, so its eigenvalues are its diagonal and say "
           "nothing of how rows mix; entropy against position is given instead";
  }
  if (!weights.may_have_empty_rows()) return {};
  weights.prepare(parallel);
  const std::optional<std::int64_t> row = weights.first_empty_row(parallel);
  if (!row) return {};
  return fmt::format(
      "row {} has no weights, since its query is zero or orthogonal to every key: P is no "
      "transition matrix, and its eigenvalues say nothing of how rows mix",
      *row);
}

std::string describe(const AttentionMatrix& matrix) {
  const ConstView& x = matrix.kind == MatrixKind::given ? matrix.p : matrix.q;
  return fmt::format("{}{} of {} tokens, dim {}", to_string(matrix),
                     matrix.causal ? ", causal," : "", x.shape[2], x.shape[3]);
}

}  // namespace lln
