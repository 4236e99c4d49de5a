// What autograd keeps and refuses around attention(), the texts of errors, and torch's threads.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "lln/attention.h"
#include "lln/error.h"
#include "lln_torch/ops/attention.h"
#include "lln_torch/ops/side_work.h"

namespace lln_torch {
namespace {

at::Tensor random_leaf(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(); }

// The text and the code of the lln::Error that `work` throws.
struct Thrown {
  std::string text;
  lln::ErrorCode code = lln::ErrorCode::internal;
};
template <class Work>
Thrown error_of(Work&& work) {
  try {
    work();
  } catch (const lln::Error& error) {
    return {error.what(), error.code()};
  }
  ADD_FAILURE() << "no lln::Error was thrown";
  return {};
}

lln::ConstView view_of(const at::Tensor& x) {
  lln::View view{.data = x.data_ptr(), .dtype = lln::DType::f32};
  for (std::size_t i = 0; i < 4; ++i) {
    view.shape[i] = x.size(static_cast<std::int64_t>(i));
    view.stride[i] = x.stride(static_cast<std::int64_t>(i));
  }
  return view;
}

// What the core says of the same call, made without torch.
Thrown core_error(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const std::function<void(lln::AttentionInputs&)>& change = {},
                  const lln::AttentionOptions& options = {}) {
  const at::Tensor one = at::ones({1, 1, 1, 1});
  const at::Tensor o = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)});
  lln::AttentionInputs in{.q = view_of(q),
                          .k = view_of(k),
                          .v = view_of(v),
                          .alpha = view_of(one),
                          .beta = view_of(one)};
  if (change) change(in);
  lln::View out{.data = o.data_ptr(), .dtype = lln::DType::f32};
  const lln::ConstView shape = view_of(o);
  out.shape = shape.shape;
  out.stride = shape.stride;
  return error_of([&] { lln::attention_forward(in, {out, {}}, options); });
}

AttentionCall unmatched() {
  AttentionCall call;
  call.fixed_alpha = call.fixed_beta = 1;
  return call;
}

TEST(Errors, AreTheCores) {
  const at::Tensor q = at::randn({2, 4, 10, 16});
  for (const bool gradients : {false, true}) {
    const at::Tensor queries = q.detach().clone().requires_grad_(gradients);
    const auto expect_core = [&](const at::Tensor& k, const at::Tensor& v) {
      const Thrown found = error_of([&] { attention(queries, k, v, unmatched()); });
      const Thrown core = core_error(q, k, v);
      EXPECT_EQ(found.text, core.text);
      EXPECT_EQ(found.code, core.code);
      EXPECT_NE(core.text, "");
    };
    expect_core(at::randn({2, 4, 10, 8}), q);
    expect_core(at::randn({2, 3, 10, 16}), at::randn({1, 3, 9, 16}));
    expect_core(at::randn({2, 4, 10, 16}), at::randn({2, 2, 10, 16}));
  }
}

TEST(Errors, OfContradictionsAreTheCores) {
  const at::Tensor q = at::randn({2, 4, 10, 16});
  AttentionCall call = unmatched();
  call.key_lengths = at::tensor({10L, 5L});
  call.key_mask = at::ones({2, 10}, at::kBool);
  EXPECT_NE(error_of([&] {
              attention(q, q, q, call);
            }).text.find("key_lengths and key_mask are both given: give one"),
            std::string::npos);
  call = unmatched();
  call.diag_block = 8;
  call.lln_weight = at::ones({4});
  EXPECT_NE(error_of([&] {
              attention(q, q, q, call);
            }).text.find("lln_weight and diag_weight go together: one of them is not given"),
            std::string::npos);
  call.diag_weight = call.mix = call.lln_weight;
  EXPECT_NE(error_of([&] {
              attention(q, q, q, call);
            }).text.find("mix and lln_weight or diag_weight are both given"),
            std::string::npos);
  call = {};
  call.alpha = at::ones({4});
  EXPECT_NE(error_of([&] { attention(q, q, q, call); }).text.find("beta is not given"),
            std::string::npos);
  call = {};
  call.causal = true;
  EXPECT_NE(error_of([&] {
              attention(q, q, q, call);
            }).text.find("mode per_head reads the whole sequence"),
            std::string::npos);
  call = {};
  call.matching = "best";
  EXPECT_NE(error_of([&] { attention(q, q, q, call); }).text.find("best"), std::string::npos);
  call = {};
  call.feature = "cosine";
  EXPECT_NE(error_of([&] { attention(q, q, q, call); }).text.find("cosine"), std::string::npos);
}

