// Moments of q and k, and the modes that turn them into alpha and beta.
// SPDX-License-Identifier: Apache-2.0
#include "lln/moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "api/kernel.h"
#include "api/memory_errors.h"
#include "api/moments_check.h"
#include "api/moments_device.h"
#include "cpu/moments.h"
#include "lln/error.h"
#include "math/moments.h"

namespace lln {
namespace {

constexpr std::array kModes = {Matching::none, Matching::paper, Matching::per_head,
                               Matching::frozen, Matching::ema};

// Tokens of one task. The cut depends on the length alone, so that sums are joined in the same
// order whatever the threads and the neighbours. 1024 tokens of 64 channels take tens of
// microseconds, a hundred times what a task costs to start.
constexpr std::int64_t kSegmentTokens = 1024;

// out[s * heads + h] for all spans and heads.
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

// Moments of q and k for every (sequence, key head).
struct HeadPairs {
  std::vector<Moments> q, k;
};

HeadPairs sum_pairs(const char* call, const MatchingInputs& in, const CheckedMatching& checked,
                    Parallel* parallel) {
  const Problem& p = checked.problem;
  const std::int64_t group = p.heads / p.heads_k;
  HeadPairs pairs;
  pairs.k.resize(static_cast<std::size_t>(p.sequences * p.heads_k));
  pairs.q.resize(pairs.k.size());
  std::vector<Moments> by_head(static_cast<std::size_t>(p.sequences * p.heads));
  sum_heads(in.q, checked.q, by_head, parallel);
  sum_heads(in.k, checked.k, pairs.k, parallel);
  expect_finite(call, "q", by_head, p.heads);
  expect_finite(call, "k", pairs.k, p.heads_k);
  for (std::size_t i = 0; i < by_head.size(); ++i) {
    Moments& total = pairs.q[i / static_cast<std::size_t>(group)];
    total = merged(total, by_head[i]);
  }
  return pairs;
}

Moments pooled(std::span<const Moments> moments) {
  Moments total;
  for (const Moments& m : moments) total = merged(total, m);
  return total;
}

void set(const View& v, std::int64_t s, std::int64_t h, double value) {
  const std::int64_t i = s * v.stride[0] + h * v.stride[1];
  if (v.dtype == DType::f64) {
    static_cast<double*>(v.data)[i] = value;
  } else {
    static_cast<float*>(v.data)[i] = static_cast<float>(value);
  }
}

// Writes alpha and beta of one key head, and of the query heads that share it, and notes limits.
class ScaleWriter {
 public:
  ScaleWriter(const Problem& problem, const MatchingOutputs& out, MatchingReport& report)
      : p_(problem), out_(out), report_(report) {}

  void write(std::int64_t s, std::int64_t head_k, double alpha, double beta) const {
    const std::int64_t group = p_.heads / p_.heads_k;
    for (std::int64_t h = head_k * group; h < (head_k + 1) * group; ++h)
      set(out_.alpha, s, h, alpha);
    set(out_.beta, s, head_k, beta);
  }

  void write_all(double alpha, double beta) const {
    for (std::int64_t s = 0; s < p_.sequences; ++s) {
      for (std::int64_t h = 0; h < p_.heads_k; ++h) write(s, h, alpha, beta);
    }
  }

  // Where either has seen nothing, both scales are 1.
  MatchedScales match(std::int64_t s, std::int64_t head_k, bool seen, double variance_q,
                      double variance_k) {
    if (!seen) return {};
    const MatchedScales scales = matched_scales(variance_q, variance_k, report_.constants);
    if (scales.sigma_q_clamped || scales.sigma_k_clamped || scales.target_clamped) {
      report_.clamped.push_back(
          {s, head_k, scales.sigma_q_clamped, scales.sigma_k_clamped, scales.target_clamped});
    }
    return scales;
  }

  MatchedScales match(std::int64_t s, std::int64_t head_k, const Moments& q, const Moments& k) {
    return match(s, head_k, q.count > 0 && k.count > 0, q.variance(), k.variance());
  }

