// Validation of moments and of matching. Nothing is computed or written before all rules hold.
// SPDX-License-Identifier: Apache-2.0
#include "api/moments_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "api/faults.h"
#include "api/validate.h"
#include "cuda/host.h"
#include "lln/error.h"

namespace lln {
namespace {

// A row takes at most the threads of a block.
constexpr std::int64_t kMostDeviceChannels = 256;

bool takes_constants(Matching mode) { return mode == Matching::per_head || mode == Matching::ema; }

std::int64_t sequences_of(const IndexView& cu, std::int64_t batch) {
  return cu.given() ? std::max<std::int64_t>(cu.count - 1, 0) : batch;
}

TokenSpan trimmed(TokenSpan span) {
  if (span.mask == nullptr) return span;
  const auto counts = [&](std::int64_t row) { return span.mask[row * span.mask_stride] != 0; };
  while (span.begin < span.end && !counts(span.begin)) ++span.begin;
  while (span.begin < span.end && !counts(span.end - 1)) --span.end;
  return span;
}

std::vector<TokenSpan> token_spans(const ConstView& x, const IndexView& lengths,
                                   const MaskView& mask, const IndexView& cu) {
  std::vector<TokenSpan> spans;
  const std::int64_t sequences = sequences_of(cu, x.shape[0]);
  for (std::int64_t s = 0; s < sequences; ++s) {
    TokenSpan span;
    if (cu.given()) {
      span.begin = cu[s];
      span.end = cu[s + 1];
    } else {
      span.batch = s;
      span.end = lengths.given() ? lengths[s] : x.shape[2];
    }
    if (mask.given()) {
      span.mask = mask.data + s * mask.stride[0];
      span.mask_stride = mask.stride[1];
    }
    spans.push_back(trimmed(span));
  }
  return spans;
}

// What kernels on a device do not take, in a call that is right.
void expect_device_takes(const char* call, Device device, DType dtype, std::int64_t channels) {
  if (device.kind == DeviceKind::cpu) return;
  std::string refusal = cuda::device_refusal(device.index);
  if (refusal.empty() && dtype == DType::f64) refusal = "f64 is taken on the CPU alone";
  if (refusal.empty() && channels > kMostDeviceChannels) {
    refusal =
        fmt::format("{} channels, at most {} are taken on a device", channels, kMostDeviceChannels);
  }
  if (refusal.empty()) return;
  throw Error(ErrorCode::unsupported,
              fmt::format("{}: no moments of tensors on {}: {}", call, to_string(device), refusal));
}

// What a mode asks of the attention that it is for, and the constants of its line.
void check_rule(const MatchingOptions& options, Faults& faults) {
  const char* mode = to_string(options.mode);
  if (options.causal && reads_sequence(options.mode)) {
    faults.add(fmt::format(
        "mode {} reads the whole sequence, so a causal row would depend on its future: use ema, "
        "none, or frozen with alpha and beta calibrated before",
        mode));
  }
  if (options.feature != Feature::exp &&
      (reads_sequence(options.mode) || options.mode == Matching::ema)) {
    faults.add(fmt::format(
        "mode {} matches the exponential feature map, found {}: use none, or frozen with alpha "
        "and beta",
        mode, to_string(options.feature)));
  }
  if (!options.constants) return;
  if (!takes_constants(options.mode)) {
    faults.add(fmt::format("constants are given but mode {} does not use them", mode));
  } else if (!(options.constants->a > 0) || !std::isfinite(options.constants->a) ||
             !std::isfinite(options.constants->b)) {
    faults.add(fmt::format("constants are a = {}, b = {}: expected finite ones with a > 0",
                           options.constants->a, options.constants->b));
  }
}

void check_decay(double decay, Faults& faults) {
  if (decay >= 0 && decay < 1) return;
  faults.add(fmt::format("the decay of running moments is {}: expected 0 to below 1", decay));
}

void check_running_heads(const RunningMoments& running, std::int64_t heads_k, Faults& faults) {
  const auto heads = static_cast<std::size_t>(heads_k);
  const bool before_first_step = running.q.empty() && running.k.empty();
  if (!before_first_step && (running.q.size() != heads || running.k.size() != heads)) {
    faults.add(
        fmt::format("running moments have {} heads of q and {} of k: expected one per key head, {}",
                    running.q.size(), running.k.size(), heads));
  }
  check_decay(running.decay, faults);
}

// The sizes of joined moments as those of a problem.
Problem check_joined(const JoinedMoments& moments, Faults& faults) {
  Problem p;
  p.heads = moments.heads;
  p.heads_k = moments.heads_k;
  p.dim = p.dim_v = moments.dim;
  if (p.dim < 1 || p.heads < 1 || p.heads_k < 1 || p.heads % p.heads_k != 0) {
    faults.add(
        fmt::format("dim is {}, heads {}, heads_k {}: expected all positive, and heads a "
                    "multiple of heads_k",
                    p.dim, p.heads, p.heads_k));
    return p;
  }
  const auto q = static_cast<std::int64_t>(moments.q.size());
  const auto k = static_cast<std::int64_t>(moments.k.size());
  p.batch = p.sequences = k / p.heads_k;
  if (k != p.sequences * p.heads_k || q != p.sequences * p.heads) {
    faults.add(fmt::format("{} moments of q and {} of k: expected {} and {} for each sequence", q,
                           k, p.heads, p.heads_k));
  }
  return p;
}

class MatchingChecker {
 public:
  explicit MatchingChecker(const MatchingInputs& in) : in_(in) {
    Problem& p = problem_;
    p.dtype = in.q.dtype;
    p.device = in.q.device;
    p.batch = in.q.shape[0];
    p.heads = in.q.shape[1];
    p.tokens = in.q.shape[2];
    p.dim = p.dim_v = in.q.shape[3];
    p.heads_k = in.k.shape[1];
    p.tokens_k = in.k.shape[2];
    p.masked = in.key_lengths.given() || in.key_mask.given();
    p.packed = in.cu_seqlens_q.given() || in.cu_seqlens_k.given();
    p.sequences = p.packed ? sequences_of(in.cu_seqlens_q, 0) : p.batch;
  }

