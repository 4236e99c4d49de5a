// How a run sets alpha and beta: the mode that the flags ask for, and the report of what was done.
// Apart from run.cc, which computes with them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lln/attention.h"
#include "lln/calibration.h"
#include "lln/moments.h"
#include "verb.h"

namespace lln::cli {

struct Scales {
  std::optional<Matching> mode = {};  // none for kinds without alpha and beta
  MatchingReport report = {};
};

// The mode named by --matching, none where `name` is empty. A UsageError where other flags
// contradict it; `given` says that --alpha or --beta is there.
std::optional<Matching> requested_matching(const std::string& name, bool given,
                                           const AttentionOptions& options);

// One line for all heads that a limit was applied to, at least one.
std::string clamped_text(const std::vector<ClampedHead>& clamped, Matching mode);
// Why a calibrated layer is not for these heads; empty where it is.
std::string calibration_obstacle(const CalibratedLayer& layer, std::int64_t heads,
                                 std::int64_t heads_k, std::int64_t dim);
Json to_json(const std::vector<ClampedHead>& clamped);
Json to_json(const Scales& scales);

}  // namespace lln::cli
