// The verbs of lln-torch, one file each; what they share with those of lln is in cli/verb.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "verb.h"

namespace lln::cli {

Verb add_embed(CLI::App& program);

}  // namespace lln::cli
