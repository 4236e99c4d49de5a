// The place of this process among the ranks of a job, as torchrun and others tell it: variables of
// the environment, which nothing but the program reads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lln_torch/parallel/ranks.h"

namespace lln::cli {

// None where neither RANK nor WORLD_SIZE is set. Throws Error (invalid_argument) that names the
// variable where one is missing or no such number.
std::optional<lln_torch::RankPlace> rank_from_environment();

}  // namespace lln::cli
