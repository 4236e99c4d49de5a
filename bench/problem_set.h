// Files of problem texts, one per line; what follows # is a comment. The sets of this project are
// in bench/sets.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lln/problem.h"

namespace lln::bench {

// Throws lln::Error with path and line where a line is no problem, and where there is none at all.
std::vector<Problem> read_problem_set(const std::string& path);

}  // namespace lln::bench
