// What tests of attentions share: modules with random projections, tokens with padding, and the
// comparison with a slow definition, outputs and gradients. A slow definition is written from the
// formula on q, k and v in plain torch of f64 and sees nothing of the zoo.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "expect_error.h"
#include "lln_torch/zoo/attention.h"

namespace lln_torch::zoo_cases {

inline AttentionConfig config_of(const std::string& name, bool causal = false) {
  return {.name = name,
          .dim = 24,
          .heads = 3,
          .max_tokens = 140,
          .causal = causal,
          .layer = 2,
          .seed = 11};
}

struct AttentionCase {
  std::string name;
  bool causal;
};

// Every entry of the zoo, with Diag where it takes it, and in its causal form where it has one.
inline std::vector<AttentionCase> every_attention() {
  std::vector<AttentionCase> cases;
  for (const ZooEntry& entry : zoo()) {
    const std::string name = entry.name;
    std::vector<std::string> names = {name};
    if (entry.takes_diag && !name.ends_with("+diag")) names.push_back(name + "+diag");
    for (const std::string& one : names) {
      if (one != name && std::ranges::any_of(zoo(), [&](const auto& e) { return e.name == one; })) {
        continue;  // an entry of its own
      }
      cases.push_back({one, false});
      if (entry.causal) cases.push_back({one, true});
    }
  }
  return cases;
}

inline std::string name_of(const AttentionCase& one) {
  std::string name = one.name + (one.causal ? "_causal" : "");
  std::ranges::replace_if(
      name, [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

// Of an attention that is no layer of a model.
inline AttentionConfig config_alone(const AttentionCase& one) {
  AttentionConfig config = config_of(one.name, one.causal);
  // Later layers of luna take the slots of the layer before.
  if (config.name.starts_with("luna")) config.layer = 0;
  return config;
}

inline Settings options_of(const std::string& toml) { return Settings::from_toml(toml, "test"); }

// Biases and gains are moved off their special first values, so that a test sees them.
inline std::shared_ptr<Attention> made(const AttentionConfig& config, const std::string& toml = "",
                                       std::uint64_t seed = 1) {
  at::set_num_threads(1);  // tensors of tests are too small to share, and tests run side by side
  at::manual_seed(seed);
  const Settings options = options_of(toml);
  auto attention = make_attention(config, options);
  options.finish();
  const at::NoGradGuard no_graph;
  for (Tensor& parameter : attention->parameters()) {
    parameter.add_(at::randn_like(parameter), 0.1);
  }
  return attention;
}

// Tokens that are large enough for attention to be far from uniform.
inline Tensor random_tokens(std::int64_t batch, std::int64_t tokens, std::int64_t dim,
                            std::uint64_t seed = 3) {
  at::manual_seed(seed);
  return 1.5 * at::randn({batch, tokens, dim});
}

// bool [lengths.size(), tokens], true in the first lengths[b] tokens of row b.
inline Tensor mask_of(const std::vector<std::int64_t>& lengths, std::int64_t tokens) {
  const Tensor places = at::arange(tokens).unsqueeze(0);
  return places.lt(at::tensor(lengths, at::kLong).unsqueeze(1));
}

// Large numbers in the tokens that do not count.
inline Tensor with_garbage(const Tensor& x, const Tensor& mask, double size = 50) {
  const Tensor garbage = size * at::randn_like(x) + size;
  return at::where(mask.unsqueeze(-1), x, garbage);
}

inline Tensor run(Attention& attention, const Tensor& x, const Tensor& mask = {},
                  std::int64_t step = 0) {
  Context context{.step = step};
  return attention.forward(x, mask, context);
}

inline double largest_difference(const Tensor& a, const Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// Error up to `tolerance` times the largest expected number, or times 1 where that is smaller.
inline void expect_near(const Tensor& found, const Tensor& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  ASSERT_TRUE(at::isfinite(found).all().item<bool>()) << what << " is not finite";
  if (found.numel() == 0) return;
  const double scale = std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE(largest_difference(found, expected), tolerance * scale) << what;
}

struct SlowInputs {
  Tensor q, k, v;  // f64 [batch, heads, tokens, channels]
  Tensor mask;     // bool [batch, tokens], always defined
  Tensor x;        // f64 [batch, tokens, dim]
  torch::nn::Module& module;
  Tensor parameter(const std::string& name) const {
    const auto all = module.named_parameters();
    const auto buffers = module.named_buffers();
    return all.contains(name) ? all[name] : buffers[name];
  }
};
// -> [batch, heads, tokens, channels]; rows that do not count may be anything.
using SlowDefinition = std::function<Tensor(const SlowInputs&)>;

inline Tensor slow_linear(const torch::nn::Module& module, const std::string& name,
                          const Tensor& x) {
  const auto parameters = module.named_parameters();
  const Tensor y = at::matmul(x, parameters[name + ".weight"].t());
  return parameters.contains(name + ".bias") ? y + parameters[name + ".bias"] : y;
}

inline Tensor slow_forward(torch::nn::Module& module, const AttentionConfig& config,
                           const Tensor& x, const Tensor& mask, const SlowDefinition& slow) {
  const auto heads = [&](const char* name) {
    return slow_linear(module, name, x)
        .reshape({x.size(0), x.size(1), config.heads, config.dim / config.heads})
        .permute({0, 2, 1, 3});
  };
  const bool shared = !module.named_parameters().contains("key.weight");
  const Tensor all = mask.defined() ? mask : at::ones({x.size(0), x.size(1)}, at::kBool);
  const SlowInputs inputs{heads("query"), heads(shared ? "query" : "key"), heads("value"), all, x,
                          module};
  return slow_linear(module, "output", slow(inputs).permute({0, 2, 1, 3}).flatten(2));
}

// The module in f64 against the slow definition: outputs of the tokens that count, and gradients of
// a sum of them over tokens and parameters. `lengths` (empty: no mask) are those of the sequences.
inline void expect_definition(const AttentionConfig& config, const std::string& toml,
                              std::int64_t tokens, const std::vector<std::int64_t>& lengths,
                              const SlowDefinition& slow, double tolerance = 1e-9) {
  const std::int64_t batch = lengths.empty() ? 2 : static_cast<std::int64_t>(lengths.size());
  SCOPED_TRACE(config.name + " " + toml + (config.causal ? " causal" : "") + " tokens " +
               std::to_string(tokens) + (lengths.empty() ? "" : " masked"));
  const auto attention = made(config, toml);
  attention->to(at::kDouble);
  const Tensor mask = lengths.empty() ? Tensor() : mask_of(lengths, tokens);
  Tensor x = random_tokens(batch, tokens, config.dim).to(at::kDouble);
  if (mask.defined()) x = with_garbage(x, mask);
  x.requires_grad_();
  const Tensor counts =
      (mask.defined() ? mask : at::ones({batch, tokens}, at::kBool)).unsqueeze(-1);
  const Tensor weights = at::randn_like(x).masked_fill(counts.logical_not(), 0);
  std::vector<Tensor> wanted = attention->parameters();
  wanted.push_back(x);
  const auto gradients = [&](const Tensor& y) {
    return torch::autograd::grad({(y.masked_fill(counts.logical_not(), 0) * weights).sum()}, wanted,
                                 {}, std::nullopt, false, /*allow_unused=*/true);
  };
  const Tensor expected = slow_forward(*attention, config, x, mask, slow);
  const Tensor found = run(*attention, x, mask);
  ASSERT_TRUE(at::isfinite(found).all().item<bool>());
  expect_near(found.masked_fill(counts.logical_not(), 0).detach(),
              expected.masked_fill(counts.logical_not(), 0).detach(), tolerance, "output");
  const auto expected_gradients = gradients(expected), found_gradients = gradients(found);
  const auto names = attention->named_parameters().keys();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::string what = "gradient of " + (i < names.size() ? names[i] : "the tokens");
    const bool used = expected_gradients[i].defined();
    ASSERT_TRUE(found_gradients[i].defined() || !used) << what;
    if (used) expect_near(found_gradients[i], expected_gradients[i], tolerance, what);
  }
}

// Unmasked and masked (one sequence short, one whole, one of a single token), at lengths that are
// a multiple of nothing.
inline void expect_definition(const AttentionConfig& config, const std::string& toml,
                              const SlowDefinition& slow, double tolerance = 1e-9) {
  expect_definition(config, toml, 37, {}, slow, tolerance);
  expect_definition(config, toml, 29, {17, 29, 1}, slow, tolerance);
  expect_definition(config, toml, 1, {}, slow, tolerance);
}

// Which keys row i may see, bool [batch, 1, tokens, tokens].
inline Tensor slow_visible(const SlowInputs& in, bool causal) {
  const std::int64_t tokens = in.q.size(2);
  const Tensor row = at::arange(tokens).unsqueeze(1), key = at::arange(tokens).unsqueeze(0);
  Tensor seen = in.mask.unsqueeze(1).unsqueeze(1).expand({-1, 1, tokens, tokens});
  return causal ? seen.logical_and(key.le(row)) : seen;
}

// sum_j w_ij v_j / sum_j w_ij over the keys that are seen; values of padding are left out by
// selection. Rows without weight are 0.
inline Tensor slow_average(const Tensor& weights, const Tensor& seen, const SlowInputs& in) {
  const Tensor w = at::where(seen, weights, at::zeros_like(weights));
  const Tensor v = at::where(in.mask.unsqueeze(1).unsqueeze(-1), in.v, at::zeros_like(in.v));
  const Tensor mass = w.sum(-1, true);
  const Tensor safe = at::where(mass.eq(0), at::ones_like(mass), mass);
  return at::matmul(w, v) / safe;
}

// exp(score) / sum exp(score) over the keys that are seen; rows without one are 0.
inline Tensor slow_softmax(const Tensor& scores, const Tensor& seen, const SlowInputs& in) {
  const Tensor low = at::full_like(scores, -1e300);
  const Tensor top = std::get<0>(at::where(seen, scores, low).max(-1, true)).detach();
  return slow_average((at::where(seen, scores, top) - top).exp(), seen, in);
}

inline Tensor slow_scores(const SlowInputs& in) {
  return at::matmul(in.q, in.k.transpose(-1, -2)) / std::sqrt(static_cast<double>(in.q.size(-1)));
}

// Blocks of `block` tokens from the first token that counts.
inline Tensor slow_diag(const SlowInputs& in, std::int64_t block, bool causal) {
  const std::int64_t tokens = in.q.size(2);
  const Tensor seen = slow_visible(in, causal);
  Tensor same = at::zeros({in.q.size(0), 1, tokens, tokens}, at::kBool);
  for (std::int64_t b = 0; b < in.q.size(0); ++b) {
    std::int64_t first = 0;
    while (first < tokens && !in.mask[b][first].item<bool>()) ++first;
    for (std::int64_t i = first; i < tokens; ++i) {
      const std::int64_t start = first + (i - first) / block * block;
      same[b][0][i].slice(0, start, std::min(start + block, tokens)).fill_(true);
    }
  }
  return slow_softmax(slow_scores(in), seen.logical_and(same), in);
}

using lln::test::error_of;

}  // namespace lln_torch::zoo_cases
