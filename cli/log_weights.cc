// Columns of P by the library, and their moments.
// SPDX-License-Identifier: Apache-2.0
#include "log_weights.h"

#include <algorithm>
#include <cmath>

#include "tasks.h"

namespace lln::cli {
namespace {

constexpr std::int64_t kMostKeys = 256;  // channels of v, hence columns of P in one call

}  // namespace

LogWeights::LogWeights(std::int64_t matrices, std::int64_t tokens)
    : identity_(static_cast<std::size_t>(tokens * std::min(tokens, kMostKeys))),
      p_(static_cast<std::size_t>(matrices) * identity_.size()) {}

std::vector<Moments> LogWeights::moments(AttentionInputs in, Kind kind, Parallel& parallel) {
  const std::int64_t sequences = in.q.shape[0], tokens = in.q.shape[2];
  std::vector<Moments> total(static_cast<std::size_t>(sequences));
  for (std::int64_t key = 0; key < tokens; key += kMostKeys) {
    const std::int64_t count = std::min(kMostKeys, tokens - key);
    std::fill(identity_.begin(), identity_.end(), 0.0F);
    for (std::int64_t c = 0; c < count; ++c) {
      identity_[static_cast<std::size_t>((key + c) * count + c)] = 1;
    }
    const Shape columns = {sequences, 1, tokens, count};
    in.v = view(static_cast<const void*>(identity_.data()), DType::f32, columns, {0, 0, count, 1});
    attention_forward(in, {.o = view(p_.data(), columns)}, {.kind = kind}, {.parallel = &parallel});
    for_each_task(parallel, sequences, [&](std::int64_t i) {
      float* const p = p_.data() + i * tokens * count;
      std::transform(p, p + tokens * count, p, [](float x) { return std::log(x); });
    });
    const std::vector<Moments> part = sequence_moments(view(p_.data(), columns), parallel);
    for (std::size_t i = 0; i < total.size(); ++i) total[i] = merge(total[i], part[i]);
  }
  return total;
}

std::vector<Moments> sequence_moments(const ConstView& x, Parallel& parallel) {
  std::vector<Moments> out(static_cast<std::size_t>(x.shape[0]));
  head_moments({.x = x}, out, {.parallel = &parallel});
  return out;
}

}  // namespace lln::cli
