// Attentions against their definitions: plain loops in f64 over one sequence without padding, which
// take the parameters and random draws of a module by name. The module must give the same for every
// sequence of a padded batch, and its gradients the differences of the definition.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lln_torch/zoo/attention.h"

namespace lln_torch::definition {

using Row = std::vector<double>;
using Rows = std::vector<Row>;
using Values = std::map<std::string, Tensor>;  // parameters and buffers by name

inline Rows rows_of(const Tensor& matrix) {
  const Tensor plain = matrix.detach().to(at::kDouble).contiguous();
  Rows rows(plain.size(0), Row(plain.size(1)));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(plain.data_ptr<double>() + i * plain.size(1), rows[i].size(), rows[i].begin());
  }
  return rows;
}

inline Tensor tensor_of(const Rows& rows) {
  Tensor matrix = at::empty({std::ssize(rows), std::ssize(rows.at(0))}, at::kDouble);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(), matrix[i].data_ptr<double>());
  }
  return matrix;
}

inline double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline Rows product(const Rows& a, const Rows& b) {
  Rows c(a.size(), Row(b.at(0).size(), 0));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < b.size(); ++j) {
      for (std::size_t d = 0; d < b[j].size(); ++d) c[i][d] += a[i][j] * b[j][d];
    }
  }
  return c;
}

inline Rows transposed(const Rows& a) {
  Rows b(a.at(0).size(), Row(a.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[i].size(); ++j) b[j][i] = a[i][j];
  }
  return b;
}

// x W^T + b of the torch module `name`.
inline Rows linear(const Values& values, const std::string& name, const Rows& x) {
  Rows y = product(x, transposed(rows_of(values.at(name + ".weight"))));
  const Row bias = rows_of(values.at(name + ".bias").unsqueeze(0))[0];
  for (Row& row : y) {
    for (std::size_t d = 0; d < row.size(); ++d) row[d] += bias[d];
  }
  return y;
}

inline Rows layer_norm(const Values& values, const std::string& name, Rows x) {
  const Row weight = rows_of(values.at(name + ".weight").unsqueeze(0))[0];
  const Row bias = rows_of(values.at(name + ".bias").unsqueeze(0))[0];
  for (Row& row : x) {
    const double count = static_cast<double>(row.size());
    double mean = 0, square = 0;
    for (const double a : row) mean += a / count;
    for (const double a : row) square += (a - mean) * (a - mean) / count;
    for (std::size_t d = 0; d < row.size(); ++d) {
      row[d] = (row[d] - mean) / std::sqrt(square + 1e-5) * weight[d] + bias[d];
    }
  }
  return x;
}

inline Rows head_of(const Rows& x, std::int64_t head, std::int64_t heads) {
  const std::int64_t channels = std::ssize(x.at(0)) / heads;
  Rows part;
  for (const Row& row : x) {
    part.emplace_back(row.begin() + head * channels, row.begin() + (head + 1) * channels);
  }
  return part;
}

// Softmax weights of the scores, and the mean of the values by them.
inline Row softmax(const Row& scores) {
  const double highest = *std::max_element(scores.begin(), scores.end());
  Row weights;
  double sum = 0;
  for (const double score : scores) {
    weights.push_back(std::exp(score - highest));
    sum += weights.back();
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

inline Row mean_by(const Row& weights, const Rows& values) { return product({weights}, values)[0]; }

// softmax(q k^T / sqrt D) v of one query over the keys named by `seen`.
inline Row attend_to(const Row& q, const Rows& k, const Rows& v,
                     const std::vector<std::int64_t>& seen) {
  Row scores;
  Rows values;
  for (const std::int64_t j : seen) {
    scores.push_back(dot(q, k[j]) / std::sqrt(static_cast<double>(q.size())));
    values.push_back(v[j]);
  }
  return mean_by(softmax(scores), values);
}

inline std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

inline Rows attend_to_all(const Rows& q, const Rows& k, const Rows& v) {
  Rows o;
  for (const Row& row : q) o.push_back(attend_to(row, k, v, range(0, std::ssize(k))));
  return o;
}

// o of one head out of its q, k and v; the projections around it.
using Head = std::function<Rows(const Values& values, std::int64_t head, const Rows& q,
                                const Rows& k, const Rows& v)>;

inline Rows merged(const std::vector<Rows>& heads) {
  Rows all = heads.at(0);
  for (std::size_t h = 1; h < heads.size(); ++h) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].insert(all[i].end(), heads[h][i].begin(), heads[h][i].end());
    }
  }
  return all;
}

