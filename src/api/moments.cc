// Moments of q and k, and the modes that turn them into alpha and beta.
// SPDX-License-Identifier: Apache-2.0
#include "lln/moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "api/head_sums.h"
#include "api/kernel.h"
#include "api/matching_rule.h"
#include "api/memory_errors.h"
#include "api/moments_check.h"
#include "api/moments_device.h"
#include "lln/error.h"
#include "math/matching_rule.h"
#include "math/moments.h"

namespace lln {
namespace {

constexpr std::array kModes = {Matching::none,   Matching::paper, Matching::per_head,
                               Matching::frozen, Matching::ema,   Matching::exact,
                               Matching::entropy};

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
  ScaleWriter(const Problem& problem, const MatchingOutputs& out, const MatchingRule& rule,
              MatchingReport& report)
      : p_(problem), out_(out), rule_(rule), report_(report) {}

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

  // Where either has seen nothing, both scales are 1. `tokens` is the number of keys that count.
  MatchedScales match(std::int64_t s, std::int64_t head_k, bool seen, double variance_q,
                      double variance_k, double tokens) {
    if (!seen) return {};
    const MatchedScales scales = matched_scales(variance_q, variance_k, tokens, rule_);
    if (scales.clamped()) report_.clamped.push_back(clamped_head(s, head_k, scales));
    return scales;
  }

  MatchedScales match(std::int64_t s, std::int64_t head_k, const Moments& q, const Moments& k) {
    return match(s, head_k, q.count > 0 && k.count > 0, q.variance(), k.variance(),
                 k.count / static_cast<double>(p_.dim));
  }

 private:
  const Problem& p_;
  const MatchingOutputs& out_;
  const MatchingRule& rule_;
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
      scales = writer.match(-1, h, q.weight > 0 && k.weight > 0, q.variance, k.variance, 0);
    }
    for (std::int64_t s = 0; s < p.sequences; ++s) writer.write(s, h, scales.alpha, scales.beta);
  }
}

void write_matched(const Problem& p, const HeadPairs& pairs, Matching mode, ScaleWriter& writer) {
  if (mode == Matching::paper) {
    const MatchedScales scales = writer.match(-1, -1, pooled(pairs.q), pooled(pairs.k));
    writer.write_all(scales.alpha, scales.beta);
    return;
  }
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
  const MatchingRule rule = matching_rule(options, p.dim);
  MatchingReport report{.constants = rule.line};
  ScaleWriter writer(p, out, rule, report);
  switch (options.mode) {
    case Matching::none:
      writer.write_all(1, 1);
      break;
    case Matching::frozen:
      write_frozen(p, in, out);
      break;
    case Matching::paper:
    case Matching::per_head:
    case Matching::exact:
    case Matching::entropy:
      write_matched(p, sum_pairs("match_moments", in, checked, exec), options.mode, writer);
      break;
    case Matching::ema:
      write_running(p, *options.running, writer);
      break;
  }
  return report;
}

MatchingReport match(const JoinedMoments& moments, const MatchingOutputs& out,
                     const MatchingOptions& options) {
  const Problem p = check_matching(moments, out, options);
  const MatchingRule rule = matching_rule(options, p.dim);
  MatchingReport report{.constants = rule.line};
  ScaleWriter writer(p, out, rule, report);
  if (options.mode == Matching::none) {
    writer.write_all(1, 1);
  } else {
    write_matched(p,
                  pair_heads("match_moments", moments.q, moments.k, moments.heads, moments.heads_k),
                  options.mode, writer);
  }
  return report;
}

void update(RunningMoments& running, const HeadPairs& pairs, std::int64_t heads_k) {
  const auto heads = static_cast<std::size_t>(heads_k);
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
    case Matching::exact:
      return "exact";
    case Matching::entropy:
      return "entropy";
  }
  return "?";
}

Matching parse_matching(std::string_view text) {
  for (const Matching mode : kModes) {
    if (text == to_string(mode)) return mode;
  }
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("unknown matching '{}': expected none, paper, per_head, frozen, ema, exact or "
                  "entropy",
                  text));
}

MatchingConstants matching_constants(std::int64_t dim) noexcept { return fitted_constants(dim); }

MatchingReport match_moments(const MatchingInputs& in, const MatchingOutputs& out,
                             const MatchingOptions& options, const Exec& exec) {
  return memory_errors("match_moments", [&] { return match(in, out, options, exec); });
}

MatchingReport match_moments(const JoinedMoments& moments, const MatchingOutputs& out,
                             const MatchingOptions& options) {
  return memory_errors("match_moments", [&] { return match(moments, out, options); });
}

void update_moments(RunningMoments& running, const MatchingInputs& in, const Exec& exec) {
  memory_errors("update_moments", [&] {
    const CheckedMatching checked = check_update(running, in);
    update(running, sum_pairs("update_moments", in, checked, exec), checked.problem.heads_k);
  });
}

void update_moments(RunningMoments& running, const JoinedMoments& moments) {
  memory_errors("update_moments", [&] {
    check_update(running, moments);
    update(running,
           pair_heads("update_moments", moments.q, moments.k, moments.heads, moments.heads_k),
           moments.heads_k);
  });
}

}  // namespace lln
