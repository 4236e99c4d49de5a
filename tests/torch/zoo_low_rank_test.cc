// Attentions through a few rows in between, linformer, nystromformer, skyformer, luna and
// transformer-ls, against their definitions.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "lln/error.h"
#include "tests/torch/zoo_definition.h"

namespace lln_torch::definition {
namespace {

Definition of_heads(const Head& head) {
  return [head](const Values& values, const Rows& x) { return projected(values, x, 2, head); };
}

Case linformer_case(const std::string& options) {
  const auto head = [](const Values& values, std::int64_t, const Rows& q, const Rows& k,
                       const Rows& v) {
    // Columns of E beyond the sequence meet no token.
    const auto mixed = [&](const char* name, const Rows& x) {
      Rows mix = rows_of(values.at(name));
      for (Row& row : mix) row.resize(x.size());
      return product(mix, x);
    };
    const bool shared = !values.contains("mix_values");
    return attend_to_all(q, mixed("mix_keys", k), mixed(shared ? "mix_keys" : "mix_values", v));
  };
  return {.config = small("linformer"), .options = options, .definition = of_heads(head)};
}

TEST(Linformer, IsItsDefinition) {
  check(linformer_case("rank = 5"));
  check(linformer_case("rank = 5\nshare_kv = true"));
  check(linformer_case("rank = 60"));
}

Rows scaled_softmax(const Rows& q, const Rows& k) {
  Rows weights;
  for (const Row& row : q) {
    Row scores;
    for (const Row& key : k) {
      scores.push_back(dot(row, key) / std::sqrt(static_cast<double>(row.size())));
    }
    weights.push_back(softmax(scores));
  }
  return weights;
}

// Z <- Z/4 (13 I - A Z (15 I - A Z (7 I - A Z))) from A^T / (|A|_1 |A|_inf).
Rows iterated_inverse(const Rows& a, int iterations) {
  const std::size_t m = a.size();
  double rows = 0, columns = 0;
  for (std::size_t i = 0; i < m; ++i) {
    double row = 0, column = 0;
    for (std::size_t j = 0; j < m; ++j) {
      row += std::abs(a[i][j]);
      column += std::abs(a[j][i]);
    }
    rows = std::max(rows, row);
    columns = std::max(columns, column);
  }
  Rows z = transposed(a);
  for (Row& row : z) {
    for (double& value : row) value /= rows * columns;
  }
  const auto from = [&](double number, Rows x) {  // number I - x
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t j = 0; j < m; ++j) x[i][j] = (i == j ? number : 0) - x[i][j];
    }
    return x;
  };
  for (int n = 0; n < iterations; ++n) {
    const Rows az = product(a, z);
    z = product(z, from(13, product(az, from(15, product(az, from(7, az))))));
    for (Row& row : z) {
      for (double& value : row) value /= 4;
    }
  }
  return z;
}

Rows segment_means(const Rows& x, std::int64_t landmarks) {
  const std::int64_t n = std::ssize(x), m = std::min(landmarks, n);
  Rows means(m, Row(x[0].size(), 0));
  Row counts(m, 0);
  for (std::int64_t i = 0; i < n; ++i) {
    counts[i * m / n] += 1;
    for (std::size_t d = 0; d < x[i].size(); ++d) means[i * m / n][d] += x[i][d];
  }
  for (std::int64_t s = 0; s < m; ++s) {
    for (double& value : means[s]) value /= counts[s];
  }
  return means;
}

