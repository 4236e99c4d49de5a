// Verbs of the LibTorch layer: training, and what comes before and after it. They are in a program
// of their own, lln-torch, beside this one: loading LibTorch takes longer than most verbs here run.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace CLI {  // NOLINT(readability-identifier-naming): named by its library
class App;
}

namespace lln::cli {

bool is_torch_verb(std::string_view name);

// Adds them to the list of `lln --help`.
void list_torch_verbs(CLI::App& program);

// Becomes lln-torch with the same arguments; returns an exit code only where it cannot.
int run_torch_verb(int argc, char** argv);

}  // namespace lln::cli
