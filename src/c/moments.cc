// Moments, matching and running moments for C.
// SPDX-License-Identifier: Apache-2.0
#include "lln/moments.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "c/arguments.h"

using lln::c::Arguments;
using lln::c::guarded;

namespace {

lln::Moments from_c(const lln_moments& m) { return {m.count, m.mean, m.m2}; }
lln_moments to_c(const lln::Moments& m) { return {m.count, m.mean, m.m2}; }
lln_matching_constants to_c(const lln::MatchingConstants& c) { return {c.a, c.b}; }

lln_clamped_head to_c(const lln::ClampedHead& head) {
  return {head.sequence, head.head_k, head.sigma_q, head.sigma_k, head.target, head.size};
}

using RunningHeads = std::vector<lln::RunningMoments::Head>;

RunningHeads from_c(const lln_running_head* heads, size_t count) {
  RunningHeads list(count);
  std::transform(heads, heads + count, list.begin(), [](const lln_running_head& head) {
    return lln::RunningMoments::Head{head.weight, head.mean, head.variance};
  });
  return list;
}

void to_c(const RunningHeads& from, lln_running_head* heads) {
  std::transform(from.begin(), from.end(), heads, [](const lln::RunningMoments::Head& head) {
    return lln_running_head{head.weight, head.mean, head.variance};
  });
}

}  // namespace

lln_status lln_head_moments(const lln_moments_inputs* in, lln_moments* out, size_t count,
                            const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::MomentsInputs inputs = arguments.moments(in);
    if (count != 0) arguments.required("out", out);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    std::vector<lln::Moments> moments(count);
    lln::head_moments(inputs, moments, how);
    std::transform(moments.begin(), moments.end(), out,
                   [](const lln::Moments& m) { return to_c(m); });
  });
}

lln_status lln_merge_moments(const lln_moments* first, const lln_moments* second,
                             lln_moments* merged) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("first", first);
    arguments.required("second", second);
    arguments.required("merged", merged);
    arguments.check();
    *merged = to_c(lln::merge(from_c(*first), from_c(*second)));
  });
}

lln_status lln_matching_constants_of(int64_t dim, lln_matching_constants* constants) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("constants", constants);
    arguments.in_range("dim", dim, 1, 256);
    arguments.check();
    *constants = to_c(lln::matching_constants(dim));
  });
}

lln_status lln_running_create(double decay, lln_running_moments** running) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("running", running);
    if (!(decay >= 0 && decay < 1)) {
      arguments.add(fmt::format("decay is {}: expected 0 to below 1", decay));
    }
    arguments.check();
    *running = new lln_running_moments{{.decay = decay}};
  });
}

void lln_running_destroy(lln_running_moments* running) { delete running; }

size_t lln_running_heads(const lln_running_moments* running) {
  return running == nullptr ? 0 : running->value.k.size();
}

lln_status lln_running_get(const lln_running_moments* running, lln_running_head* q,
                           lln_running_head* k, size_t heads) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("running", running);
    if (heads != 0) {
      arguments.required("q", q);
      arguments.required("k", k);
    }
    arguments.check();
    if (heads != running->value.k.size()) {
      arguments.add(
          fmt::format("heads is {}: the running moments have {}", heads, running->value.k.size()));
    }
    arguments.check();
    to_c(running->value.q, q);
    to_c(running->value.k, k);
  });
}

lln_status lln_running_set(lln_running_moments* running, const lln_running_head* q,
                           const lln_running_head* k, size_t heads) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("running", running);
    if (heads != 0) {
      arguments.required("q", q);
      arguments.required("k", k);
    }
    arguments.check();
    RunningHeads of_q = from_c(q, heads), of_k = from_c(k, heads);
    running->value.q = std::move(of_q);
    running->value.k = std::move(of_k);
  });
}

lln_status lln_matching_options_init(lln_matching_options* options) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("options", options);
    arguments.check();
    const lln::MatchingOptions from;
    *options = {.mode = static_cast<lln_matching>(from.mode),
                .feature = static_cast<lln_feature>(from.feature),
                .causal = from.causal};
  });
}

lln_status lln_match_moments(const lln_matching_inputs* in, const lln_matching_outputs* out,
                             const lln_matching_options* options, lln_matching_report* report,
                             const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::MatchingInputs inputs = arguments.matching(in);
    const lln::MatchingOutputs outputs = arguments.matching(out);
    const lln::MatchingOptions choices = arguments.matching(options);
    const lln::Exec how = arguments.exec(exec);
    if (report != nullptr && report->capacity != 0) {
      arguments.required("report.clamped", report->clamped);
    }
    arguments.check();
    const lln::MatchingReport found = lln::match_moments(inputs, outputs, choices, how);
    if (report == nullptr) return;
    report->constants = to_c(found.constants);
    report->count = found.clamped.size();
    for (size_t i = 0; i < std::min(report->count, report->capacity); ++i) {
      report->clamped[i] = to_c(found.clamped[i]);
    }
  });
}

lln_status lln_update_moments(lln_running_moments* running, const lln_matching_inputs* in,
                              const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("running", running);
    const lln::MatchingInputs inputs = arguments.matching(in);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    lln::update_moments(running->value, inputs, how);
  });
}

lln_status lln_update_device_moments(const lln_device_running_moments* running,
                                     const lln_matching_inputs* in, const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::DeviceRunningMoments moments = arguments.running(running);
    const lln::MatchingInputs inputs = arguments.matching(in);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    lln::update_moments(moments, inputs, how);
  });
}

lln_status lln_matching_workspace_bytes(const lln_matching_inputs* in, size_t* bytes) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::MatchingInputs inputs = arguments.matching(in);
    arguments.required("bytes", bytes);
    arguments.check();
    *bytes = lln::matching_workspace_bytes(inputs);
  });
}
