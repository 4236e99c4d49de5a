// Making the data of a case. Numbers come from a hash of their position, so that they depend
// neither on the layout nor on the order in which they are written.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/data.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "math/half.h"
#include "math/random.h"

namespace lln::conformance {
namespace {

enum Seed : std::uint64_t { kQ = 1, kK, kV, kG, kAlpha, kBeta, kMix, kLln, kDiag, kMask, kState };

double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 65504;
    case DType::bf16:
      return f32_from_bf16(0x7F7F);
    case DType::f32:
    case DType::f64:
      break;
  }
  return std::numeric_limits<float>::max();
}

// Element number `index` of the tensor with this seed, before rounding.
double styled_number(const Case& c, Seed seed, std::uint64_t index) {
  const double x = normal_number(seed, index);
  switch (c.style) {
    case InputStyle::normal:
    case InputStyle::spike:
      return x;
    case InputStyle::large_keys:
      return seed == kK ? 1e4 * x : x;
    case InputStyle::constant_rows:
      return seed == kQ ? 0.75 : seed == kK ? -0.375 : x;
    case InputStyle::large_values:
      if (seed != kV) return x;
      return largest_finite(c.problem.dtype) * 0.9 * (2 * uniform_number(seed, index) - 1);
    case InputStyle::high_values:
      return seed == kV ? 0x1p60 * (2 * uniform_number(seed, index) - 1) : x;
    case InputStyle::far_below:
      return seed == kQ || seed == kK ? x - 8 : x;
    case InputStyle::denormal:
      return x * (c.problem.dtype == DType::f16 ? 1e-6 : 1e-40);
  }
  return x;
}

void fill(const Case& c, Seed seed, Tensor& tensor) {
  std::uint64_t index = 0;
  tensor.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t ch) {
    tensor.set(b, h, n, ch, round_to(c.problem.dtype, styled_number(c, seed, index++)));
  });
}

Tensor parameter(DType dtype, const Shape& shape, Seed seed, double middle, double spread) {
  Tensor tensor(dtype, shape);
  std::uint64_t index = 0;
  tensor.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t ch) {
    const double x = middle + spread * (2 * uniform_number(seed, index++) - 1);
    tensor.set(b, h, n, ch, static_cast<float>(x));
  });
  return tensor;
}

Shape weight_shape(const Case& c) {
  const Problem& p = c.problem;
  switch (c.weights) {
    case WeightForm::constant:
    case WeightForm::call:
      break;
    case WeightForm::head:
      return {1, p.heads, 1, 1};
    case WeightForm::channel:
      return {1, p.heads, 1, p.dim_v};
    case WeightForm::token:
      return {p.batch, p.heads, p.tokens, 1};
  }
  return {1, 1, 1, 1};
}

Shape parameter_shape(const Case& c, std::int64_t heads) {
  switch (c.parameters) {
    case ParameterForm::one:
      break;
    case ParameterForm::head:
      return {1, heads, 1, 1};
    case ParameterForm::sequence:
      return {c.problem.sequences, heads, 1, 1};
  }
  return {1, 1, 1, 1};
}

// The state of keys elsewhere and the gradient of the state of all keys. No such keys are in every
// third sequence from the second on, nor in every third channel of every third sequence, where
// values hold NaN. Keys far above or below the others are there, too, in cases that have such.
void make_states(const Case& c, DType dtype, Inputs& in) {
  const Problem& p = c.problem;
  in.state_lse = Tensor(dtype, {p.sequences, p.heads_k, 1, p.dim}, c.layout);
  in.state_values = Tensor(dtype, {p.sequences, p.heads_k, p.dim, p.dim_v}, c.layout);
  in.dsaved_lse = Tensor(dtype, in.state_lse.shape(), c.layout);
  in.dsaved_values = Tensor(dtype, in.state_values.shape(), c.layout);
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::uint64_t seed = kState;
  for (Tensor* tensor : {&in.state_lse, &in.state_values, &in.dsaved_lse, &in.dsaved_values}) {
    const bool exponent = tensor == &in.state_lse;
    const bool of_state = exponent || tensor == &in.state_values;
    std::uint64_t index = 0;
    tensor->for_each([&](std::int64_t s, std::int64_t h, std::int64_t n, std::int64_t ch) {
      double x = normal_number(seed, index++);
      if (exponent) x = c.style == InputStyle::large_keys ? 1e4 * x : 3 + x;
      const std::int64_t channel = exponent ? ch : n;
      if (of_state && (s % 3 == 1 || (s % 3 == 2 && channel % 3 == 1))) {
        x = exponent ? -infinity : nan;
      }
      tensor->set(s, h, n, ch, static_cast<float>(x));
    });
    ++seed;
  }
}

