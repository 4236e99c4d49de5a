// The HTML report: data put into the page of report/, and the file written. What the data hold is
// in analysis_report.h; how they are drawn in report/figures_*.js.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "verb.h"

namespace lln::cli {

// The page with the data in it. Nothing in them can end the script element or become markup.
std::string report_page(const Json& data);

// Appears complete or not at all; a signal that comes meanwhile takes effect afterwards.
void write_report(const std::string& path, const Json& data);

}  // namespace lln::cli