inline Rows projected(const Values& values, const Rows& x, std::int64_t heads, const Head& head) {
  const Rows q = linear(values, "query", x);
  const Rows k = values.contains("key.weight") ? linear(values, "key", x) : q;
  const Rows v = linear(values, "value", x);
  std::vector<Rows> parts;
  for (std::int64_t h = 0; h < heads; ++h) {
    parts.push_back(
        head(values, h, head_of(q, h, heads), head_of(k, h, heads), head_of(v, h, heads)));
  }
  return linear(values, "output", merged(parts));
}

// The output for one sequence without padding, [tokens][dim].
using Definition = std::function<Rows(const Values& values, const Rows& x)>;

struct Case {
  AttentionConfig config;
  std::string options = {};  // TOML
  Definition definition;
  std::int64_t tokens = 37;
  double tolerance = 1e-9;      // of outputs, f64, against their largest
  double f32_tolerance = 1e-4;  // 0: hashes and choices may flip
};

inline std::shared_ptr<Attention> make(const Case& c) {
  at::manual_seed(7);
  const Settings options = Settings::from_toml(c.options, "options");
  auto module = make_attention(c.config, options);
  options.finish();
  module->eval();
  const at::NoGradGuard no_gradients;
  for (auto& item : module->named_parameters()) {
    // Weights that are far from flat, and biases and norms that matter.
    if (item.key().ends_with("query.weight") || item.key().ends_with("key.weight")) {
      item.value().mul_(3);
    } else if (item.value().dim() == 1) {
      item.value().add_(0.3 * at::randn_like(item.value()));
    }
  }
  return module;
}

inline Values values_of(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) values[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers()) values[item.key()] = item.value();
  return values;
}

// Sequences of a padded batch: whole, padded on the right, padded on the left, and a short one.
struct Padded {
  Tensor x, mask;  // [batch, tokens, dim], [batch, tokens]
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
};

inline Padded padded_batch(const Case& c) {
  at::manual_seed(11);
  const std::int64_t n = c.tokens;
  Padded batch;
  batch.spans = {{0, n},
                 {0, std::max<std::int64_t>(1, n - n / 5 - 1)},
                 {n / 4, n},
                 {n / 3, n / 3 + std::min<std::int64_t>(3, n - n / 3)}};
  batch.x = at::randn({std::ssize(batch.spans), n, c.config.dim}, at::kDouble);
  batch.mask = at::zeros({std::ssize(batch.spans), n}, at::kBool);
  for (std::size_t b = 0; b < batch.spans.size(); ++b) {
    const auto [begin, end] = batch.spans[b];
    batch.mask[b].narrow(0, begin, end - begin).fill_(true);
  }
  return batch;
}

// The definition for every sequence, zeros elsewhere.
inline Tensor defined_output(const Case& c, const Values& values, const Tensor& x,
                             const Padded& batch) {
  Tensor o = at::zeros_like(x);
  for (std::size_t b = 0; b < batch.spans.size(); ++b) {
    const auto [begin, end] = batch.spans[b];
    const Rows sequence = rows_of(x[b].narrow(0, begin, end - begin));
    o[b].narrow(0, begin, end - begin).copy_(tensor_of(c.definition(values, sequence)));
  }
  return o;
}

inline Tensor run(Attention& module, const Tensor& x, const Tensor& mask) {
  Context context;
  return module.forward(x, mask, context);
}