 private:
  const Problem& p_;
  const MatchingOutputs& out_;
  MatchingReport& report_;
};

void write_frozen(const Problem& p, const MatchingInputs& in, const MatchingOutputs& out) {
  const auto broadcast = [](ConstView v) {
    for (int i = 0; i < 4; ++i) {
      if (v.shape[i] == 1) v.stride[i] = 0;
    }
    return v;
  };
  const ConstView alpha = broadcast(in.alpha), beta = broadcast(in.beta);
  for (std::int64_t s = 0; s < p.sequences; ++s) {
    for (std::int64_t h = 0; h < p.heads; ++h) set(out.alpha, s, h, element(alpha, s, h, 0, 0));
    for (std::int64_t h = 0; h < p.heads_k; ++h) set(out.beta, s, h, element(beta, s, h, 0, 0));
  }
}

void write_running(const Problem& p, const RunningMoments& running, ScaleWriter& writer) {
  for (std::int64_t h = 0; h < p.heads_k; ++h) {
    const auto at = static_cast<std::size_t>(h);
    MatchedScales scales;
    if (!running.q.empty()) {
      const RunningMoments::Head &q = running.q[at], &k = running.k[at];
      scales = writer.match(-1, h, q.weight > 0 && k.weight > 0, q.variance, k.variance);
    }
    for (std::int64_t s = 0; s < p.sequences; ++s) writer.write(s, h, scales.alpha, scales.beta);
  }
}

void write_per_head(const Problem& p, const HeadPairs& pairs, ScaleWriter& writer) {
  for (std::int64_t s = 0; s < p.sequences; ++s) {
    for (std::int64_t h = 0; h < p.heads_k; ++h) {
      const auto at = static_cast<std::size_t>(s * p.heads_k + h);
      const MatchedScales scales = writer.match(s, h, pairs.q[at], pairs.k[at]);
      writer.write(s, h, scales.alpha, scales.beta);
    }
  }
}

MatchingReport match(const MatchingInputs& in, const MatchingOutputs& out,
                     const MatchingOptions& options, const Exec& exec) {
  const CheckedMatching checked = check_matching(in, out, options);
  const Problem& p = checked.problem;
  if (p.device.kind != DeviceKind::cpu) return match_on_device(checked, in, out, options, exec);
  MatchingReport report;
  ScaleWriter writer(p, out, report);
  switch (options.mode) {
    case Matching::none:
      writer.write_all(1, 1);
      break;
    case Matching::frozen:
      write_frozen(p, in, out);
      break;
    case Matching::paper: {
      report.constants = kAuthorsConstants;
      const HeadPairs pairs = sum_pairs("match_moments", in, checked, exec.parallel);
      const MatchedScales scales = writer.match(-1, -1, pooled(pairs.q), pooled(pairs.k));
      writer.write_all(scales.alpha, scales.beta);
      break;
    }
    case Matching::per_head:
      report.constants = options.constants.value_or(matching_constants(p.dim));
      write_per_head(p, sum_pairs("match_moments", in, checked, exec.parallel), writer);
      break;
    case Matching::ema:
      report.constants = options.constants.value_or(matching_constants(p.dim));
      write_running(p, *options.running, writer);
      break;
  }
  return report;
}

void update(RunningMoments& running, const MatchingInputs& in, const Exec& exec) {
  const CheckedMatching checked = check_update(running, in);
  const HeadPairs pairs = sum_pairs("update_moments", in, checked, exec.parallel);
  const auto heads = static_cast<std::size_t>(checked.problem.heads_k);
  running.q.resize(heads);
  running.k.resize(heads);
  for (std::size_t h = 0; h < heads; ++h) {
    Moments q, k;
    for (std::size_t i = h; i < pairs.k.size(); i += heads) {
      q = merged(q, pairs.q[i]);
      k = merged(k, pairs.k[i]);
    }
    take_step(running.q[h], running.decay, q);
    take_step(running.k[h], running.decay, k);
  }
}

}  // namespace

Moments merge(const Moments& first, const Moments& second) noexcept {
  return merged(first, second);
}

void head_moments(const MomentsInputs& in, std::span<Moments> out, const Exec& exec) {
  memory_errors("head_moments", [&] {
    const std::vector<TokenSpan> spans = check_moments(in, out.size());
    if (in.x.device.kind != DeviceKind::cpu) return sum_heads_on_device(in, out, exec);
    sum_heads(in.x, spans, out, exec.parallel);
  });
}

const char* to_string(Matching mode) noexcept {
  switch (mode) {
    case Matching::none:
      return "none";
    case Matching::paper:
      return "paper";
    case Matching::per_head:
      return "per_head";
    case Matching::frozen:
      return "frozen";
    case Matching::ema:
      return "ema";
  }
  return "?";
}

Matching parse_matching(std::string_view text) {
  for (const Matching mode : kModes) {
    if (text == to_string(mode)) return mode;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("unknown matching '{}': expected none, paper, per_head, frozen or ema", text));
}

MatchingConstants matching_constants(std::int64_t dim) noexcept { return fitted_constants(dim); }

MatchingReport match_moments(const MatchingInputs& in, const MatchingOutputs& out,
                             const MatchingOptions& options, const Exec& exec) {
  return memory_errors("match_moments", [&] { return match(in, out, options, exec); });
}

void update_moments(RunningMoments& running, const MatchingInputs& in, const Exec& exec) {
  memory_errors("update_moments", [&] { update(running, in, exec); });
}

}  // namespace lln
