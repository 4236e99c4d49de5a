// The data of a report: findings, the sweep over temperatures behind the central figure, and what
// attention costs on this machine. The names are what report/figures_*.js read.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "analysis.h"
#include "cost.h"
#include "gaussian_input.h"
#include "progress.h"
#include "verb.h"

namespace lln::cli {

struct ReportHeading {
  std::string title, lead;
  std::vector<std::pair<std::string, std::string>> facts;  // name and value
  std::string command;                                     // that makes this report
};

// Findings on Gaussian input, as a list.
Json analyze_gaussian(const GaussianSpec& spec, const AnalysisRequest& request, const char* verb,
                      Parallel& threads, Progress& progress);
ReportHeading gaussian_heading(const GaussianSpec& spec, const std::string& command);

// Every kind on Gaussian input of growing sigma, LLN in every mode of matching.
Json sweep_temperature(const GaussianSpec& spec, const AnalysisRequest& request, const char* verb,
                       Parallel& threads, Progress& progress);

Json report_data(const ReportHeading& heading, const Json& results, const Json& sweep,
                 const std::vector<CostRow>& cost, int threads);

}  // namespace lln::cli
