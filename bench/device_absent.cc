// Without CUDA no kernel takes a problem on a device, which the caller has checked.
// SPDX-License-Identifier: Apache-2.0
#include "bench/device.h"
#include "lln/error.h"

namespace lln::bench {

Result measure_on_device(const Problem& problem, double, const Manner&) {
  throw Error(ErrorCode::unsupported, to_string(problem) + ": this build has no CUDA");
}

}  // namespace lln::bench
