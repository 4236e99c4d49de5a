// The page that lln analyze and lln demo fill with data: report/page.html with all its parts put
// in, made by the build (inline.cmake) and installed as share/lln/report.html.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace lln::report {

// Where the data stand in the template: JSON with <, > and & escaped.
inline constexpr std::string_view kDataMark = "@DATA@";

std::string_view page_template() noexcept;

}  // namespace lln::report
