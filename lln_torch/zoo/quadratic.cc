// The exact quadratic kernel: weight (q.k / sqrt D)^2. Its features are the D^2 products of two
// channels, so the linear form pays only for long sequences; short ones, and chunks of the causal
// form, use the weights themselves.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/linear_form.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/recompute.h"

namespace lln_torch {
namespace {

// Tokens whose weights are written out. A row costs this many times D numbers, the features D^3:
// the two are equal at 4096 for D = 64, but the weights of a chunk must fit into memory as well.
constexpr std::int64_t kQuadraticChunk = 1024;

// The products of two channels; sqrt(1/D) each for q and k.
Tensor quadratic_features(const Tensor& x) {
  const double scale = 1 / std::sqrt(static_cast<double>(x.size(-1)));
  return ((x * scale).unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2);
}

Tensor quadratic_weights(const Tensor& q, const Tensor& k) {
  return at::matmul(q, k.transpose(-1, -2)).square() / static_cast<double>(q.size(-1));
}

// sum_j features(k_j) x_j^T, [batch, heads, D^2, channels].
Tensor quadratic_state(const Tensor& k, const Tensor& x) {
  return recomputed(
      [](const std::vector<Tensor>& in) {
        return at::matmul(quadratic_features(in[0]).transpose(-1, -2), in[1]);
      },
      {k, x});
}

Tensor quadratic_read(const Tensor& q, const Tensor& state) {
  return recomputed(
      [](const std::vector<Tensor>& in) { return at::matmul(quadratic_features(in[0]), in[1]); },
      {q, state});
}

Tensor quadratic_rows(const Tensor& q, const Tensor& k, const Tensor& x, bool causal) {
  return recomputed(
      [causal](const std::vector<Tensor>& in) {
        const Tensor weights = quadratic_weights(in[0], in[1]);
        return at::matmul(causal ? weights.tril() : weights, in[2]);
      },
      {q, k, x});
}

// x is v with a column of ones.
Tensor quadratic_sums(const Tensor& q, const Tensor& k, const Tensor& x, bool causal) {
  const std::int64_t tokens = q.size(2);
  if (tokens <= kQuadraticChunk) return quadratic_rows(q, k, x, causal);
  const auto chunks = [](const Tensor& all) { return all.split(kQuadraticChunk, 2); };
  const auto q_chunks = chunks(q), k_chunks = chunks(k), x_chunks = chunks(x);
  std::vector<Tensor> rows;
  Tensor state;
  if (!causal) {
    for (std::size_t i = 0; i < k_chunks.size(); ++i) {
      const Tensor own = quadratic_state(k_chunks[i], x_chunks[i]);
      state = state.defined() ? state + own : own;
    }
    for (const Tensor& chunk : q_chunks) rows.push_back(quadratic_read(chunk, state));
    return at::cat(rows, 2);
  }
  for (std::size_t i = 0; i < q_chunks.size(); ++i) {
    Tensor o = quadratic_rows(q_chunks[i], k_chunks[i], x_chunks[i], true);
    if (state.defined()) o = o + quadratic_read(q_chunks[i], state);
    rows.push_back(o);
    if (i + 1 == q_chunks.size()) break;
    const Tensor own = quadratic_state(k_chunks[i], x_chunks[i]);
    state = state.defined() ? state + own : own;
  }
  return at::cat(rows, 2);
}

class QuadraticAttention : public ProjectedAttention {
 public:
  using ProjectedAttention::ProjectedAttention;

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const WithoutAutocast plain;
    const Tensor values = at_least_f32(v);
    const Tensor x = at::cat({values, at::ones_like(values.narrow(-1, 0, 1))}, -1);
    const Tensor both = quadratic_sums(at_least_f32(q), zero_padding(at_least_f32(k), key_mask), x,
                                       config().causal);
    const std::int64_t width = v.size(-1);
    return normalised({both.narrow(-1, 0, width), both.narrow(-1, width, 1)}).to(v.scalar_type());
  }
  void describe(Observation& observation) const override { observation.kind = "quadratic"; }
};

std::shared_ptr<Attention> make_quadratic(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<QuadraticAttention>(config, options);
}

}  // namespace

ZooEntry quadratic_entry() {
  return {.name = "quadratic",
          .summary = "weight (q.k / sqrt D)^2, rows normalised",
          .cost = "time N D^3 (up to 1024 tokens N^2 D), memory N D + D^3",
          .parameters = "none",
          .padding = "keys of padding weigh nothing",
          .causal = true,
          .takes_diag = true,
          .make = make_quadratic};
}

}  // namespace lln_torch