Case nystromformer_case(std::int64_t landmarks, std::int64_t kernel, int iterations = 6) {
  const auto head = [=](const Values& values, std::int64_t h, const Rows& q, const Rows& k,
                        const Rows& v) {
    const Rows q_means = segment_means(q, landmarks), k_means = segment_means(k, landmarks);
    const Rows inverse = iterated_inverse(scaled_softmax(q_means, k_means), iterations);
    Rows o = product(scaled_softmax(q, k_means),
                     product(inverse, product(scaled_softmax(q_means, k), v)));
    if (kernel == 0) return o;
    const Row taps = rows_of(values.at("conv")[h].view({1, -1}))[0];
    for (std::int64_t i = 0; i < std::ssize(o); ++i) {
      for (std::int64_t t = 0; t < kernel; ++t) {
        const std::int64_t j = i + t - kernel / 2;
        if (j < 0 || j >= std::ssize(v)) continue;
        for (std::size_t d = 0; d < o[i].size(); ++d) o[i][d] += taps[t] * v[j][d];
      }
    }
    return o;
  };
  return {.config = small("nystromformer"),
          .options = fmt::format("landmarks = {}\nconv = {}\niterations = {}", landmarks, kernel,
                                 iterations),
          .definition = of_heads(head),
          .tolerance = 1e-7,
          .f32_tolerance = 1e-2};
}

TEST(Nystromformer, IsItsDefinition) {
  check(nystromformer_case(5, 7));
  check(nystromformer_case(8, 0));
  Case even = nystromformer_case(6, 33);
  even.tokens = 36;  // segments of one length
  check(even);
}

TEST(Nystromformer, IsSoftmaxWhereEveryTokenIsALandmark) {
  Case c = nystromformer_case(64, 0, 30);
  c.definition = of_heads([](const Values&, std::int64_t, const Rows& q, const Rows& k,
                             const Rows& v) { return attend_to_all(q, k, v); });
  c.tokens = 12;
  c.tolerance = 1e-5;
  c.f32_tolerance = 0;
  check_outputs(c);
}

TEST(Nystromformer, KernelIsOdd) {
  EXPECT_THROW(make_attention(small("nystromformer"), Settings::from_toml("conv = 4", "options")),
               lln::Error);
}

Rows gaussian(const Rows& a, const Rows& b) {
  Rows kernel(a.size(), Row(b.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < b.size(); ++j) {
      double square = 0;
      for (std::size_t d = 0; d < a[i].size(); ++d) {
        square += (a[i][d] - b[j][d]) * (a[i][d] - b[j][d]);
      }
      kernel[i][j] = std::exp(-square / (2 * std::sqrt(static_cast<double>(a[i].size()))));
    }
  }
  return kernel;
}

// A x = b by elimination with pivots.
Rows solved(Rows a, Rows b) {
  const std::size_t m = a.size();
  for (std::size_t c = 0; c < m; ++c) {
    std::size_t pivot = c;
    for (std::size_t i = c; i < m; ++i) {
      if (std::abs(a[i][c]) > std::abs(a[pivot][c])) pivot = i;
    }
    std::swap(a[c], a[pivot]);
    std::swap(b[c], b[pivot]);
    for (std::size_t i = 0; i < m; ++i) {
      if (i == c) continue;
      const double factor = a[i][c] / a[c][c];
      for (std::size_t j = 0; j < m; ++j) a[i][j] -= factor * a[c][j];
      for (std::size_t j = 0; j < b[i].size(); ++j) b[i][j] -= factor * b[c][j];
    }
  }
  for (std::size_t i = 0; i < m; ++i) {
    for (double& value : b[i]) value /= a[i][i];
  }
  return b;
}

Case skyformer_case(std::int64_t landmarks, double ridge) {
  const auto head = [=](const Values& values, std::int64_t, const Rows& q, const Rows& k,
                        const Rows& v) {
    // Priorities of queries by place, then, from max_tokens on, those of keys.
    const Row priorities = rows_of(values.at("sample.priorities").unsqueeze(0))[0];
    std::vector<std::pair<double, Row>> all;
    for (std::size_t i = 0; i < q.size(); ++i) {
      all.emplace_back(-priorities[i], q[i]);
      all.emplace_back(-priorities[48 + i], k[i]);
    }
    std::sort(all.begin(), all.end());
    Rows chosen;
    for (std::int64_t l = 0; l < std::min(landmarks, std::ssize(all)); ++l) {
      chosen.push_back(all[l].second);
    }
    Rows system = gaussian(chosen, chosen);
    for (std::size_t i = 0; i < system.size(); ++i) system[i][i] += ridge;
    return product(gaussian(q, chosen), solved(system, product(gaussian(chosen, k), v)));
  };
  return {.config = small("skyformer"),
          .options = fmt::format("landmarks = {}\nridge = {}\n", landmarks, ridge),
          .definition = of_heads(head)};
}

