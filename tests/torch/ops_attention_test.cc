// attention() of tensors against its definition in plain LibTorch: outputs, and all gradients, in
// every form that a call can take.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "lln_torch/ops/attention.h"
#include "plain_attention.h"

namespace lln_torch {
namespace {

struct Qkv {
  at::Tensor q, k, v;
};

Qkv random_qkv(std::int64_t n = 37, std::int64_t m = 37, at::ScalarType type = at::kDouble) {
  const auto numbers = [&](at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble).to(type).requires_grad_();
  };
  return {numbers({2, 4, n, 16}), numbers({2, 2, m, 16}), numbers({2, 2, m, 24})};
}

at::Tensor random_scale(at::IntArrayRef sizes) {
  return (at::rand(sizes, at::kDouble) + 0.5).requires_grad_();
}

// The tensors of a call that gradients flow to.
std::vector<at::Tensor*> parameters(AttentionCall& call) {
  std::vector<at::Tensor*> given;
  for (at::Tensor* x : {&call.alpha, &call.beta, &call.mix, &call.lln_weight, &call.diag_weight}) {
    if (x->defined()) given.push_back(x);
  }
  return given;
}

void expect_close(const at::Tensor& found, const at::Tensor& expected, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  const double size = std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((found.to(at::kDouble) - expected).abs().max().item<double>(), tolerance * size)
      << what;
}

using PlainForm = std::function<at::Tensor(const Qkv&, const AttentionCall&)>;

// o and all gradients within `tolerance` times the largest of their kind. `form` is what the call
// computes, for f64 tensors.
void expect_same(
    const Qkv& x, AttentionCall call, double tolerance,
    const PlainForm& form = [](const Qkv& y, const AttentionCall& c) {
      return plain::attention(y.q, y.k, y.v, c);
    }) {
  const bool wide = x.q.scalar_type() == at::kDouble;
  AttentionCall typed = call;
  std::vector<at::Tensor> leaves{x.q, x.k, x.v};
  for (at::Tensor* p : parameters(typed)) {
    *p = p->detach().to(wide ? at::kDouble : at::kFloat).requires_grad_();
    leaves.push_back(*p);
  }
  const auto copy = [](const at::Tensor& y) { return y.detach().to(at::kDouble).requires_grad_(); };
  const Qkv y{copy(x.q), copy(x.k), copy(x.v)};
  AttentionCall plain_call = typed;
  std::vector<at::Tensor> plain_leaves{y.q, y.k, y.v};
  for (at::Tensor* p : parameters(plain_call)) {
    *p = copy(*p);
    plain_leaves.push_back(*p);
  }
  const at::Tensor o = attention(x.q, x.k, x.v, typed);
  const at::Tensor expected = form(y, plain_call);
  ASSERT_EQ(o.scalar_type(), x.q.scalar_type());
  const at::Tensor g = at::randn(expected.sizes(), at::kDouble).to(o.scalar_type());
  const auto found = torch::autograd::grad({o}, leaves, {g}, false, false, true);
  const auto wanted =
      torch::autograd::grad({expected}, plain_leaves, {g.to(at::kDouble)}, false, false, true);
  expect_close(o, expected, tolerance, "o");
  for (std::size_t i = 0; i < found.size(); ++i) {
    // None where an argument plays no part.
    const at::Tensor gradient = found[i].defined() ? found[i] : at::zeros_like(wanted[i]);
    expect_close(gradient, wanted[i], tolerance, "gradient of leaf " + std::to_string(i));
  }
}

AttentionCall scaled_call(bool causal = false, std::int64_t diag_block = 0) {
  AttentionCall call;
  call.causal = causal;
  call.diag_block = diag_block;
  call.alpha = random_scale({4});
  call.beta = random_scale({2});
  return call;
}

TEST(Attention, EveryFeatureCausalOrNotWithBlocksOrWithout) {
  for (const char* feature : {"exp", "elu", "relu", "softplus", "power2", "power3"}) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t block : {0, 8}) {
        SCOPED_TRACE(testing::Message() << feature << causal << block);
        AttentionCall call = scaled_call(causal, block);
        call.feature = feature;
        expect_same(random_qkv(), call, 2e-13);
      }
    }
  }
}

TEST(Attention, EveryType) {
  struct {
    at::ScalarType type;
    double tolerance;
  } const types[] = {{at::kFloat, 4e-6}, {at::kBFloat16, 1.0 / 128}, {at::kHalf, 1.0 / 1024}};
  for (const auto& [type, tolerance] : types) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t n : {1, 7, 100}) {
        SCOPED_TRACE(testing::Message() << type << causal << n);
        expect_same(random_qkv(n, n, type), scaled_call(causal, 8), tolerance);
      }
    }
  }
}