bool key_valid(const Case& c, std::int64_t batch, std::int64_t key) {
  const std::int64_t tokens = c.problem.tokens_k;
  switch (c.keys) {
    case KeyPattern::all:
      break;
    case KeyPattern::lengths:
      return key <
             tokens * (c.problem.batch - 1 - batch) / std::max<std::int64_t>(c.problem.batch, 1);
    case KeyPattern::left_padding:
      return key >= tokens * (batch + 1) / (c.problem.batch + 2);
    case KeyPattern::holes: {
      if (batch == 1) return false;
      const auto index = static_cast<std::uint64_t>(batch * tokens + key);
      return key != tokens - 1 && key != 0 && uniform_number(kMask, index) < 0.6;
    }
  }
  return true;
}

// Before the sequence and inside of it, before it by more than its length, behind it, at its first
// token.
std::int64_t block_origin(std::int64_t s, std::int64_t tokens) {
  constexpr double kPlaces[] = {-0.4, 0.3, -3.1, 1.2, 0};
  return std::llround(kPlaces[s % 5] * static_cast<double>(tokens));
}

void make_sequences(const Case& c, Inputs& in) {
  const Problem& p = c.problem;
  in.sequences.resize(static_cast<std::size_t>(p.sequences));
  if (p.packed) {
    in.cu_seqlens_q.push_back(0);
    in.cu_seqlens_k.push_back(0);
  }
  for (std::int64_t s = 0; s < p.sequences; ++s) {
    SequenceRows& rows = in.sequences[static_cast<std::size_t>(s)];
    if (p.packed) {
      const auto at = static_cast<std::size_t>(s);
      rows.q_begin = in.cu_seqlens_q.back();
      rows.k_begin = in.cu_seqlens_k.back();
      rows.q_tokens = c.lengths.at(at);
      rows.k_tokens = c.lengths_k.empty() ? rows.q_tokens : c.lengths_k.at(at);
      in.cu_seqlens_q.push_back(rows.q_begin + rows.q_tokens);
      in.cu_seqlens_k.push_back(rows.k_begin + rows.k_tokens);
    } else {
      rows.batch = s;
      rows.q_tokens = p.tokens;
      rows.k_tokens = p.tokens_k;
    }
    rows.valid.resize(static_cast<std::size_t>(rows.k_tokens));
    for (std::int64_t j = 0; j < rows.k_tokens; ++j) {
      rows.valid[static_cast<std::size_t>(j)] = key_valid(c, s, j) ? 1 : 0;
    }
    rows.first_valid = std::find(rows.valid.begin(), rows.valid.end(), 1) - rows.valid.begin();
    rows.block_origin = p.block_origins ? block_origin(s, rows.k_tokens) : rows.first_valid;
    if (p.block_origins) in.block_origins.push_back(rows.block_origin);
    if (c.keys == KeyPattern::lengths) {
      in.key_lengths.push_back(
          static_cast<std::int32_t>(std::count(rows.valid.begin(), rows.valid.end(), 1)));
    } else if (c.keys != KeyPattern::all) {
      in.key_mask.insert(in.key_mask.end(), rows.valid.begin(), rows.valid.end());
    }
  }
}

// Adds the spike, and puts NaN where nothing may be read.
void mark_keys(const Case& c, Inputs& in) {
  const Problem& p = c.problem;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (std::size_t s = 0; s < in.sequences.size(); ++s) {
    const SequenceRows& rows = in.sequences[s];
    for (std::int64_t h = 0; h < p.heads_k; ++h) {
      if (c.style == InputStyle::spike && c.spike_at < rows.k_tokens) {
        double beta = 1;
        if (p.has_lln()) {
          const Shape& shape = in.beta.shape();
          beta = in.beta.get(shape[0] == 1 ? 0 : static_cast<std::int64_t>(s),
                             shape[1] == 1 ? 0 : h, 0, 0);
        }
        const std::int64_t row = rows.k_begin + c.spike_at;
        for (std::int64_t l = 0; l < (h % 2 == 0 ? p.dim : 1); ++l) {
          const double x = in.k.get(rows.batch, h, row, l) + 200 / beta;
          in.k.set(rows.batch, h, row, l, round_to(p.dtype, x));
        }
      }
      for (std::int64_t j = 0; j < rows.k_tokens; ++j) {
        if (rows.valid[static_cast<std::size_t>(j)] != 0) continue;
        for (std::int64_t l = 0; l < p.dim; ++l) in.k.set(rows.batch, h, rows.k_begin + j, l, nan);
        for (std::int64_t l = 0; l < p.dim_v; ++l)
          in.v.set(rows.batch, h, rows.k_begin + j, l, nan);
      }
    }
  }
}

}  // namespace

double normal_number(std::uint64_t seed, std::uint64_t index) {
  return lln::normal_number(seed, index);
}

