// Passes over q and k, cut into tasks by the length of a sequence alone.
// SPDX-License-Identifier: Apache-2.0
#include "api/head_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "api/kernel.h"
#include "api/moments_device.h"
#include "cpu/moments.h"
#include "lln/error.h"
#include "math/moments.h"

namespace lln {
namespace {

// Tokens of one task. The cut depends on the length alone, so that sums are joined in the same
// order whatever the threads and the neighbours. 1024 tokens of 64 channels take tens of
// microseconds, a hundred times what a task costs to start.
constexpr std::int64_t kSegmentTokens = 1024;

void expect_finite(const char* call, const char* name, std::span<const Moments> moments,
                   std::int64_t heads) {
  for (std::size_t i = 0; i < moments.size(); ++i) {
    if (std::isfinite(moments[i].mean) && std::isfinite(moments[i].m2)) continue;
    const auto index = static_cast<std::int64_t>(i);
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: {} holds an infinity or NaN in a token that counts: sequence {}, "
                            "head {}",
                            call, name, index / heads, index % heads));
  }
}

void sum_on_device(const MatchingInputs& in, bool self, std::span<Moments> q, std::span<Moments> k,
                   const Exec& exec) {
  const IndexView& cu_k = in.cu_seqlens_k.given() ? in.cu_seqlens_k : in.cu_seqlens_q;
  sum_heads_on_device({.x = in.q,
                       .lengths = self ? in.key_lengths : IndexView(),
                       .mask = self ? in.key_mask : in.query_mask,
                       .cu_seqlens = in.cu_seqlens_q},
                      q, exec);
  sum_heads_on_device(
      {.x = in.k, .lengths = in.key_lengths, .mask = in.key_mask, .cu_seqlens = cu_k}, k, exec);
}

}  // namespace

void sum_heads(const ConstView& x, std::span<const TokenSpan> spans, std::span<Moments> out,
               Parallel* parallel) {
  struct Segment {
    std::size_t span;
    std::int64_t begin, end;
  };
  std::vector<Segment> segments;
  for (std::size_t s = 0; s < spans.size(); ++s) {
    for (std::int64_t begin = spans[s].begin; begin < spans[s].end; begin += kSegmentTokens) {
      segments.push_back({s, begin, std::min(begin + kSegmentTokens, spans[s].end)});
    }
  }
  const std::int64_t heads = x.shape[1];
  const auto count = static_cast<std::int64_t>(segments.size());
  std::vector<Moments> parts(static_cast<std::size_t>(heads * count));
  parallel_for(parallel, heads * count, [&](std::int64_t task, int) {
    const Segment& segment = segments[static_cast<std::size_t>(task % count)];
    const TokenSpan& span = spans[segment.span];
    parts[static_cast<std::size_t>(task)] =
        cpu::sum_moments(cpu::rows_of(x, span.batch, task / count, 0), segment.begin, segment.end,
                         span.mask, span.mask_stride);
  });
  std::fill(out.begin(), out.end(), Moments());
  for (std::size_t task = 0; task < parts.size(); ++task) {
    const std::size_t head = task / segments.size();
    Moments& total =
        out[segments[task % segments.size()].span * static_cast<std::size_t>(heads) + head];
    total = merged(total, parts[task]);
  }
}

HeadPairs pair_heads(const char* call, std::span<const Moments> q, std::span<const Moments> k,
                     std::int64_t heads, std::int64_t heads_k) {
  expect_finite(call, "q", q, heads);
  expect_finite(call, "k", k, heads_k);
  HeadPairs pairs;
  pairs.k.assign(k.begin(), k.end());
  pairs.q.resize(pairs.k.size());
  const auto group = static_cast<std::size_t>(heads / heads_k);
  for (std::size_t i = 0; i < q.size(); ++i) {
    Moments& total = pairs.q[i / group];
    total = merged(total, q[i]);
  }
  return pairs;
}

HeadPairs sum_pairs(const char* call, const MatchingInputs& in, const CheckedMatching& checked,
                    const Exec& exec) {
  const Problem& p = checked.problem;
  std::vector<Moments> q(static_cast<std::size_t>(p.sequences * p.heads));
  std::vector<Moments> k(static_cast<std::size_t>(p.sequences * p.heads_k));
  if (p.device.kind == DeviceKind::cpu) {
    sum_heads(in.q, checked.q, q, exec.parallel);
    sum_heads(in.k, checked.k, k, exec.parallel);
  } else {
    sum_on_device(in, checked.self, q, k, exec);
  }
  return pair_heads(call, q, k, p.heads, p.heads_k);
}

}  // namespace lln
