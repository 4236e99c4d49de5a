// The caller's memory as rows of channels: one head of one sequence.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/kernel.h"

namespace lln::cpu {

struct ConstRows {
  const std::byte* base = nullptr;
  std::int64_t stride = 0;  // bytes between rows
  std::int64_t width = 0;   // channels
  DType dtype = DType::f32;
  const std::byte* row(std::int64_t i) const { return base + i * stride; }
};

struct Rows {
  std::byte* base = nullptr;
  std::int64_t stride = 0;
  std::int64_t width = 0;
  DType dtype = DType::f32;
  std::byte* row(std::int64_t i) const { return base + i * stride; }
};

// The tokens of the rows of a tile: consecutive ones from `first` on, or those of a list.
struct Tokens {
  Tokens(std::int64_t from) : first(from) {}
  Tokens(const std::int64_t* of) : list(of) {}
  std::int64_t operator()(std::int64_t i) const { return list == nullptr ? first + i : list[i]; }
  std::int64_t first = 0;
  const std::int64_t* list = nullptr;
};

// Rows of `view` from token `begin` on.
inline ConstRows rows_of(const ConstView& view, std::int64_t batch, std::int64_t head,
                         std::int64_t begin) {
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t offset =
      batch * view.stride[0] + head * view.stride[1] + begin * view.stride[2];
  return {static_cast<const std::byte*>(view.data) + offset * size, view.stride[2] * size,
          view.shape[3], view.dtype};
}

inline Rows rows_of(const View& view, std::int64_t batch, std::int64_t head, std::int64_t begin) {
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t offset =
      batch * view.stride[0] + head * view.stride[1] + begin * view.stride[2];
  return {static_cast<std::byte*>(view.data) + offset * size, view.stride[2] * size, view.shape[3],
          view.dtype};
}

// The weight of one part in o = w1 * LLN + w2 * Diag: one number for a row, or (per_channel) one
// vector for a head.
class PartWeight {
 public:
  static PartWeight of_lln(const Call& call) { return {call, call.in.lln_weight, false}; }
  static PartWeight of_diag(const Call& call) { return {call, call.in.diag_weight, true}; }

  // A weight for each row. With one sequence of one token this is also the shape of a weight per
  // head, and both have the same gradient.
  static bool is_per_token(const Call& call, const Shape& shape) {
    const Problem& p = call.problem;
    return shape == Shape{p.batch, p.heads, p.tokens, 1};
  }

  bool per_channel() const { return per_channel_; }
  bool per_token() const { return per_token_; }
  float at(std::int64_t batch, std::int64_t head, std::int64_t token, std::int64_t c = 0) const {
    const float w =
        weight_.given() ? static_cast<float>(element(weight_, batch, head, token, c)) : constant_;
    return complement_ ? 1 - w : w;
  }

 private:
  PartWeight(const Call& call, const ConstView& own, bool is_diag) {
    if (call.problem.kind != Kind::lln_diag) return;  // the only part: weight 1
    constant_ = call.options.mix;
    weight_ = own.given() ? own : call.in.mix;
    complement_ = is_diag && !own.given();
    per_channel_ = weight_.given() && weight_.shape[3] > 1;
    per_token_ = weight_.given() && is_per_token(call, weight_.shape);
  }

  ConstView weight_;
  float constant_ = 1;
  bool complement_ = false;
  bool per_channel_ = false;
  bool per_token_ = false;
};

}  // namespace lln::cpu