AttentionInputs Inputs::views() const {
  AttentionInputs views;
  views.q = q.view();
  views.k = k.view();
  views.v = v.view();
  views.alpha = alpha.view();
  views.beta = beta.view();
  views.mix = mix.view();
  views.lln_weight = lln_weight.view();
  views.diag_weight = diag_weight.view();
  if (!key_lengths.empty()) views.key_lengths = IndexView(std::span(key_lengths));
  if (!key_mask.empty()) {
    const auto batch = static_cast<std::int64_t>(sequences.size());
    views.key_mask = mask_view(key_mask.data(), batch, k.shape()[2]);
  }
  if (!cu_seqlens_q.empty()) {
    views.cu_seqlens_q = IndexView(std::span(cu_seqlens_q));
    views.cu_seqlens_k = IndexView(std::span(cu_seqlens_k));
  }
  views.state = {state_lse.view(), state_values.view()};
  if (!block_origins.empty()) views.block_origins = IndexView(std::span(block_origins));
  return views;
}

Inputs make_inputs(const Case& c, DType dtype) {
  const Problem& p = c.problem;
  const DType small = dtype == DType::f64 ? DType::f64 : DType::f32;
  Inputs in;
  in.q = Tensor(dtype, {p.batch, p.heads, p.tokens, p.dim}, c.layout);
  in.k = Tensor(dtype, {p.batch, p.heads_k, p.tokens_k, p.dim}, c.layout);
  in.v = Tensor(dtype, {p.batch, p.heads_k, p.tokens_k, p.dim_v}, c.layout);
  in.g = Tensor(dtype, {p.batch, p.heads, p.tokens, p.dim_v}, c.layout);
  fill(c, kQ, in.q);
  fill(c, kK, in.k);
  fill(c, kV, in.v);
  fill(c, kG, in.g);
  if (p.has_lln()) {
    in.alpha = parameter(small, parameter_shape(c, p.heads), kAlpha, 1.2, 0.4);
    in.beta = parameter(small, parameter_shape(c, p.heads_k), kBeta, 1.2, 0.4);
  }
  if (p.kind == Kind::lln_diag && c.weights != WeightForm::constant) {
    if (c.two_weights) {
      in.lln_weight = parameter(small, weight_shape(c), kLln, 0.5, 0.4);
      in.diag_weight = parameter(small, weight_shape(c), kDiag, 0.5, 0.4);
    } else {
      in.mix = parameter(small, weight_shape(c), kMix, 0.5, 0.4);
    }
  }
  if (p.state) make_states(c, small, in);
  make_sequences(c, in);
  mark_keys(c, in);
  return in;
}

TensorSet make_outputs(const Case& c, const Inputs& in, DType dtype) {
  const Problem& p = c.problem;
  const DType small = dtype == DType::f64 ? DType::f64 : DType::f32;
  TensorSet outputs;
  if (p.op == Op::forward || p.op == Op::append) {
    outputs.add("o", Tensor(dtype, in.g.shape(), c.layout));
    if (c.saved) {
      const Layout layout = p.state ? c.layout : Layout::bhnd;
      outputs.add("key_lse", Tensor(small, {p.sequences, p.heads_k, 1, p.dim}, layout));
      outputs.add("channel_values",
                  Tensor(small, {p.sequences, p.heads_k, p.dim, p.dim_v}, layout));
    }
    return outputs;
  }
  outputs.add("dq", Tensor(dtype, in.q.shape(), c.layout));
  outputs.add("dk", Tensor(dtype, in.k.shape(), c.layout));
  outputs.add("dv", Tensor(dtype, in.v.shape(), c.layout));
  if (p.state) {
    outputs.add("dstate_lse", Tensor(small, in.state_lse.shape(), c.layout));
    outputs.add("dstate_values", Tensor(small, in.state_values.shape(), c.layout));
  }
  const auto like = [&](const char* name, const Tensor& input) {
    if (input.given()) outputs.add(name, Tensor(small, input.shape()));
  };
  if (c.parameter_gradients) {
    like("dalpha", in.alpha);
    like("dbeta", in.beta);
  }
  if (c.parameter_gradients || c.weight_gradients) {
    like("dmix", in.mix);
    like("dlln_weight", in.lln_weight);
    like("ddiag_weight", in.diag_weight);
  }
  return outputs;
}

AttentionOutputs forward_views(TensorSet& outputs) {
  return {outputs.view("o"), {outputs.view("key_lse"), outputs.view("channel_values")}};
}

AttentionGradients backward_views(TensorSet& outputs, const Inputs& in) {
  AttentionGradients grads;
  grads.g = in.g.view();
  grads.dq = outputs.view("dq");
  grads.dk = outputs.view("dk");
  grads.dv = outputs.view("dv");
  grads.dalpha = outputs.view("dalpha");
  grads.dbeta = outputs.view("dbeta");
  grads.dmix = outputs.view("dmix");
  grads.dlln_weight = outputs.view("dlln_weight");
  grads.ddiag_weight = outputs.view("ddiag_weight");
  grads.dsaved = {in.dsaved_lse.view(), in.dsaved_values.view()};
  grads.dstate = {outputs.view("dstate_lse"), outputs.view("dstate_values")};
  return grads;
}

}  // namespace lln::conformance
