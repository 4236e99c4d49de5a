// The arithmetic of the plain evaluation, in f32, for one part of one head.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/plain_parts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "math/half.h"

namespace lln::conformance {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

void round_all(DType dtype, Matrix& m) {
  for (float& x : m.data) x = round_significand(dtype, x);
}

double largest_magnitude(const Matrix& m) {
  double largest = 0;
  for (const float x : m.data) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(double{x}));
  }
  return largest;
}

double largest_norm(const Matrix& m) {
  double largest = 0;
  for (std::int64_t i = 0; i < m.rows; ++i) {
    double sum = 0;
    for (std::int64_t l = 0; l < m.columns; ++l) sum += double{m[i][l]} * m[i][l];
    if (std::isfinite(sum)) largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

double largest_exponent(const Part& part) {
  if (part.lln) return largest_magnitude(part.a) + largest_magnitude(part.u);
  return largest_norm(part.a) * largest_norm(part.u) /
         std::sqrt(static_cast<double>(part.a.columns));
}

// A row of weights exp(x - max) / sum, rounded.
void softmax(DType dtype, std::vector<float>& x) {
  float largest = kMinusInfinity;
  for (const float s : x) largest = std::max(largest, s);
  float sum = 0;
  for (float& s : x) sum += s = std::exp(s - largest);
  for (float& s : x) s = round_significand(dtype, s / sum);
}

// The state of the keys: c, softmax over tokens, and averaged values.
struct KeyState {
  Matrix normalised;  // Kn, [keys, dim]; rows in the order of `keys`
  std::vector<std::int64_t> keys;
};

KeyState make_key_state(const Part& part, PartResult& result) {
  const std::int64_t dim = part.u.columns;
  const std::int64_t dim_v = part.v.columns;
  KeyState state;
  part.visible(0, state.keys);
  const auto count = static_cast<std::int64_t>(state.keys.size());
  state.normalised = Matrix(count, dim);
  result.lse = Sized(1, dim);
  result.channel_values = Sized(dim, dim_v);
  for (std::int64_t l = 0; l < dim; ++l) {
    float largest = kMinusInfinity;
    for (const std::int64_t j : state.keys) largest = std::max(largest, part.u[j][l]);
    float sum = 0;
    for (const std::int64_t j : state.keys) sum += std::exp(part.u[j][l] - largest);
    const bool empty = largest == kMinusInfinity;  // also where other channels have keys
    const float lse =
        empty ? kMinusInfinity : round_significand(part.dtype, largest + std::log(sum));
    result.lse.value[0][l] = lse;
    result.lse.size[0][l] = std::abs(lse);
    if (empty) continue;
    for (std::int64_t x = 0; x < count; ++x) {
      const std::int64_t j = state.keys[static_cast<std::size_t>(x)];
      const float weight = round_significand(part.dtype, std::exp(part.u[j][l] - lse));
      state.normalised[x][l] = weight;
      for (std::int64_t c = 0; c < dim_v; ++c) {
        result.channel_values.value[l][c] += weight * part.v[j][c];
        result.channel_values.size[l][c] += weight * std::abs(part.v[j][c]);
      }
    }
  }
  round_all(part.dtype, result.channel_values.value);
  return state;
}

// Sums over queries that the keys need: dC = W^T g and t = W^T delta.
struct QuerySums {
  Sized values;  // dC, [dim, dim_v]
  Sized shares;  // t, [1, dim]
};

void backward_query(const Part& part, std::int64_t i, const std::vector<float>& w,
                    PartResult& result, QuerySums& sums) {
  const std::int64_t dim = part.a.columns;
  const std::int64_t dim_v = part.v.columns;
  std::vector<float> dw(static_cast<std::size_t>(dim));
  std::vector<float> dw_size(static_cast<std::size_t>(dim));
  float delta = 0;
  float delta_size = 0;
  for (std::int64_t l = 0; l < dim; ++l) {
    const auto at = static_cast<std::size_t>(l);
    for (std::int64_t c = 0; c < dim_v; ++c) {
      dw[at] += part.g[i][c] * result.channel_values.value[l][c];
      dw_size[at] += std::abs(part.g[i][c]) * result.channel_values.size[l][c];
    }
    dw[at] = round_significand(part.dtype, dw[at]);
    delta += w[at] * dw[at];
    delta_size += w[at] * dw_size[at];
  }
  delta = round_significand(part.dtype, delta);
  for (std::int64_t l = 0; l < dim; ++l) {
    const auto at = static_cast<std::size_t>(l);
    result.da.value[i][l] = round_significand(part.dtype, w[at] * (dw[at] - delta));
    result.da.size[i][l] = w[at] * (dw_size[at] + delta_size);
    sums.shares.value[0][l] += w[at] * delta;
    sums.shares.size[0][l] += w[at] * delta_size;
    for (std::int64_t c = 0; c < dim_v; ++c) {
      sums.values.value[l][c] += w[at] * part.g[i][c];
      sums.values.size[l][c] += w[at] * std::abs(part.g[i][c]);
    }
  }
}

// What the gradient of the state itself adds to them: dC, and C . dC - dc.
void add_state_gradient(const Part& part, const PartResult& result, QuerySums& sums) {
  for (std::int64_t l = 0; l < part.u.columns; ++l) {
    sums.shares.value[0][l] -= part.dlse[0][l];
    sums.shares.size[0][l] += std::abs(part.dlse[0][l]);
    for (std::int64_t c = 0; c < part.v.columns; ++c) {
      const float d = part.dvalues[l][c];
      sums.values.value[l][c] += d;
      sums.values.size[l][c] += std::abs(d);
      sums.shares.value[0][l] += d * result.channel_values.value[l][c];
      sums.shares.size[0][l] += std::abs(d) * result.channel_values.size[l][c];
    }
  }
}

void backward_keys(const Part& part, const KeyState& state, QuerySums& sums, PartResult& result) {
  round_all(part.dtype, sums.values.value);
  round_all(part.dtype, sums.shares.value);
  for (std::size_t x = 0; x < state.keys.size(); ++x) {
    const std::int64_t j = state.keys[x];
    const float* weights = state.normalised[static_cast<std::int64_t>(x)];
    for (std::int64_t l = 0; l < part.u.columns; ++l) {
      float product = 0;
      float product_size = 0;
      for (std::int64_t c = 0; c < part.v.columns; ++c) {
        product += part.v[j][c] * sums.values.value[l][c];
        product_size += std::abs(part.v[j][c]) * sums.values.size[l][c];
        result.dv.value[j][c] += weights[l] * sums.values.value[l][c];
        result.dv.size[j][c] += weights[l] * sums.values.size[l][c];
      }
      product = round_significand(part.dtype, product);
      result.du.value[j][l] =
          round_significand(part.dtype, weights[l] * (product - sums.shares.value[0][l]));
      result.du.size[j][l] = weights[l] * (product_size + sums.shares.size[0][l]);
    }
  }
}

PartResult empty_result(const Part& part, bool backward) {
  PartResult result;
  result.exponent = largest_exponent(part);
  result.o = Sized(part.a.rows, part.v.columns);
  if (backward) {
    result.da = Sized(part.a.rows, part.a.columns);
    result.du = Sized(part.u.rows, part.u.columns);
    result.dv = Sized(part.v.rows, part.v.columns);
  }
  return result;
}

float lln_score(const Part& part, std::int64_t i, std::int64_t j) {
  float largest = kMinusInfinity;
  for (std::int64_t l = 0; l < part.a.columns; ++l) {
    largest = std::max(largest, part.a[i][l] + part.u[j][l]);
  }
  float sum = 0;
  for (std::int64_t l = 0; l < part.a.columns; ++l) {
    sum += std::exp(part.a[i][l] + part.u[j][l] - largest);
  }
  return largest + std::log(sum);
}

float dot_score(const Part& part, std::int64_t i, std::int64_t j) {
  float sum = 0;
  for (std::int64_t l = 0; l < part.a.columns; ++l) sum += part.a[i][l] * part.u[j][l];
  return sum / std::sqrt(static_cast<float>(part.a.columns));
}

// Through one score to the query and the key; ds_size is ds over absolute values.
void backward_score(const Part& part, std::int64_t i, std::int64_t j, float score, float ds,
                    float ds_size, PartResult& result) {
  const float scale = 1 / std::sqrt(static_cast<float>(part.a.columns));
  for (std::int64_t l = 0; l < part.a.columns; ++l) {
    const float share = part.lln ? std::exp(part.a[i][l] + part.u[j][l] - score) : 0;
    const float to_query = part.lln ? share : scale * part.u[j][l];
    const float to_key = part.lln ? share : scale * part.a[i][l];
    result.da.value[i][l] += ds * to_query;
    result.da.size[i][l] += ds_size * std::abs(to_query);
    result.du.value[j][l] += ds * to_key;
    result.du.size[j][l] += ds_size * std::abs(to_key);
  }
}

void backward_row(const Part& part, std::int64_t i, const std::vector<std::int64_t>& keys,
                  const std::vector<float>& scores, const std::vector<float>& weights,
                  PartResult& result) {
  std::vector<float> products(keys.size());
  std::vector<float> sizes(keys.size());
  float delta = 0;
  float delta_size = 0;
  for (std::size_t x = 0; x < keys.size(); ++x) {
    const std::int64_t j = keys[x];
    for (std::int64_t c = 0; c < part.v.columns; ++c) {
      products[x] += part.g[i][c] * part.v[j][c];
      sizes[x] += std::abs(part.g[i][c] * part.v[j][c]);
      result.dv.value[j][c] += weights[x] * part.g[i][c];
      result.dv.size[j][c] += weights[x] * std::abs(part.g[i][c]);
    }
    products[x] = round_significand(part.dtype, products[x]);
    delta += weights[x] * products[x];
    delta_size += weights[x] * sizes[x];
  }
  delta = round_significand(part.dtype, delta);
  for (std::size_t x = 0; x < keys.size(); ++x) {
    const float ds = round_significand(part.dtype, weights[x] * (products[x] - delta));
    const float ds_size = weights[x] * (sizes[x] + delta_size);
    backward_score(part, i, keys[x], scores[x], ds, ds_size, result);
  }
}

}  // namespace

float round_significand(DType dtype, float x) {
  if (dtype == DType::bf16) return f32_from_bf16(bf16_from_f32(x));
  if (dtype != DType::f16 || !std::isfinite(x) || x == 0) return x;
  int exponent = 0;
  const float significand = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(significand * 0x1p11F) * 0x1p-11F, exponent);
}