inline double distance(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// Outputs with and without padding, and that no padded token, wherever it is, has a say.
inline void check_outputs(const Case& c) {
  const auto module = make(c);
  module->to(at::kDouble);
  const Padded batch = padded_batch(c);
  const at::NoGradGuard no_gradients;
  const Values values = values_of(*module);
  const Tensor rows = batch.mask.unsqueeze(-1).to(at::kDouble);
  const Tensor expected = defined_output(c, values, batch.x, batch);
  const double scale = expected.abs().max().item<double>();
  const Tensor o = run(*module, batch.x, batch.mask);
  ASSERT_TRUE(at::isfinite(o).all().item<bool>());
  EXPECT_LT(distance(o * rows, expected), c.tolerance * scale) << "padded";

  Padded whole = batch;
  for (auto& span : whole.spans) span = {0, c.tokens};
  EXPECT_LT(distance(run(*module, batch.x, {}), defined_output(c, values, batch.x, whole)),
            c.tolerance * scale)
      << "no mask";

  Tensor mask = batch.mask.clone();
  mask[0].narrow(0, c.tokens / 2, c.tokens / 3).fill_(false);  // a hole, wider than a segment
  const Tensor other = at::where(mask.unsqueeze(-1), batch.x, 50 * at::randn_like(batch.x));
  const Tensor counted = mask.unsqueeze(-1).to(at::kDouble);
  EXPECT_LT(distance(run(*module, batch.x, mask) * counted, run(*module, other, mask) * counted),
            c.tolerance * scale)
      << "what stands in padding";

  if (c.f32_tolerance == 0) return;
  const auto single = make(c);
  const Tensor rough = run(*single, batch.x.to(at::kFloat), batch.mask).to(at::kDouble);
  EXPECT_LT(distance(rough * rows, expected), c.f32_tolerance * scale) << "f32";
}

// Along a random direction of the input and of each parameter: the gradient of the module against
// the central difference of the definition.
inline void check_gradients(const Case& c) {
  const auto module = make(c);
  module->to(at::kDouble);
  const Padded batch = padded_batch(c);
  const Tensor x = batch.x.clone().requires_grad_(true);
  const Tensor weights = at::randn_like(x) * batch.mask.unsqueeze(-1);
  (run(*module, x, batch.mask) * weights).sum().backward();
  const Tensor outside = batch.mask.logical_not().unsqueeze(-1).to(at::kDouble);
  EXPECT_EQ((x.grad() * outside).abs().max().item<double>(), 0) << "gradient of padding";

  const Values values = values_of(*module);
  constexpr double kStep = 1e-6;  // short: relu has corners
  const auto loss = [&](const Values& at_values, const Tensor& at_x) {
    return (defined_output(c, at_values, at_x, batch) * weights).sum().item<double>();
  };
  const auto compare = [&](const std::string& name, double gradient, double difference,
                           double size) {
    EXPECT_NEAR(gradient, difference, 1e-6 * size + 1e-7) << name;
  };
  const Tensor way = at::randn_like(batch.x);
  const double difference =
      (loss(values, batch.x + kStep * way) - loss(values, batch.x - kStep * way)) / (2 * kStep);
  compare("x", (x.grad() * way).sum().item<double>(), difference,
          x.grad().norm().item<double>() * way.norm().item<double>());
  for (const auto& item : module->named_parameters()) {
    const Tensor found = item.value().grad();
    const Tensor gradient = found.defined() ? found : at::zeros_like(item.value());
    const Tensor direction = at::randn_like(gradient);
    Values up = values, down = values;
    up[item.key()] = values.at(item.key()) + kStep * direction;
    down[item.key()] = values.at(item.key()) - kStep * direction;
    compare(item.key(), (gradient * direction).sum().item<double>(),
            (loss(up, batch.x) - loss(down, batch.x)) / (2 * kStep),
            gradient.norm().item<double>() * direction.norm().item<double>());
  }
}

inline void check(const Case& c) {
  check_outputs(c);
  check_gradients(c);
}

inline AttentionConfig small(const std::string& name, bool causal = false) {
  return {.name = name,
          .dim = 12,
          .heads = 2,
          .max_tokens = 48,
          .causal = causal,
          .layer = 0,
          .seed = 3};
}

}  // namespace lln_torch::definition
