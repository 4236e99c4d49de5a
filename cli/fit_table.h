// lln fit --table: the tables of the matching modes exact and entropy, by simulation. Apart from
// fit.cc, which fits the line of the other modes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "verb.h"

namespace lln::cli {

struct TableRequest {
  std::string path;
  std::int64_t samples = 0;  // heads of 16 channels; of more channels fewer
  std::uint64_t seed = 1;
  int threads = 0;
  bool json = false;
};

// Writes the header src/math/matching_table.h and reports the standard errors of what is in it.
int make_table(const TableRequest& request);

}  // namespace lln::cli