  void check_tensors() {
    const Problem& p = problem_;
    faults.input("q", in_.q, in_.q.shape, p.dtype, p.device);
    faults.input("k", in_.k, {p.batch, p.heads_k, p.tokens_k, p.dim}, p.dtype, p.device);
    for (std::string& text : problem_faults(p)) faults.add(std::move(text));
    if (in_.key_lengths.given() && in_.key_mask.given()) {
      faults.add("key_lengths and key_mask are both given: give one");
    }
    if (in_.key_lengths.given()) {
      faults.lengths("key_lengths", in_.key_lengths, p.batch, p.tokens_k, p.device);
    }
    if (in_.key_mask.given()) {
      faults.mask("key_mask", in_.key_mask, p.batch, p.tokens_k, p.device);
    }
    if (in_.query_mask.given()) {
      faults.mask("query_mask", in_.query_mask, p.batch, p.tokens, p.device);
    }
    if (p.packed) check_packing();
  }

  void check_mode(const MatchingOptions& options) {
    check_rule(options, faults);
    check_frozen(options.mode);
    check_running(options);
  }

  void check_outputs(const MatchingOutputs& out) {
    const Problem& p = problem_;
    faults.output("alpha (output)", out.alpha, {p.sequences, p.heads, 1, 1}, parameter_type(),
                  p.device);
    faults.output("beta (output)", out.beta, {p.sequences, p.heads_k, 1, 1}, parameter_type(),
                  p.device);
  }

  void check_running_sizes(const RunningMoments& running) {
    check_running_heads(running, problem_.heads_k, faults);
    if (on_device()) {
      faults.add(
          fmt::format("running moments are in host memory and the tensors on {}: give "
                      "running_on_device, which nothing has to wait for",
                      to_string(problem_.device)));
    }
  }

  void check_running_view(const DeviceRunningMoments& running) {
    const Shape shape{1, 2, problem_.heads_k, 3};
    faults.output("running_on_device", running.heads, shape, DType::f64, problem_.device);
    if (running.heads.shape == shape && running.heads.stride != contiguous_stride(shape)) {
      faults.add("running_on_device is not contiguous");
    }
    check_decay(running.decay, faults);
    if (!on_device()) {
      faults.add(fmt::format("running_on_device is given with tensors on {}: give running",
                             to_string(problem_.device)));
    }
  }