TEST(Attention, EveryFormOfScalesAndWeights) {
  for (const std::vector<std::int64_t>& sizes :
       std::vector<std::vector<std::int64_t>>{{}, {4}, {4, 24}, {2, 4, 37}}) {
    SCOPED_TRACE(testing::Message() << "weights of " << sizes.size() << " dimensions");
    AttentionCall call = scaled_call(true, 8);
    call.mix = random_scale(sizes);
    expect_same(random_qkv(), call, 2e-13);
    call.mix.reset();
    call.lln_weight = random_scale(sizes);
    call.diag_weight = random_scale(sizes);
    expect_same(random_qkv(), call, 2e-13);
  }
  AttentionCall call;
  call.alpha = random_scale({});
  call.beta = random_scale({2, 2});
  expect_same(random_qkv(), call, 2e-13);
}

TEST(Attention, NumbersInPlaceOfTensors) {
  AttentionCall call = scaled_call(true, 8);
  call.fixed_mix = 0.25;
  expect_same(random_qkv(), call, 2e-13);
  const Qkv x = random_qkv(64, 64, at::kFloat);
  AttentionCall numbers;
  numbers.fixed_alpha = 1.5;
  numbers.fixed_beta = 0.75;
  AttentionCall tensors;
  tensors.alpha = at::full({}, 1.5);
  tensors.beta = at::full({}, 0.75);
  const at::Tensor o = attention(x.q, x.k, x.v, numbers);
  EXPECT_TRUE(at::equal(o, attention(x.q, x.k, x.v, tensors)));
  o.sum().backward();
  EXPECT_TRUE(x.q.grad().isfinite().all().item<bool>());
}

TEST(Attention, DiagAlone) {
  AttentionCall call = scaled_call(false, 8);
  call.fixed_mix = 0;
  expect_same(random_qkv(), call, 2e-13);
}

TEST(Attention, Masks) {
  for (const bool causal : {false, true}) {
    AttentionCall call = scaled_call(causal, 8);
    const at::Tensor lengths = at::tensor({37L, 11L});
    const at::Tensor mask = at::arange(37).unsqueeze(0) < lengths.unsqueeze(1);
    call.key_mask = mask;
    expect_same(random_qkv(), call, 2e-13);
    call.key_mask = mask.flip({1});  // padding on the left
    expect_same(random_qkv(), call, 2e-13);
    call.key_mask.reset();
    for (const at::ScalarType type : {at::kInt, at::kLong}) {
      call.key_lengths = lengths.to(type);
      expect_same(random_qkv(), call, 2e-13, [&](const Qkv& y, AttentionCall plain_call) {
        plain_call.key_mask = mask;
        return plain::attention(y.q, y.k, y.v, plain_call);
      });
    }
  }
}

TEST(Attention, CrossAttention) { expect_same(random_qkv(37, 19), scaled_call(), 2e-13); }

TEST(Attention, PackedSequences) {
  const std::vector<std::int64_t> ends{0, 5, 5, 21, 37};
  for (const bool causal : {false, true}) {
    for (const std::int64_t block : {0, 8}) {
      AttentionCall call;
      call.causal = causal;
      call.diag_block = block;
      call.alpha = random_scale({4, 4});  // one row for each sequence
      call.beta = random_scale({2});
      call.cu_seqlens = at::tensor(ends, at::kInt);
      Qkv x = random_qkv();
      for (at::Tensor* t : {&x.q, &x.k, &x.v}) {
        *t = t->detach().narrow(0, 0, 1).clone().requires_grad_();
      }
      expect_same(x, call, 2e-13, [&](const Qkv& y, const AttentionCall& packed) {
        std::vector<at::Tensor> rows;
        for (std::size_t s = 0; s + 1 < ends.size(); ++s) {
          const auto part = [&](const at::Tensor& t) {
            return t.narrow(2, ends[s], ends[s + 1] - ends[s]);
          };
          if (ends[s] == ends[s + 1]) continue;
          AttentionCall one = packed;
          one.cu_seqlens.reset();
          one.alpha = packed.alpha.select(0, static_cast<std::int64_t>(s));
          rows.push_back(plain::attention(part(y.q), part(y.k), part(y.v), one));
        }
        return at::cat(rows, 2);
      });
    }
  }
}

TEST(Attention, ViewsAreReadWhereTheyLie) {
  // Heads inside tokens, as a projection leaves them, and one tensor for all three.
  const at::Tensor fused = at::randn({2, 50, 3, 4, 16}).requires_grad_();
  const auto view = [&](std::int64_t i) { return fused.select(2, i).transpose(1, 2); };
  const at::Tensor o = attention(view(0), view(1), view(2));
  EXPECT_EQ(o.strides(), (std::vector<std::int64_t>{50 * 64, 16, 64, 1}));
  const at::Tensor plain_o =
      attention(view(0).contiguous(), view(1).contiguous(), view(2).contiguous());
  EXPECT_TRUE(at::equal(o, plain_o));
  // Channels that are not contiguous are copied, and a gradient of stride 0 is taken.
  const at::Tensor q = at::randn({2, 4, 16, 50}).requires_grad_();
  const at::Tensor turned = attention(q.transpose(2, 3), view(1), view(2));
  EXPECT_TRUE(at::equal(turned, attention(q.transpose(2, 3).contiguous(), view(1), view(2))));
  turned.sum().backward();
  EXPECT_EQ(q.grad().sizes(), q.sizes());
}

