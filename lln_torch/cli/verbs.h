// The verbs of lln-torch, one file each; what they share with those of lln is in cli/verb.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "verb.h"

namespace lln::cli {

// Exit codes of lln train, besides those of all verbs.
inline constexpr int kStopped = 6;    // by a signal, after a checkpoint was saved
inline constexpr int kNotFinite = 7;  // the loss or a gradient

// `command_line` is what the run, or the report, says that it was made by.
Verb add_compare(CLI::App& program, const std::string& command_line);
Verb add_cost(CLI::App& program, const std::string& command_line);
Verb add_dump(CLI::App& program);
Verb add_embed(CLI::App& program);
Verb add_eval(CLI::App& program);
Verb add_generate(CLI::App& program);
Verb add_preview(CLI::App& program);
Verb add_tokenize(CLI::App& program);
Verb add_train(CLI::App& program, const std::string& command_line);
Verb add_zoo(CLI::App& program);

}  // namespace lln::cli
