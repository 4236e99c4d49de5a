// A streaming decoder: the prompt in one append, then one token at a time, with a state whose size
// never changes. Random numbers stand for the q, k and v that a model would compute.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "lln/lln.h"

constexpr std::int64_t kHeads = 8, kDim = 64, kPrompt = 4096, kTokens = 5120;

struct alignas(64) CacheLine {  // the state wants memory that starts at one
  std::byte bytes[64];
};

// Tokens [first, first + count) of a tensor [1, heads, tokens, dim].
lln::View rows(std::vector<float>& x, std::int64_t first, std::int64_t count) {
  return lln::view(static_cast<void*>(x.data() + first * kDim), lln::DType::f32,
                   {1, kHeads, count, kDim}, {kHeads * kTokens * kDim, kTokens * kDim, kDim, 1});
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main() {
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(kHeads * kTokens * kDim), k(q), v(q), o(q), expected(q);
  for (auto* x : {&q, &k, &v}) std::generate(x->begin(), x->end(), [&] { return normal(bits); });
  const float alpha = 2.1F, beta = 2.1F;
  const auto tokens = [&](std::int64_t first, std::int64_t count) {
    return lln::AttentionInputs{.q = rows(q, first, count),
                                .k = rows(k, first, count),
                                .v = rows(v, first, count),
                                .alpha = lln::scalar(&alpha),
                                .beta = lln::scalar(&beta)};
  };
  lln::ThreadPool threads;
  const lln::Exec exec{&threads};

  const lln::DecodeConfig config{
      .heads = kHeads, .heads_k = kHeads, .dim = kDim, .dim_v = kDim, .kind = lln::Kind::lln_diag};
  std::vector<CacheLine> memory((lln::decode_state_bytes(config) + 63) / 64);
  lln::DecodeState state(config, std::as_writable_bytes(std::span(memory)));

  double start = seconds();
  state.append(tokens(0, kPrompt), rows(o, 0, kPrompt), exec);
  std::printf("prompt of %d tokens: %.0f tokens/s, a state of %zu kB\n", static_cast<int>(kPrompt),
              kPrompt / (seconds() - start), memory.size() * sizeof(CacheLine) / 1000);

  start = seconds();
  for (std::int64_t t = kPrompt; t < kTokens; ++t) {
    state.step(tokens(t, 1), rows(o, t, 1), exec);
    if ((t + 1) % 256 != 0) continue;
    std::printf("token %d: %.1f us a token\n", static_cast<int>(t + 1),
                (seconds() - start) / 256 * 1e6);
    start = seconds();
  }

  lln::attention_forward(tokens(0, kTokens), {rows(expected, 0, kTokens)},
                         {.kind = lln::Kind::lln_diag, .causal = true}, exec);
  float difference = 0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    const float here = std::abs(o[i] - expected[i]);
    if (here > difference || std::isnan(here)) difference = here;
  }
  std::printf("largest difference from the causal forward: %.1e\n", difference);
  return difference < 1e-4F ? 0 : 1;
}
