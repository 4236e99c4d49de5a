// Trains a small encoder with LLN+Diag attention in a loop of its own, over lln::torch and torch's
// modules: one digit of a row is marked, and the class of the row is that digit.
// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <utility>

#include "lln_torch/ops/attention.h"

namespace {

using torch::Tensor;
constexpr std::int64_t kDigits = 10, kTokens = 64, kDim = 64, kHeads = 4;

struct Layer : torch::nn::Module {
  Layer() {
    qkv = register_module("qkv", torch::nn::Linear(kDim, 3 * kDim));
    out = register_module("out", torch::nn::Linear(kDim, kDim));
    up = register_module("up", torch::nn::Linear(kDim, 4 * kDim));
    down = register_module("down", torch::nn::Linear(4 * kDim, kDim));
    first = register_module("first", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    second = register_module("second", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
  }
  Tensor forward(const Tensor& x) {  // [batch, tokens, dim]
    const auto split = [](const Tensor& y) {
      return y.view({y.size(0), y.size(1), kHeads, kDim / kHeads}).transpose(1, 2);
    };
    const auto parts = qkv(first(x)).chunk(3, -1);
    lln_torch::AttentionCall call;
    call.diag_block = 16;        // LLN+Diag; 0 would be LLN alone
    call.matching = "per_head";  // alpha and beta from the moments of q and k
    const Tensor o = lln_torch::attention(split(parts[0]), split(parts[1]), split(parts[2]), call);
    const Tensor y = x + out(o.transpose(1, 2).reshape(x.sizes()));
    return y + down(torch::gelu(up(second(y))));
  }
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::LayerNorm first{nullptr}, second{nullptr};
};

struct Encoder : torch::nn::Module {
  Encoder() {
    tokens = register_module("tokens", torch::nn::Embedding(2 * kDigits, kDim));
    positions = register_parameter("positions", 0.02 * torch::randn({kTokens, kDim}));
    for (auto& layer : layers) layer = std::make_shared<Layer>();
    for (std::size_t i = 0; i < layers.size(); ++i) {
      register_module("layer" + std::to_string(i), layers[i]);
    }
    classes = register_module("classes", torch::nn::Linear(kDim, kDigits));
  }
  Tensor forward(const Tensor& ids) {  // [batch, tokens] -> [batch, classes]
    Tensor x = tokens(ids) + positions;
    for (auto& layer : layers) x = layer->forward(x);
    return classes(x.mean(1));
  }
  torch::nn::Embedding tokens{nullptr};
  Tensor positions;
  std::array<std::shared_ptr<Layer>, 2> layers;
  torch::nn::Linear classes{nullptr};
};

// Ids from kDigits on are marked digits.
std::pair<Tensor, Tensor> make_batch(std::int64_t rows) {
  const Tensor ids = torch::randint(kDigits, {rows, kTokens}, torch::kLong);
  const Tensor place = torch::randint(kTokens, {rows, 1}, torch::kLong);
  const Tensor marked = ids.gather(1, place);
  return {ids.scatter(1, place, marked + kDigits), marked.squeeze(1)};
}

}  // namespace

int main() {
  torch::manual_seed(1);
  Encoder model;
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(3e-3));
  for (int step = 1; step <= 100; ++step) {
    const auto [ids, labels] = make_batch(32);
    const Tensor loss = torch::nn::functional::cross_entropy(model.forward(ids), labels);
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    if (step % 25 == 0) std::printf("step %d  loss %.3f\n", step, loss.item<double>());
  }
  const torch::NoGradGuard no_gradients;
  const auto [ids, labels] = make_batch(512);
  const double right =
      (model.forward(ids).argmax(1) == labels).to(torch::kFloat).mean().item<double>();
  std::printf("accuracy %.3f (chance %.3f)\n", right, 1.0 / kDigits);
  return right > 0.5 ? 0 : 1;
}
