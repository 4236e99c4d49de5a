// Moments and matching of tensors on a device: scratch memory, and which kernels a mode takes.
// Nothing here waits but head_moments, whose numbers the host asked for.
// SPDX-License-Identifier: Apache-2.0
#include "api/moments_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "api/matching_rule.h"
#include "api/memory_errors.h"
#include "cuda/host.h"
#include "cuda/moments.h"
#include "lln/error.h"

namespace lln {
namespace {

// What the device is given, in memory of its own where the caller gives none; nothing is waited
// for.
class DeviceMatching {
 public:
  DeviceMatching(const char* name, const MatchingInputs& in, const CheckedMatching& checked,
                 const Exec& exec, bool needs_workspace)
      : current_(checked.problem.device.index) {
    cuda::throw_reported_faults(checked.problem.device.index);
    call_ = {checked.problem, in, checked.self, nullptr, exec.stream};
    if (!needs_workspace) return;
    const std::size_t needed = cuda::matching_workspace(checked.problem);
    if (exec.workspace.empty()) {
      owned_.emplace(needed, exec.stream);
      call_.workspace = owned_->data();
      if (call_.workspace == nullptr) {
        throw Error(ErrorCode::out_of_memory,
                    fmt::format("{}: no memory for a workspace of {} bytes", name, needed));
      }
      return;
    }
    call_.workspace = exec.workspace.data();
    const auto off = reinterpret_cast<std::uintptr_t>(call_.workspace) % 256;
    if (exec.workspace.size() < needed || off != 0) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{}: workspace of {} bytes, {} past a multiple of 256: expected {} "
                              "bytes at such a multiple",
                              name, exec.workspace.size(), off, needed));
    }
  }
  const cuda::MatchingCall& call() const { return call_; }

 private:
  cuda::CurrentDevice current_;
  std::optional<cuda::Scratch> owned_;
  cuda::MatchingCall call_;
};

}  // namespace

MatchingReport match_on_device(const CheckedMatching& checked, const MatchingInputs& in,
                               const MatchingOutputs& out, const MatchingOptions& options,
                               const Exec& exec) {
  const DeviceMatching device("match_moments", in, checked, exec, reads_sequence(options.mode));
  const MatchingRule rule = matching_rule(options, checked.problem.dim);
  switch (options.mode) {
    case Matching::none:
      cuda::match_none(device.call(), out);
      break;
    case Matching::frozen:
      cuda::match_frozen(device.call(), out);
      break;
    case Matching::paper:
      cuda::match_paper(device.call(), out, rule);
      break;
    case Matching::per_head:
    case Matching::exact:
    case Matching::entropy:
      cuda::match_per_head(device.call(), out, rule);
      break;
    case Matching::ema:
      cuda::match_running(device.call(), out, rule, *options.running_on_device);
      break;
  }
  return {.constants = rule.line};
}

// As the keys of a matching without queries.
void sum_heads_on_device(const MomentsInputs& in, std::span<Moments> out, const Exec& exec) {
  if (out.empty()) return;
  CheckedMatching checked;
  Problem& p = checked.problem;
  p.dtype = in.x.dtype;
  p.device = in.x.device;
  p.batch = in.x.shape[0];
  p.heads = p.heads_k = in.x.shape[1];
  p.tokens = p.tokens_k = in.x.shape[2];
  p.dim = p.dim_v = in.x.shape[3];
  p.masked = in.lengths.given() || in.mask.given();
  p.packed = in.cu_seqlens.given();
  p.sequences = p.packed ? in.cu_seqlens.count - 1 : p.batch;
  if (p.dim == 0) {
    std::fill(out.begin(), out.end(), Moments());
    return;
  }
  MatchingInputs keys;
  keys.q = keys.k = in.x;
  keys.key_lengths = in.lengths;
  keys.key_mask = in.mask;
  keys.cu_seqlens_q = in.cu_seqlens;
  const DeviceMatching device("head_moments", keys, checked, {.stream = exec.stream}, true);
  cuda::sum_heads(device.call(), out);
  cuda::throw_reported_faults(p.device.index);
}

void update_moments(const DeviceRunningMoments& running, const MatchingInputs& in,
                    const Exec& exec) {
  memory_errors("update_moments", [&] {
    const CheckedMatching checked = check_update(running, in);
    const DeviceMatching device("update_moments", in, checked, exec, true);
    cuda::update_running(device.call(), running);
  });
}

std::size_t matching_workspace_bytes(const MatchingInputs& in) {
  return memory_errors("matching_workspace_bytes", [&]() -> std::size_t {
    const CheckedMatching checked = check_workspace_inputs(in);
    if (checked.problem.device.kind == DeviceKind::cpu) return 0;
    return cuda::matching_workspace(checked.problem);
  });
}

}  // namespace lln
