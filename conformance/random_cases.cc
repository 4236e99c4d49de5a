// How a case is drawn: what it computes, its shape, which tokens there are, then the form of its
// data. Sizes near those of tiles are frequent, and a case costs the reference a fraction of a
// second.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/random_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>

#include "conformance/case_table.h"
#include "math/random.h"

namespace lln::conformance {
namespace {

constexpr double kMostPairs = 2e7;  // of channels of rows and keys

class Draw {
 public:
  Draw(std::uint64_t seed, std::int64_t place) : seed_(mixed_bits(seed) ^ mixed_bits(~place)) {}

  bool chance(double share) { return uniform_number(seed_, next_++) < share; }
  std::int64_t from(std::int64_t least, std::int64_t most) {
    const double share = uniform_number(seed_, next_++);
    return least + static_cast<std::int64_t>(share * static_cast<double>(most - least + 1));
  }
  template <class T>
  const T& of(std::span<const T> list) {
    return list[static_cast<std::size_t>(from(0, static_cast<std::int64_t>(list.size()) - 1))];
  }
  template <class T, std::size_t N>
  const T& of(const std::array<T, N>& list) {
    return of(std::span<const T>(list));
  }

 private:
  std::uint64_t seed_, next_ = 0;
};

struct Shape {
  std::int64_t batch, heads, heads_k, tokens, tokens_k, dim, dim_v, block;
};

std::int64_t draw_dim(Draw& draw) {
  constexpr std::array kUsual = {16, 32, 64, 64, 64, 80, 96, 128, 128, 256};
  if (draw.chance(0.5)) return draw.of(kUsual);
  return draw.chance(0.5) ? 8 * draw.from(1, 20) : draw.from(1, 140);
}

// Around borders of tiles and of pieces, small, or any.
std::int64_t draw_tokens(Draw& draw) {
  constexpr std::array kBorders = {16, 32, 48, 64, 64, 96, 128, 192, 256, 512, 1024};
  if (draw.chance(0.5)) return std::max<std::int64_t>(0, draw.of(kBorders) + draw.from(-2, 2));
  return draw.chance(0.3) ? draw.from(0, 20) : draw.from(20, 600);
}

std::int64_t draw_block(Draw& draw) {
  constexpr std::array kUsual = {1, 8, 16, 16, 32, 48, 64, 64, 64, 100, 128, 256};
  return draw.chance(0.8) ? draw.of(kUsual) : draw.from(1, 700);
}

Shape draw_shape(Draw& draw, bool cross) {
  Shape s{};
  s.batch = draw.from(1, 3);
  s.heads_k = draw.from(1, 3);
  s.heads = s.heads_k * draw.of(std::array{1, 1, 2, 4});
  s.dim = draw_dim(draw);
  s.dim_v = draw.chance(0.5) ? s.dim : draw_dim(draw);
  s.block = draw_block(draw);
  s.tokens = draw_tokens(draw);
  s.tokens_k = cross ? draw_tokens(draw) : s.tokens;
  // What is too much is taken from the batch, the heads, then the tokens.
  const auto pairs = [&] {
    return static_cast<double>(s.batch * s.heads * (s.dim + s.dim_v)) *
           static_cast<double>(s.tokens * s.tokens_k);
  };
  if (pairs() > kMostPairs) s.batch = 1;
  if (pairs() > kMostPairs) {
    s.heads /= s.heads_k;
    s.heads_k = 1;
  }
  if (pairs() > kMostPairs) s.heads = 1;
  if (pairs() > kMostPairs) {
    const double share = std::sqrt(kMostPairs / pairs());
    s.tokens = static_cast<std::int64_t>(share * static_cast<double>(s.tokens));
    s.tokens_k = static_cast<std::int64_t>(share * static_cast<double>(s.tokens_k));
  }
  return s;
}

// So many tokens as sequences that follow each other, some of them empty.
std::vector<std::int64_t> draw_lengths(Draw& draw, std::int64_t tokens, std::int64_t count) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 1; i < count; ++i) {
    lengths.push_back(draw.chance(0.2) ? 0 : draw.from(0, tokens));
    tokens -= lengths.back();
  }
  lengths.push_back(tokens);
  std::rotate(lengths.begin(), lengths.begin() + draw.from(0, count - 1), lengths.end());
  return lengths;
}

