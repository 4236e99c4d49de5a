// The program lln: a list of verbs, each in its own file. Those of the LibTorch layer are another
// program, so that the others start without loading it.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <array>

#include "lln/version.h"
#include "torch_verbs.h"
#include "verb.h"

int main(int argc, char** argv) {
  namespace cli = lln::cli;
  if (argc > 1 && cli::is_torch_verb(argv[1])) return cli::run_torch_verb(argc, argv);
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
  cli::list_torch_verbs(program);
  return cli::run_program(program, verbs, argc, argv);
}
