// Data into the page, the page into a file.
// SPDX-License-Identifier: Apache-2.0
#include "report_page.h"

#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "interruption.h"
#include "io/output_file.h"
#include "report/template.h"

namespace lln::cli {

std::string report_page(const Json& data) {
  const std::string_view page = report::page_template();
  const std::size_t place = page.find(report::kDataMark);
  std::string text(page.substr(0, place));
  // Names come from outside. In JSON these three stand inside strings only, where an escape means
  // the same; without them no tag and no comment can begin or end.
  for (const char c : data.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    switch (c) {
      case '<':
        text += "\\u003c";
        break;
      case '>':
        text += "\\u003e";
        break;
      case '&':
        text += "\\u0026";
        break;
      default:
        text += c;
    }
  }
  return text.append(page.substr(place + report::kDataMark.size()));
}

void write_report(const std::string& path, const Json& data) {
  const std::string page = report_page(data);
  const NotedSignals signals;
  const std::function<bool()> interrupted = [&] { return signals.arrived(); };
  io::OutputFile file(path, interrupted);
  file.write(std::as_bytes(std::span(page)));
  file.rename_to_target();
}

}  // namespace lln::cli