TEST(Errors, OfTensorsThatCannotBeRead) {
  const at::Tensor q = at::randn({2, 4, 10, 16});
  const auto text = [&](const at::Tensor& k, const AttentionCall& call = {}) {
    return error_of([&] { attention(q, k, q, call); }).text;
  };
  EXPECT_EQ(text({}), "k is not given: expected a tensor");
  EXPECT_EQ(text(q.to(at::kMeta)), "k is on device meta: expected cpu or cuda");
  EXPECT_EQ(text(q.to_sparse()), "k is sparse: expected a strided tensor");
  EXPECT_EQ(text(q.select(0, 0)),
            "k has shape [4, 10, 16]: expected [batch, heads, tokens, channels]");
  EXPECT_EQ(text(q.to(at::kLong)),
            "k has a type that is none of float32, float16, bfloat16 and float64");
  AttentionCall mixed;
  mixed.mix = at::ones({4});
  EXPECT_EQ(text(q, mixed), "mix is given, and LLN alone (diag_block 0) has nothing to mix");
  AttentionCall twice = unmatched();
  twice.alpha = at::ones({4});
  EXPECT_EQ(text(q, twice), "a scale is given as a tensor and as a number: give one");
}

TEST(Autograd, SecondDerivativesAreRefused) {
  const at::Tensor q = random_leaf({1, 2, 16, 8});
  AttentionCall call = unmatched();
  const at::Tensor o = attention(q, q, q, call);
  const auto first = torch::autograd::grad({o.square().sum()}, {q}, {}, true, true);
  ASSERT_TRUE(first[0].requires_grad());
  const Thrown error = error_of([&] { first[0].square().sum().backward(); });
  EXPECT_EQ(error.text, "gradients of gradients of LLN attention are not available");
  EXPECT_EQ(error.code, lln::ErrorCode::unsupported);
  // The first derivative is the same with a graph as without.
  const auto again = torch::autograd::grad({attention(q, q, q, call).square().sum()}, {q});
  EXPECT_TRUE(at::equal(first[0], again[0]));
}

// torch's memory with a count of the bytes in use, as long as the object lives.
class CountedMemory final : public c10::Allocator {
 public:
  CountedMemory() : plain_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  ~CountedMemory() override { c10::SetCPUAllocator(plain_); }
  std::int64_t bytes() const { return bytes_; }