  CheckedMatching finish(const char* call, const std::string& subject) const {
    faults.throw_any(call, subject + to_string(problem_));
    expect_device_takes(call, problem_.device, problem_.dtype, problem_.dim);
    const bool self = !in_.cross && problem_.tokens == problem_.tokens_k && !in_.query_mask.given();
    if (on_device()) return {problem_, self, {}, {}};
    const IndexView& cu_k = in_.cu_seqlens_k.given() ? in_.cu_seqlens_k : in_.cu_seqlens_q;
    return {problem_, self,
            token_spans(in_.q, self ? in_.key_lengths : IndexView(),
                        self ? in_.key_mask : in_.query_mask, in_.cu_seqlens_q),
            token_spans(in_.k, in_.key_lengths, in_.key_mask, cu_k)};
  }

  Faults faults;

 private:
  DType parameter_type() const { return problem_.dtype == DType::f64 ? DType::f64 : DType::f32; }
  bool on_device() const { return problem_.device.kind != DeviceKind::cpu; }

  void check_frozen(Matching mode) {
    const std::tuple<const char*, const ConstView&, std::int64_t> parameters[] = {
        {"alpha", in_.alpha, problem_.heads}, {"beta", in_.beta, problem_.heads_k}};
    for (const auto& [name, view, heads] : parameters) {
      if (mode != Matching::frozen) {
        if (view.given()) {
          faults.add(fmt::format("{} is given, which mode {} sets itself: use frozen", name,
                                 to_string(mode)));
        }
      } else if (!view.given()) {
        faults.add(fmt::format("{} is not given: mode frozen needs it", name));
      } else {
        faults.parameter(name, view, problem_.sequences, heads, parameter_type(), problem_.device);
      }
    }
  }

  void check_running(const MatchingOptions& options) {
    const bool host = options.running != nullptr, device = options.running_on_device != nullptr;
    if (options.mode != Matching::ema) {
      if (host || device) {
        faults.add(fmt::format("running moments are given but mode {} does not use them",
                               to_string(options.mode)));
      }
      return;
    }
    if (!host && !device) faults.add("running moments are not given: mode ema needs them");
    if (host && device) faults.add("running and running_on_device are both given: give one");
    if (host) check_running_sizes(*options.running);
    if (device) check_running_view(*options.running_on_device);
  }

  void check_packing() {
    if (in_.query_mask.given()) faults.add("packed sequences take no query mask");
    if (!in_.cu_seqlens_q.given()) {
      faults.add("cu_seqlens_k is given without cu_seqlens_q");
      return;
    }
    faults.cumulative("cu_seqlens_q", in_.cu_seqlens_q, problem_.tokens, problem_.device);
    const IndexView& k = in_.cu_seqlens_k;
    if (!k.given()) {
      if (problem_.tokens != problem_.tokens_k) {
        faults.add(
            fmt::format("cu_seqlens_k is needed where q and k have different tokens: {} and {}",
                        problem_.tokens, problem_.tokens_k));
      }
      return;
    }
    faults.cumulative("cu_seqlens_k", k, problem_.tokens_k, problem_.device);
    if (k.count != in_.cu_seqlens_q.count) {
      faults.add(fmt::format("cu_seqlens_q has {} entries and cu_seqlens_k {}: expected as many",
                             in_.cu_seqlens_q.count, k.count));
    }
  }

