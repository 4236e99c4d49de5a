// lln zoo: every attention that a config can name, from the list of the zoo itself.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lln_torch/cli/verbs.h"
#include "lln_torch/zoo/attention.h"

namespace lln::cli {
namespace {

using lln_torch::ZooEntry;

Json zoo_json(const ZooEntry& entry) {
  return {{"name", entry.name},       {"summary", entry.summary},
          {"cost", entry.cost},       {"parameters", entry.parameters},
          {"padding", entry.padding}, {"causal", entry.causal},
          {"diag", entry.takes_diag}};
}

std::string zoo_table() {
  std::string text =
      fmt::format("{:<16} {:<7} {:<5} {}\n", "attention", "causal", "+diag", "definition");
  for (const ZooEntry& entry : lln_torch::zoo()) {
    text += fmt::format("{:<16} {:<7} {:<5} {}\n", entry.name, entry.causal ? "yes" : "no",
                        entry.takes_diag ? "yes" : "no", entry.summary);
  }
  return text +
         "\n+diag: \"NAME+diag\", or the key diag, combines it with block-diagonal attention.\n"
         "`lln zoo NAME` says what one costs, has for parameters and does with padding.\n";
}

std::string zoo_text(const ZooEntry& entry) {
  return fmt::format(
      "{}\n  definition  {}\n  cost        {}\n  parameters  {}\n  padding     {}\n"
      "  causal      {}\n  +diag       {}\n",
      entry.name, entry.summary, entry.cost, entry.parameters, entry.padding,
      entry.causal ? "yes" : "no", entry.takes_diag ? "yes" : "no");
}

int run_zoo(const std::vector<std::string>& names, bool json) {
  std::vector<ZooEntry> chosen;
  for (const std::string& name : names) chosen.push_back(lln_torch::find_attention(name));
  if (json) {
    const auto all = lln_torch::zoo();
    if (names.empty()) chosen.assign(all.begin(), all.end());
    Json entries = Json::array();
    for (const ZooEntry& entry : chosen) entries.push_back(zoo_json(entry));
    print_json({{"attentions", entries}});
    return kOk;
  }
  std::string text = names.empty() ? zoo_table() : "";
  for (const ZooEntry& entry : chosen) text += zoo_text(entry);
  std::fputs(text.c_str(), stdout);
  return kOk;
}

}  // namespace

Verb add_zoo(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("zoo", "Every attention that can be trained, and what it costs");
  const auto names = std::make_shared<std::vector<std::string>>();
  const auto json = std::make_shared<bool>(false);
  command->add_option("NAME", *names, "Attentions to say everything of; none: the list of all");
  add_json_option(*command, *json);
  command->footer(
      help_footer("  lln zoo\n"
                  "  lln zoo lln+diag nystromformer\n"
                  "  lln zoo --json\n"));
  return {command, [names, json] { return run_zoo(*names, *json); }};
}

}  // namespace lln::cli