PartResult evaluate_factorised(const Part& part, bool backward) {
  PartResult result = empty_result(part, backward);
  const KeyState state = make_key_state(part, result);
  if (state.keys.empty()) return result;
  const std::int64_t dim = part.a.columns;
  QuerySums sums{Sized(dim, part.v.columns), Sized(1, dim)};
  std::vector<float> w(static_cast<std::size_t>(dim));
  for (std::int64_t i = 0; i < part.a.rows; ++i) {
    for (std::int64_t l = 0; l < dim; ++l) {
      w[static_cast<std::size_t>(l)] =
          round_significand(part.dtype, part.a[i][l] + result.lse.value[0][l]);
    }
    softmax(part.dtype, w);
    for (std::int64_t l = 0; l < dim; ++l) {
      for (std::int64_t c = 0; c < part.v.columns; ++c) {
        const float weight = w[static_cast<std::size_t>(l)];
        result.o.value[i][c] += weight * result.channel_values.value[l][c];
        result.o.size[i][c] += weight * result.channel_values.size[l][c];
      }
    }
    if (backward) backward_query(part, i, w, result, sums);
  }
  round_all(part.dtype, result.o.value);
  if (backward && part.dlse.rows > 0) add_state_gradient(part, result, sums);
  if (backward) backward_keys(part, state, sums, result);
  return result;
}

PartResult evaluate_rows(const Part& part, bool backward) {
  PartResult result = empty_result(part, backward);
  std::vector<std::int64_t> keys;
  std::vector<float> scores;
  std::vector<float> weights;
  for (std::int64_t i = 0; i < part.a.rows; ++i) {
    part.visible(i, keys);
    scores.clear();
    for (const std::int64_t j : keys) {
      const float score = part.lln ? lln_score(part, i, j) : dot_score(part, i, j);
      scores.push_back(round_significand(part.dtype, score));
    }
    weights = scores;
    softmax(part.dtype, weights);
    for (std::size_t x = 0; x < keys.size(); ++x) {
      for (std::int64_t c = 0; c < part.v.columns; ++c) {
        result.o.value[i][c] += weights[x] * part.v[keys[x]][c];
        result.o.size[i][c] += weights[x] * std::abs(part.v[keys[x]][c]);
      }
    }
    if (backward) backward_row(part, i, keys, scores, weights, result);
  }
  round_all(part.dtype, result.o.value);
  return result;
}

}  // namespace lln::conformance