  const MatchingInputs& in_;
  Problem problem_;
};

}  // namespace

bool reads_sequence(Matching mode) noexcept {
  return mode == Matching::paper || mode == Matching::per_head || mode == Matching::exact ||
         mode == Matching::entropy;
}

std::vector<TokenSpan> check_moments(const MomentsInputs& in, std::size_t outputs) {
  Faults faults;
  const Shape& shape = in.x.shape;
  faults.tensor("x", in.x, shape, in.x.dtype, in.x.device);
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; })) {
    faults.add("sizes must not be negative");
  }
  if (in.lengths.given() && in.mask.given())
    faults.add("lengths and mask are both given: give one");
  if (in.lengths.given()) faults.lengths("lengths", in.lengths, shape[0], shape[2], in.x.device);
  if (in.mask.given()) faults.mask("mask", in.mask, shape[0], shape[2], in.x.device);
  if (in.cu_seqlens.given()) {
    faults.cumulative("cu_seqlens", in.cu_seqlens, shape[2], in.x.device);
    if (shape[0] != 1) {
      faults.add(fmt::format("packed sequences need batch 1: batch {}", shape[0]));
    }
    if (in.lengths.given() || in.mask.given()) {
      faults.add("packed sequences take no mask and no lengths");
    }
  }
  const std::int64_t expected = sequences_of(in.cu_seqlens, shape[0]) * shape[1];
  if (static_cast<std::int64_t>(outputs) != expected) {
    faults.add(fmt::format("out has {} entries: expected one per sequence and head, {}", outputs,
                           expected));
  }
  faults.throw_any("head_moments", to_string(shape));
  expect_device_takes("head_moments", in.x.device, in.x.dtype, shape[3]);
  if (in.x.device.kind != DeviceKind::cpu) return {};
  return token_spans(in.x, in.lengths, in.mask, in.cu_seqlens);
}

CheckedMatching check_matching(const MatchingInputs& in, const MatchingOutputs& out,
                               const MatchingOptions& options) {
  MatchingChecker checker(in);
  checker.check_tensors();
  checker.check_mode(options);
  checker.check_outputs(out);
  return checker.finish("match_moments", fmt::format("mode {} for ", to_string(options.mode)));
}

CheckedMatching check_update(const RunningMoments& running, const MatchingInputs& in) {
  MatchingChecker checker(in);
  checker.check_tensors();
  checker.check_running_sizes(running);
  return checker.finish("update_moments", "");
}

Problem check_matching(const JoinedMoments& moments, const MatchingOutputs& out,
                       const MatchingOptions& options) {
  Faults faults;
  const Problem p = check_joined(moments, faults);
  check_rule(options, faults);
  if (options.mode != Matching::none && !reads_sequence(options.mode)) {
    faults.add(
        fmt::format("mode {} takes no moments of the call: expected none, paper, per_head, "
                    "exact or entropy",
                    to_string(options.mode)));
  }
  faults.output("alpha (output)", out.alpha, {p.sequences, p.heads, 1, 1}, out.alpha.dtype,
                p.device);
  faults.output("beta (output)", out.beta, {p.sequences, p.heads_k, 1, 1}, out.alpha.dtype,
                p.device);
  if (out.alpha.dtype != DType::f32 && out.alpha.dtype != DType::f64) {
    faults.add(
        fmt::format("alpha (output) is {}: expected f32 or f64", to_string(out.alpha.dtype)));
  }
  faults.throw_any("match_moments",
                   fmt::format("mode {} for joined moments", to_string(options.mode)));
  return p;
}

void check_update(const RunningMoments& running, const JoinedMoments& moments) {
  Faults faults;
  check_joined(moments, faults);
  check_running_heads(running, moments.heads_k, faults);
  faults.throw_any("update_moments", "joined moments");
}

CheckedMatching check_update(const DeviceRunningMoments& running, const MatchingInputs& in) {
  MatchingChecker checker(in);
  checker.check_tensors();
  checker.check_running_view(running);
  return checker.finish("update_moments", "");
}

CheckedMatching check_calibration(const MatchingInputs& in, Matching mode) {
  MatchingChecker checker(in);
  checker.check_tensors();
  if (reads_sequence(mode)) {
    checker.check_mode({.mode = mode});
  } else {
    checker.faults.add(fmt::format(
        "mode {} finds no scales: expected paper, per_head, exact or entropy", to_string(mode)));
  }
  return checker.finish("calibrate", fmt::format("mode {} for ", to_string(mode)));
}

CheckedMatching check_workspace_inputs(const MatchingInputs& in) {
  MatchingChecker checker(in);
  checker.check_tensors();
  return checker.finish("matching_workspace_bytes", "");
}

}  // namespace lln
