// Findings of the instruments (report/findings.h) for the program: kinds from the command line, and
// progress on stderr. What lln analyze, its report and lln demo share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "progress.h"
#include "report/findings.h"
#include "verb.h"

namespace lln::cli {

using report::AnalysisLayer;
using report::AnalysisRequest;
using report::HeadFinding;
using report::KindRequest;
using report::LayerFindings;

// Throws UsageError for a name that is none, or comes twice.
std::vector<KindRequest> parse_kinds(const std::vector<std::string>& names);

// `where` begins the line of progress: "lln analyze: layer 3 of 12".
LayerFindings analyze_layer(const AnalysisLayer& layer, const AnalysisRequest& request,
                            const std::string& where, Parallel& threads, Progress& progress);

// A line on stderr where a limit set alpha or beta; `what` begins it: "layer 3".
void warn_of_limits(const LayerFindings& found, const std::string& what, Progress& progress);

}  // namespace lln::cli