std::string draw_kind(Draw& draw, const Shape& s, bool cross, bool softmax) {
  const bool causal = !cross && draw.chance(0.5);
  std::string kind = softmax ? "softmax" : "lln";
  if (!cross && !softmax && draw.chance(0.6)) {
    kind = fmt::format("{}diag{}", draw.chance(0.25) ? "" : "lln+", s.block);
  }
  return kind + (causal ? ":causal" : "");
}

// Keys with exponents far apart, where the map can hold them. Not rows that are all alike: all of
// them have the same rounding error then, of which the plain evaluation is one draw and no measure.
void draw_style(Draw& draw, const Problem& p, Case& c) {
  if (p.feature != Feature::exp || p.packed || p.tokens_k == 0 || draw.chance(0.8)) return;
  c.style = draw.chance(0.5) ? InputStyle::large_keys : InputStyle::spike;
  if (c.style == InputStyle::spike) c.spike_at = draw.from(0, p.tokens_k - 1);
}

void draw_form(Draw& draw, Case& c) {
  const Problem& p = c.problem;
  c.layout = draw.of(std::array{Layout::bhnd, Layout::bnhd, Layout::bnhd, Layout::gaps});
  c.parameters =
      draw.of(std::array{ParameterForm::one, ParameterForm::head, ParameterForm::sequence});
  c.saved = p.has_lln() && draw.chance(0.5);
  if (p.kind == Kind::lln_diag) {
    c.weights = draw.of(std::array{WeightForm::constant, WeightForm::constant, WeightForm::call,
                                   WeightForm::head, WeightForm::channel, WeightForm::token});
    c.two_weights = c.weights != WeightForm::constant && draw.chance(0.4);
  }
  c.parameter_gradients = draw.chance(0.2);
  c.weight_gradients =
      !c.parameter_gradients && c.weights != WeightForm::constant && draw.chance(0.3);
  draw_style(draw, p, c);
}

Case draw_case(Draw draw) {
  const bool softmax = draw.chance(0.05), cross = draw.chance(0.15);
  const Shape s = draw_shape(draw, cross);
  const char* const type = draw.of(std::array{"f32", "f32", "bf16", "bf16", "bf16", "f16"});
  Case c;
  std::string flags = draw_kind(draw, s, cross, softmax);
  std::string sizes =
      fmt::format("h{}k{}n{}m{}d{}v{}", s.heads, s.heads_k, s.tokens, s.tokens_k, s.dim, s.dim_v);
  if (draw.chance(0.2)) {
    const std::int64_t count = draw.from(1, 6);
    c.lengths = draw_lengths(draw, s.tokens, count);
    if (cross) c.lengths_k = draw_lengths(draw, s.tokens_k, count);
    sizes = "b1" + sizes;
    flags += fmt::format(":packed={}", count);
  } else {
    sizes = fmt::format("b{}", s.batch) + sizes;
    if (draw.chance(0.35)) {
      c.keys =
          draw.of(std::array{KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes});
      flags += ":masked";
    }
  }
  if (flags.starts_with("lln") && draw.chance(0.1)) flags += ":state";
  if (flags.starts_with("lln") && draw.chance(0.08)) {
    flags += fmt::format(":feature={}", draw.of(kFeatures));
  }
  const char* const op = draw.chance(0.5) ? "forward" : "backward";
  c.problem = parse_problem(fmt::format("{}:{}:cpu:{}:{}", op, type, sizes, flags));
  draw_form(draw, c);
  return c;
}

}  // namespace

std::vector<Case> random_cases(std::int64_t count, std::uint64_t seed) {
  std::vector<Case> cases;
  for (std::int64_t i = 0; i < count; ++i) cases.push_back(draw_case(Draw(seed, i)));
  return cases;
}

}  // namespace lln::conformance