TEST(Skyformer, IsItsDefinition) {
  check(skyformer_case(10, 0.1));
  check(skyformer_case(3, 0.5));
  check(skyformer_case(128, 0.1));  // all queries and keys are landmarks
}

TEST(Skyformer, LandmarksAreFixedInEvaluation) {
  const auto module = make_attention(
      small("skyformer"), Settings::from_toml("landmarks = 4\nredraw_steps = 1", "options"));
  const Tensor x = at::randn({1, 30, 12});
  const auto output = [&](std::int64_t step) {
    Context context{.step = step};
    return module->forward(x, {}, context).detach();
  };
  module->eval();
  EXPECT_TRUE(at::equal(output(0), output(5)));
  module->train();
  const Tensor third = output(3);
  EXPECT_FALSE(at::equal(third, output(4)));
  EXPECT_TRUE(at::equal(third, output(3)));
  module->eval();
  EXPECT_TRUE(at::equal(third, output(9)));
}

// P' of the packing, [slots][dim].
Rows luna_packed(const Values& values, const Rows& slots, const Rows& x) {
  const Rows q = linear(values, "slot_query", slots), k = linear(values, "key", x),
             v = linear(values, "value", x);
  std::vector<Rows> parts;
  for (std::int64_t h = 0; h < 2; ++h) {
    parts.push_back(attend_to_all(head_of(q, h, 2), head_of(k, h, 2), head_of(v, h, 2)));
  }
  return merged(parts);
}

Rows luna_output(const Values& values, const Rows& packed, const Rows& x) {
  const Rows q = linear(values, "query", x), k = linear(values, "slot_key", packed),
             v = linear(values, "slot_value", packed);
  std::vector<Rows> parts;
  for (std::int64_t h = 0; h < 2; ++h) {
    parts.push_back(attend_to_all(head_of(q, h, 2), head_of(k, h, 2), head_of(v, h, 2)));
  }
  return linear(values, "output", merged(parts));
}

TEST(Luna, IsItsDefinition) {
  check({.config = small("luna"),
         .options = "slots = 5",
         .definition = [](const Values& values, const Rows& x) {
           const Rows slots = rows_of(values.at("slots"));
           return luna_output(values, luna_packed(values, slots, x), x);
         }});
}

// Two layers: the second starts from norm(P + P') of the first, and gradients reach the first.
TEST(Luna, SlotsGoToTheNextLayer) {
  Case first{.config = small("luna"), .options = "slots = 5"};
  Case second = first;
  second.config.layer = 1;
  const auto below = make(first), above = make(second);
  below->to(at::kDouble);
  above->to(at::kDouble);
  EXPECT_FALSE(above->named_parameters().contains("slots"));
  const Padded batch = padded_batch(first);
  Context context;
  below->forward(batch.x, batch.mask, context);
  const Tensor y = 2 * batch.x;
  const Tensor o = above->forward(y, batch.mask, context);
  const Values low = values_of(*below), high = values_of(*above);
  for (std::size_t b = 0; b < batch.spans.size(); ++b) {
    const auto [begin, end] = batch.spans[b];
    const Rows slots = rows_of(low.at("slots"));
    Rows next = luna_packed(low, slots, rows_of(batch.x[b].narrow(0, begin, end - begin)));
    for (std::size_t s = 0; s < next.size(); ++s) {
      for (std::size_t d = 0; d < next[s].size(); ++d) next[s][d] += slots[s][d];
    }
    next = layer_norm(low, "slot_norm", next);
    const Rows x = rows_of(y[b].narrow(0, begin, end - begin));
    const Tensor expected = tensor_of(luna_output(high, luna_packed(high, next, x), x));
    EXPECT_LT(distance(o[b].narrow(0, begin, end - begin), expected), 1e-10) << b;
  }
  o.sum().backward();
  EXPECT_GT(below->named_parameters()["slot_norm.weight"].grad().abs().max().item<double>(), 0);
  EXPECT_GT(below->named_parameters()["slots"].grad().abs().max().item<double>(), 0);
}