TEST(Attention, MatchesWhereNothingIsGiven) {
  const Qkv x = random_qkv();
  for (const char* mode : {"per_head", "exact", "entropy", "paper", "none"}) {
    AttentionCall call;
    call.matching = mode;
    call.key_mask = at::arange(37).unsqueeze(0) < at::tensor({37L, 30L}).unsqueeze(1);
    const auto [alpha, beta] = match(x.q, x.k, call);
    EXPECT_FALSE(alpha.requires_grad());
    AttentionCall given = call;
    given.alpha = alpha;
    given.beta = beta;
    const at::Tensor o = attention(x.q, x.k, x.v, call);
    const at::Tensor expected = attention(x.q, x.k, x.v, given);
    EXPECT_TRUE(at::equal(o, expected)) << mode;
    // Matched scales count as constants in the backward pass.
    const auto found = torch::autograd::grad({o}, {x.q, x.k, x.v}, {at::ones_like(o)});
    const auto wanted = torch::autograd::grad({expected}, {x.q, x.k, x.v}, {at::ones_like(o)});
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(found[i], wanted[i])) << mode;
  }
}

// Central differences along a random direction of all leaves together.
TEST(Attention, GradientsAreThoseOfFiniteDifferences) {
  for (const bool causal : {false, true}) {
    const Qkv x = random_qkv(13, 13);
    AttentionCall call = scaled_call(causal, 4);
    call.mix = random_scale({2, 4, 13});
    std::vector<at::Tensor> leaves{x.q, x.k, x.v, call.alpha, call.beta, call.mix};
    const at::Tensor o = attention(x.q, x.k, x.v, call);
    const at::Tensor g = at::randn_like(o);
    const auto gradients = torch::autograd::grad({o}, leaves, {g});
    std::vector<at::Tensor> directions;
    double expected = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      directions.push_back(at::randn_like(leaves[i]));
      expected += (gradients[i] * directions[i]).sum().item<double>();
    }
    const auto moved = [&](double step) {
      at::NoGradGuard guard;
      std::vector<at::Tensor> at_step;
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        at_step.push_back(leaves[i] + step * directions[i]);
      }
      AttentionCall there = call;
      there.alpha = at_step[3];
      there.beta = at_step[4];
      there.mix = at_step[5];
      return (attention(at_step[0], at_step[1], at_step[2], there) * g).sum().item<double>();
    };
    const double step = 1e-5;
    EXPECT_NEAR((moved(step) - moved(-step)) / (2 * step), expected, 1e-6 * std::abs(expected));
  }
}

TEST(Attention, SoftmaxIsThePeer) {
  const Qkv x = random_qkv();
  AttentionCall call;
  call.causal = true;
  call.key_mask = at::arange(37).unsqueeze(0) < at::tensor({37L, 20L}).unsqueeze(1);
  const at::Tensor o = softmax_attention(x.q, x.k, x.v, call);
  const at::Tensor k = x.k.repeat_interleave(2, 1), v = x.v.repeat_interleave(2, 1);
  const at::Tensor visible =
      call.key_mask.unsqueeze(1).unsqueeze(1).logical_and(at::ones({37, 37}, at::kBool).tril());
  const at::Tensor expected =
      at::matmul(plain::visible_softmax(visible, at::matmul(x.q, k.transpose(-1, -2)) / 4.0), v);
  expect_close(o, expected, 1e-13, "o");
  const at::Tensor g = at::randn_like(o);
  const auto found = torch::autograd::grad({o}, {x.q, x.k, x.v}, {g});
  const auto wanted = torch::autograd::grad({expected}, {x.q, x.k, x.v}, {g});
  for (std::size_t i = 0; i < 3; ++i) expect_close(found[i], wanted[i], 1e-13, "gradient");
}

// Autocast of the CPU, as long as the object lives.
struct Autocast {
  explicit Autocast(at::ScalarType type) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, type);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
};

TEST(Attention, AutocastTakesQueriesKeysAndValuesInItsType) {
  const Qkv x = random_qkv(64, 64, at::kFloat);
  AttentionCall call;
  call.alpha = at::full({4}, 1.25).requires_grad_();
  call.beta = at::full({2}, 1.25);
  const at::Tensor expected =
      attention(x.q.to(at::kBFloat16), x.k.to(at::kBFloat16), x.v.to(at::kBFloat16), call);
  at::Tensor o;
  {
    const Autocast autocast(at::kBFloat16);
    o = attention(x.q, x.k, x.v, call);
    const Qkv wide = random_qkv();
    AttentionCall none;
    none.matching = "none";
    EXPECT_EQ(attention(wide.q, wide.k, wide.v, none).scalar_type(), at::kDouble);
  }
  EXPECT_EQ(o.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(o, expected));
  const auto gradients = torch::autograd::grad({o}, {x.q, call.alpha}, {at::ones_like(o)});
  EXPECT_EQ(gradients[0].scalar_type(), at::kFloat);
  EXPECT_EQ(gradients[1].scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace lln_torch
