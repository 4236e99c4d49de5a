// lln fit --verify: what the matching modes exact and entropy reach on Gaussian heads, against what
// they promise. Apart from fit_table.cc, which makes the tables: here alpha and beta come from
// match_moments on whole tensors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "verb.h"

namespace lln::cli {

struct VerifyRequest {
  std::vector<std::int64_t> dims;
  std::vector<std::int64_t> tokens;
  std::int64_t samples = 0;  // heads of 128 channels; of fewer channels more
  std::uint64_t seed = 1;
  int threads = 0;
  bool json = false;
};

// Exit code kCheckFailed where a mode misses by more than its tolerance.
int verify_tables(const VerifyRequest& request);

}  // namespace lln::cli