TEST(Luna, MissingSlotsAreAnError) {
  AttentionConfig config = small("luna");
  config.layer = 2;
  const auto module = make_attention(config, Settings());
  Context context;
  EXPECT_THROW(module->forward(at::randn({1, 4, 12}), {}, context), lln::Error);
  context.carried["luna"] = at::randn({3, 256, 12});
  EXPECT_THROW(module->forward(at::randn({1, 4, 12}), {}, context), lln::Error);
}

// Slots P^T [k, v] of tokens begin .. end - 1, P = softmax over them of k W.
void append_slots(const Values& values, std::int64_t h, const Rows& k, const Rows& v,
                  std::int64_t begin, std::int64_t end, Rows& keys, Rows& sums) {
  const Rows segment_keys(k.begin() + begin, k.begin() + end);
  const Rows segment_values(v.begin() + begin, v.begin() + end);
  const Rows scores = transposed(product(segment_keys, rows_of(values.at("slot_weight")[h])));
  Rows key_sums, value_sums;
  for (const Row& slot : scores) {
    key_sums.push_back(mean_by(softmax(slot), segment_keys));
    value_sums.push_back(mean_by(softmax(slot), segment_values));
  }
  key_sums = layer_norm(values, "slot_norm", key_sums);
  value_sums = layer_norm(values, "slot_norm", value_sums);
  keys.insert(keys.end(), key_sums.begin(), key_sums.end());
  sums.insert(sums.end(), value_sums.begin(), value_sums.end());
}

// segment 0: not causal.
Case transformer_ls_case(std::int64_t window, std::int64_t rank, std::int64_t segment) {
  const auto head = [=](const Values& values, std::int64_t h, const Rows& q, const Rows& k,
                        const Rows& v) {
    const Rows near_k = layer_norm(values, "window_norm", k);
    const Rows near_v = layer_norm(values, "window_norm", v);
    const std::int64_t n = std::ssize(q);
    Rows o;
    for (std::int64_t i = 0; i < n; ++i) {
      Rows keys, sums;
      const std::int64_t start = i / window * window;
      for (std::int64_t j = 0; j < n; ++j) {
        const bool seen = segment > 0 ? j >= start - window && j <= i
                                      : j >= start - window / 2 && j < start + window + window / 2;
        if (!seen) continue;
        keys.push_back(near_k[j]);
        sums.push_back(near_v[j]);
      }
      if (segment == 0) append_slots(values, h, k, v, 0, n, keys, sums);
      for (std::int64_t s = 0; segment > 0 && (s + 1) * segment <= i + 1; ++s) {
        append_slots(values, h, k, v, s * segment, (s + 1) * segment, keys, sums);
      }
      o.push_back(attend_to(q[i], keys, sums, range(0, std::ssize(keys))));
    }
    return o;
  };
  return {.config = small("transformer-ls", segment > 0),
          .options = fmt::format("window = {}\nrank = {}\n", window, rank) +
                     (segment > 0 ? fmt::format("segment = {}\n", segment) : ""),
          .definition = of_heads(head)};
}

TEST(TransformerLs, IsItsDefinition) {
  check(transformer_ls_case(4, 3, 0));
  check(transformer_ls_case(5, 1, 0));  // an odd window
  check(transformer_ls_case(1, 4, 0));
  check(transformer_ls_case(64, 2, 0));
}

TEST(TransformerLs, CausalFormIsItsDefinition) {
  check(transformer_ls_case(4, 3, 6));
  check(transformer_ls_case(3, 1, 5));
  check(transformer_ls_case(8, 2, 64));  // no segment ever passes
}

}  // namespace
}  // namespace lln_torch::definition
