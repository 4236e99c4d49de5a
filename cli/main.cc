// The program lln: a list of verbs, each in its own file.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <string_view>

#include "lln/version.h"
#include "verb.h"

int main(int argc, char** argv) {
  namespace cli = lln::cli;
  CLI::App program("Linear Log-Normal attention: exact, linear in the number of tokens.", "lln");
  program.require_subcommand(1);
  program.set_version_flag("--version", std::string(lln::build_info().version));
  program.footer(
      cli::help_footer("  lln demo\n"
                       "  lln explain forward:f32:cpu:b1h12n16384d64:lln\n"
                       "  lln run --help\n"));
  const std::string command_line = cli::command_line(argc, argv);
  const std::array verbs = {cli::add_info(program),
                            cli::add_check(program),
                            cli::add_explain(program),
                            cli::add_bench(program),
                            cli::add_run(program),
                            cli::add_fit(program),
                            cli::add_calibrate(program),
                            cli::add_analyze(program, command_line),
                            cli::add_demo(program, argv[0], command_line)};
  // Looked up before parsing: a command line that cannot be parsed also ends in JSON.
  const bool json =
      std::any_of(argv, argv + argc, [](const char* a) { return std::string_view(a) == "--json"; });
  if (argc < 2) {
    fmt::print(stderr, "{}", program.help());
    return cli::kUsage;
  }
  const std::string_view first = argv[1];
  const bool known =
      first.starts_with('-') || std::any_of(verbs.begin(), verbs.end(), [&](const cli::Verb& v) {
        return v.command->get_name() == first;
      });
  if (!known) {
    return cli::report_usage_error(
        fmt::format("'{}' is no verb: expected info, check, explain, bench, run, fit, calibrate, "
                    "analyze or demo",
                    first),
        json);
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const bool asked_for_help = e.get_exit_code() == 0;
    return asked_for_help ? program.exit(e) : cli::report_usage_error(e.what(), json);
  }
  const auto verb = std::find_if(verbs.begin(), verbs.end(),
                                 [](const cli::Verb& v) { return v.command->parsed(); });
  return cli::run_reporting_errors(*verb, json);
}
