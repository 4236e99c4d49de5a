// The names of matrices, methods and verdicts.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <charconv>

#include "lln/error.h"
#include "lln/instruments.h"

namespace lln {
namespace {

[[noreturn]] void unknown(std::string_view text) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("unknown kind of attention '{}': expected softmax, lln, elu, relu, "
                          "softplus or powerP, each of these but softmax also with +diagBLOCK, "
                          "diagBLOCK, quadratic, performer or performerFEATURES, or linear",
                          text));
}

bool parse_count(std::string_view text, std::int64_t& value) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && rest == end && value > 0;
}

// Removes the prefix where it is there.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::string feature_text(const AttentionMatrix& matrix) {
  if (matrix.feature == Feature::exp) return "lln";
  if (matrix.feature == Feature::power) return fmt::format("power{}", matrix.power);
  return to_string(matrix.feature);
}

// lln, or the name of another feature map.
void parse_linear(std::string_view text, AttentionMatrix& matrix) {
  if (text == "lln") {
    matrix.feature = Feature::exp;
    return;
  }
  float power = 2;
  parse_feature(text, matrix.feature, power);
  matrix.power = power;
}

}  // namespace

void parse_matrix(std::string_view text, AttentionMatrix& matrix) {
  AttentionMatrix parsed = matrix;
  std::string_view rest = text;
  if (text == "softmax") {
    parsed.kind = MatrixKind::softmax;
  } else if (text == "quadratic") {
    parsed.kind = MatrixKind::quadratic;
  } else if (text == "linear") {
    parsed.kind = MatrixKind::linear;
  } else if (take(rest, "performer")) {
    parsed.kind = MatrixKind::performer;
    if (!rest.empty() && !parse_count(rest, parsed.features)) unknown(text);
  } else if (take(rest, "diag")) {
    parsed.kind = MatrixKind::diag;
    if (!parse_count(rest, parsed.diag_block)) unknown(text);
  } else {
    const std::size_t plus = text.find('+');
    parsed.kind = plus == std::string_view::npos ? MatrixKind::lln : MatrixKind::lln_diag;
    if (plus != std::string_view::npos) {
      rest = text.substr(plus + 1);
      if (!take(rest, "diag") || !parse_count(rest, parsed.diag_block)) unknown(text);
    }
    const std::string_view map = text.substr(0, plus);
    if (map == "exp") unknown(text);
    try {
      parse_linear(map, parsed);
    } catch (const Error&) {
      unknown(text);
    }
  }
  matrix = parsed;
}

std::string to_string(const AttentionMatrix& matrix) {
  switch (matrix.kind) {
    case MatrixKind::softmax:
      return "softmax";
    case MatrixKind::lln:
      return feature_text(matrix);
    case MatrixKind::diag:
      return fmt::format("diag{}", matrix.diag_block);
    case MatrixKind::lln_diag:
      return fmt::format("{}+diag{}", feature_text(matrix), matrix.diag_block);
    case MatrixKind::quadratic:
      return "quadratic";
    case MatrixKind::performer:
      return fmt::format("performer{}", matrix.features);
    case MatrixKind::linear:
      return "linear";
    case MatrixKind::given:
      return "given";
  }
  return "?";
}

const char* to_string(SpectrumMethod method) noexcept {
  switch (method) {
    case SpectrumMethod::features:
      return "features";
    case SpectrumMethod::blocks:
      return "blocks";
    case SpectrumMethod::dense:
      return "dense";
    case SpectrumMethod::arnoldi:
      return "arnoldi";
  }
  return "?";
}

const char* to_string(Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::diffuse:
      return "diffuse";
    case Verdict::biased:
      return "biased";
    case Verdict::unbiased:
      return "unbiased";
  }
  return "?";
}

}  // namespace lln