  c10::DataPtr allocate(std::size_t size) override {
    struct Piece {
      c10::DataPtr memory;
      CountedMemory* owner;
      std::int64_t size;
    };
    auto* piece = new Piece{plain_->allocate(size), this, static_cast<std::int64_t>(size)};
    bytes_ += piece->size;
    return {piece->memory.get(), piece,
            [](void* context) {
              auto* done = static_cast<Piece*>(context);
              done->owner->bytes_ -= done->size;
              delete done;
            },
            at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  c10::Allocator* plain_;
  std::int64_t bytes_ = 0;
};

TEST(Autograd, NothingIsKeptWithoutGradients) {
  const at::Tensor q = random_leaf({1, 2, 64, 16});
  {
    at::NoGradGuard guard;
    EXPECT_EQ(attention(q, q, q).grad_fn(), nullptr);
  }
  const at::Tensor data = q.detach();
  EXPECT_FALSE(attention(data, data, data).requires_grad());
  AttentionCall call = unmatched();
  call.fixed_alpha.reset();
  call.alpha = random_leaf({2});
  EXPECT_TRUE(attention(data, data, data, call).requires_grad());
}

TEST(Autograd, NothingOfTheLengthIsKeptBesidesTheArguments) {
  CountedMemory memory;
  for (const bool causal : {false, true}) {
    for (const std::int64_t block : {0, 64}) {
      const auto kept = [&](std::int64_t tokens) {
        const at::Tensor q = random_leaf({1, 2, tokens, 16});
        const at::Tensor mask = at::ones({1, tokens}, at::kBool);
        AttentionCall call;
        call.matching = causal ? "none" : "per_head";
        call.causal = causal;
        call.diag_block = block;
        call.key_mask = mask;
        const std::int64_t before = memory.bytes();
        const auto graph = attention(q, q, q, call).grad_fn();
        EXPECT_NE(graph, nullptr);
        return memory.bytes() - before;
      };
      const std::int64_t bytes = kept(2048);
      EXPECT_GT(bytes, 0);  // alpha and beta at least
      EXPECT_LE(bytes, 4096 + 2 * 16 * 17 * 4);
      EXPECT_EQ(kept(4096), bytes);
    }
  }
}

// Begun before the backward pass the state has the bits of the one that is kept. Without that, and
// in a second pass, for which nothing is remembered, the pass sums the keys in an order of its own.
TEST(Autograd, AStateThatIsMadeAgainChangesNothing) {
  AttentionCall with_block, masked, learned;
  with_block.diag_block = 16;
  masked.key_mask = at::arange(150).unsqueeze(0).lt(at::tensor({150, 93}).unsqueeze(1));
  learned.alpha = (at::rand({4}) + 0.5).requires_grad_();
  learned.beta = (at::rand({2}) + 0.5).requires_grad_();
  for (const AttentionCall& given : {AttentionCall{}, with_block, masked, learned}) {
    const at::Tensor q = random_leaf({2, 4, 150, 16}), k = random_leaf({2, 2, 150, 16});
    const at::Tensor v = random_leaf({2, 2, 150, 8}), g = at::randn({2, 4, 150, 8});
    std::vector<at::Tensor> leaves{q, k, v};
    if (given.alpha.defined()) leaves.insert(leaves.end(), {given.alpha, given.beta});
    const auto gradients = [&](const at::Tensor& o) {
      return torch::autograd::grad({o}, leaves, {g}, /*retain_graph=*/true);
    };
    const at::Tensor expected = attention(q, k, v, given);
    const auto expected_gradients = gradients(expected);
    for (const bool begun : {true, false}) {
      AttentionCall call = given;
      call.state_again = std::make_shared<StateAgain>();
      const at::Tensor found = attention(q, k, v, call);
      EXPECT_TRUE(at::equal(found, expected));
      for (int pass = 0; pass < 2; ++pass) {
        if (begun) call.state_again->begin();
        const auto found_gradients = gradients(found);
        for (std::size_t i = 0; i < leaves.size(); ++i) {
          if (begun && pass == 0) {
            EXPECT_TRUE(at::equal(found_gradients[i], expected_gradients[i])) << i;
          } else {
            const double off = (found_gradients[i] - expected_gradients[i]).norm().item<double>();
            EXPECT_LE(off, 1e-5 * expected_gradients[i].norm().item<double>()) << i;
          }
        }
      }
    }
  }
}

TEST(Autograd, AStateThatIsMadeAgainIsNotKept) {
  CountedMemory memory;
  const auto kept = [&](bool again) {
    const at::Tensor q = random_leaf({1, 2, 64, 32});
    AttentionCall call = unmatched();
    if (again) call.state_again = std::make_shared<StateAgain>();
    const std::int64_t before = memory.bytes();
    const auto graph = attention(q, q, q, call).grad_fn();
    EXPECT_NE(graph, nullptr);
    return memory.bytes() - before;
  };
  constexpr std::int64_t kState = 2 * 32 * 33 * 4;
  EXPECT_GE(kept(false), kState);
  EXPECT_LT(kept(true), kState / 4);
}

TEST(Autograd, ACallThatCannotMakeItsStateAgainIsRefused) {
  const at::Tensor q = random_leaf({1, 2, 32, 8});
  AttentionCall causal = unmatched(), near = unmatched(), packed = unmatched();
  causal.causal = true;
  near.diag_block = 8;
  near.fixed_mix = 0;
  packed.cu_seqlens = at::tensor({0, 10, 32}, at::kInt);
  for (AttentionCall* call : {&causal, &near, &packed}) {
    call->state_again = std::make_shared<StateAgain>();
    EXPECT_EQ(error_of([&] { attention(q, q, q, *call); }).text,
              "state_again is for bidirectional calls with LLN whose sequences are not packed");
  }
}

// Begun for a gradient that then leads elsewhere.
TEST(Autograd, AStateThatNobodyTakesIsLeft) {
  const at::Tensor q = random_leaf({1, 2, 32, 8}), weight = random_leaf({8});
  AttentionCall call = unmatched();
  call.state_again = std::make_shared<StateAgain>();
  const at::Tensor o = attention(q, q, q, call), y = o * weight;
  y.register_hook([again = call.state_again](const at::Tensor&) { again->begin(); });
  const auto alone = torch::autograd::grad({y.sum()}, {weight}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(at::allclose(alone[0], o.detach().sum({0, 1, 2})));
  const auto found = torch::autograd::grad({y.sum()}, {q});
  const at::Tensor plain = attention(q, q, q, unmatched()) * weight;
  EXPECT_TRUE(at::equal(found[0], torch::autograd::grad({plain.sum()}, {q})[0]));
}

TEST(Autograd, ArgumentsThatWereChangedAreRefused) {
  const at::Tensor leaf = random_leaf({1, 2, 16, 8});
  const at::Tensor q = leaf * 1;
  const at::Tensor o = attention(q, q, q, unmatched());
  q.detach().zero_();
  EXPECT_THROW(o.sum().backward(), c10::Error);
}

TEST(Autograd, GradientsOnRequestAlone) {
  const at::Tensor q = random_leaf({1, 2, 32, 8});
  AttentionCall call;
  call.alpha = random_leaf({2});
  call.beta = at::ones({2});
  call.diag_block = 8;
  call.mix = at::full({2}, 0.5);
  const at::Tensor o = attention(q, q, q, call);
  o.sum().backward();
  EXPECT_TRUE(call.alpha.grad().defined());
  EXPECT_FALSE(call.beta.grad().defined());
  EXPECT_FALSE(call.mix.grad().defined());
}

TEST(Autograd, BackwardWithoutAGradientOfTheOutput) {
  const at::Tensor q = random_leaf({1, 2, 32, 8});
  const at::Tensor o = attention(q, q, q, unmatched());
  const auto found = torch::autograd::grad({q.sum() + 0 * o.detach().sum()}, {q});
  EXPECT_TRUE(at::equal(found[0], at::ones_like(q)));
}

TEST(Threads, AreTorchsAndChangeNothing) {
  const int before = at::get_num_threads();
  const at::Tensor q = random_leaf({4, 4, 512, 32});
  AttentionCall call = unmatched();
  call.diag_block = 64;
  call.causal = true;
  std::vector<at::Tensor> results;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const at::Tensor o = attention(q, q, q, call);
    results.push_back(o.detach());
    results.push_back(torch::autograd::grad({o}, {q}, {at::ones_like(o)})[0]);
  }
  at::set_num_threads(before);
  for (std::size_t i = 2; i < results.size(); ++i) {
    EXPECT_TRUE(at::equal(results[i], results[i % 2]));
  }
}

}  // namespace
}  // namespace lln_torch
