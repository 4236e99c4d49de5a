// Instruments: check, make the weights, measure.
// SPDX-License-Identifier: Apache-2.0
#include "lln/instruments.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "analysis/instruments.h"
#include "analysis/theory.h"
#include "api/instruments_check.h"
#include "api/memory_errors.h"
#include "lln/error.h"

namespace lln {
namespace {

using analysis::make_weights;
using analysis::Weights;

std::unique_ptr<Weights> checked(const char* call, const AttentionMatrix& matrix,
                                 const InstrumentOptions& options, const Exec& exec) {
  Faults faults;
  check_matrix(faults, matrix, exec);
  check_options(faults, options);
  faults.throw_any(call, describe(matrix));
  return make_weights(matrix, exec.parallel);
}

void expect_spectrum(const char* call, const AttentionMatrix& matrix, Weights& weights,
                     const Exec& exec) {
  Faults faults;
  if (std::string why = spectrum_refusal(weights, exec.parallel); !why.empty()) {
    faults.add(std::move(why));
  }
  faults.throw_any(call, describe(matrix));
}

// Vectors of as many numbers as the matrix has tokens.
std::int64_t checked_vectors(const char* call, const AttentionMatrix& matrix,
                             std::span<const double> x, std::span<double> y, const Exec& exec) {
  Faults faults;
  check_matrix(faults, matrix, exec);
  const std::int64_t tokens =
      matrix.kind == MatrixKind::given ? matrix.p.shape[2] : matrix.q.shape[2];
  if (tokens > 0 && (x.empty() || x.size() % static_cast<std::size_t>(tokens) != 0)) {
    faults.add(
        fmt::format("x has {} numbers: expected one or more vectors of {}", x.size(), tokens));
  }
  if (y.size() != x.size()) {
    faults.add(fmt::format("y has {} numbers: expected {}, as x", y.size(), x.size()));
  }
  if (x.data() == y.data() && !x.empty()) faults.add("x and y start at the same address");
  faults.throw_any(call, describe(matrix));
  return static_cast<std::int64_t>(x.size()) / tokens;
}

// Beyond this share of floored features a performer is not judged.
constexpr double kMostFloored = 0.5;

// Var(ln P) is of the positive weights. Where zeros are many it says little of the matrix, and
// where the other weights are equal it would call the coldest matrix of all, one key for each row,
// infinitely hot. Zeros outside the blocks of Diag are no weights.
std::optional<double> temperature_of(const AttentionMatrix& matrix, const Examination& found) {
  constexpr double kMostZeros = 0.5;
  if (matrix.kind == MatrixKind::softmax && found.inputs->target() > 0) {
    return 1 / std::sqrt(found.inputs->target());
  }
  if (!found.rows.log) return std::nullopt;
  const double variance = found.rows.log->variance, zeros = found.rows.log->zeros;
  if (matrix.kind == MatrixKind::softmax && variance > 0) return std::nullopt;
  if (matrix.kind != MatrixKind::diag && zeros >= kMostZeros) return std::nullopt;
  if (variance == 0 && zeros > 0) return std::nullopt;
  return 1 / std::sqrt(variance);
}

Examination examine_checked(const AttentionMatrix& matrix, Weights& weights,
                            const InstrumentOptions& options, Parallel* parallel) {
  Examination out;
  out.tokens = weights.tokens();
  if (matrix.kind != MatrixKind::given) {
    out.dim = matrix.q.shape[3];
    out.inputs = analysis::input_statistics(matrix.q, matrix.k, parallel);
  }
  out.rows = analysis::row_statistics(weights, options, parallel);
  if (matrix.kind == MatrixKind::performer) {
    out.floored_features = analysis::floored_features(matrix, parallel);
  }
  out.why_no_spectrum = spectrum_refusal(weights, parallel);
  if (out.why_no_spectrum.empty()) {
    out.spectrum = analysis::spectrum(weights, options, parallel);
    if (out.floored_features.value_or(0) <= kMostFloored) {
      out.verdict =
          concentration_verdict(out.rows.entropy.mean, out.spectrum->lambda_2, out.tokens);
    }
    if (options.chain && !out.spectrum->is_signed) {
      out.chain = analysis::chain_statistics(weights, *out.spectrum, options, parallel);
      out.effective_rank = static_cast<double>(out.tokens) * out.rows.squares /
                           (out.chain->spectral_norm * out.chain->spectral_norm);
    }
  }
  out.temperature = temperature_of(matrix, out);
  if (out.inputs) {
    out.theory = analysis::predict(matrix, *out.inputs, &out.rows,
                                   out.spectrum ? &*out.spectrum : nullptr, options);
  }
  return out;
}

}  // namespace

ConstView head_view(const ConstView& x, std::int64_t sequence, std::int64_t head) noexcept {
  ConstView one = x;
  const std::int64_t offset = sequence * x.stride[0] + head * x.stride[1];
  one.data =
      static_cast<const std::byte*>(x.data) + offset * static_cast<std::int64_t>(size_of(x.dtype));
  one.shape[0] = one.shape[1] = 1;
  return one;
}

void matrix_rows(const AttentionMatrix& matrix, std::int64_t first, std::int64_t count,
                 std::span<double> p, const Exec& exec) {
  memory_errors("matrix_rows", [&] {
    Faults faults;
    check_matrix(faults, matrix, exec);
    const std::int64_t tokens =
        matrix.kind == MatrixKind::given ? matrix.p.shape[2] : matrix.q.shape[2];
    if (first < 0 || count < 0 || first > tokens - count) {
      faults.add(
          fmt::format("rows {} to {}: expected rows from 0 to {}", first, first + count, tokens));
    } else if (p.size() != static_cast<std::size_t>(count * tokens)) {
      faults.add(fmt::format("p has {} numbers: expected {} rows of {}", p.size(), count, tokens));
    }
    faults.throw_any("matrix_rows", describe(matrix));
    analysis::copy_rows(*make_weights(matrix, exec.parallel), {first, count}, p.data());
  });
}

void matrix_apply(const AttentionMatrix& matrix, std::span<const double> x, std::span<double> y,
                  const Exec& exec) {
  memory_errors("matrix_apply", [&] {
    const std::int64_t count = checked_vectors("matrix_apply", matrix, x, y, exec);
    const std::unique_ptr<Weights> weights = make_weights(matrix, exec.parallel);
    weights->prepare(exec.parallel);
    weights->apply({x.data(), count}, {y.data(), count}, exec.parallel);
  });
}

void matrix_apply_transposed(const AttentionMatrix& matrix, std::span<const double> x,
                             std::span<double> y, const Exec& exec) {
  memory_errors("matrix_apply_transposed", [&] {
    const std::int64_t count = checked_vectors("matrix_apply_transposed", matrix, x, y, exec);
    const std::unique_ptr<Weights> weights = make_weights(matrix, exec.parallel);
    weights->prepare(exec.parallel);
    weights->apply_transposed({x.data(), count}, {y.data(), count}, exec.parallel);
  });
}

InputStatistics input_statistics(const ConstView& q, const ConstView& k, const Exec& exec) {
  return memory_errors("input_statistics", [&] {
    Faults faults;
    check_inputs(faults, q, k, exec);
    faults.throw_any("input_statistics", "q and k");
    return analysis::input_statistics(q, k, exec.parallel);
  });
}

RowStatistics row_statistics(const AttentionMatrix& matrix, const InstrumentOptions& options,
                             const Exec& exec) {
  return memory_errors("row_statistics", [&] {
    const auto weights = checked("row_statistics", matrix, options, exec);
    return analysis::row_statistics(*weights, options, exec.parallel);
  });
}

Spectrum spectrum(const AttentionMatrix& matrix, const InstrumentOptions& options,
                  const Exec& exec) {
  return memory_errors("spectrum", [&] {
    const auto weights = checked("spectrum", matrix, options, exec);
    expect_spectrum("spectrum", matrix, *weights, exec);
    return analysis::spectrum(*weights, options, exec.parallel);
  });
}

ChainStatistics chain_statistics(const AttentionMatrix& matrix, const Spectrum& spectrum,
                                 const InstrumentOptions& options, const Exec& exec) {
  return memory_errors("chain_statistics", [&] {
    const auto weights = checked("chain_statistics", matrix, options, exec);
    expect_spectrum("chain_statistics", matrix, *weights, exec);
    if (weights->is_signed()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("chain_statistics: 1 fault in {}: weights are signed: expected the "
                              "probabilities of a Markov chain",
                              describe(matrix)));
    }
    return analysis::chain_statistics(*weights, spectrum, options, exec.parallel);
  });
}

Theory theory(const AttentionMatrix& matrix, const InputStatistics& inputs,
              const RowStatistics* rows, const Spectrum* spectrum,
              const InstrumentOptions& options) {
  Faults faults;
  check_matrix(faults, matrix, {});
  check_options(faults, options);
  if (matrix.kind == MatrixKind::given) faults.add("a given matrix has no q and k to predict from");
  faults.throw_any("theory", describe(matrix));
  return analysis::predict(matrix, inputs, rows, spectrum, options);
}

Verdict concentration_verdict(double entropy, double lambda_2, std::int64_t tokens) noexcept {
  return analysis::judge(entropy, lambda_2, tokens);
}

Examination examine(const AttentionMatrix& matrix, const InstrumentOptions& options,
                    const Exec& exec) {
  return memory_errors("examine", [&] {
    const auto weights = checked("examine", matrix, options, exec);
    return examine_checked(matrix, *weights, options, exec.parallel);
  });
}

}  // namespace lln
