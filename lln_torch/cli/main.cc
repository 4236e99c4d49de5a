// The program lln-torch: the verbs of the LibTorch layer. `lln train` and the others become it.
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <vector>

#include "lln/version.h"
#include "lln_torch/cli/verbs.h"

int main(int argc, char** argv) {
  namespace cli = lln::cli;
  CLI::App program("Linear Log-Normal attention: training and what belongs to it.", "lln");
  program.require_subcommand(1);
  program.set_version_flag("--version", std::string(lln::build_info().version));
  program.footer(
      cli::help_footer("  lln zoo\n"
                       "  lln train --help\n"));
  const std::string command_line = cli::command_line(argc, argv);
  const std::vector<cli::Verb> verbs = {
      cli::add_zoo(program),      cli::add_tokenize(program),
      cli::add_preview(program),  cli::add_train(program, command_line),
      cli::add_eval(program),     cli::add_compare(program, command_line),
      cli::add_dump(program),     cli::add_embed(program),
      cli::add_generate(program), cli::add_cost(program, command_line)};
  return cli::run_program(program, verbs, argc, argv);
}
