// Measuring on a CUDA device. Calls are timed by events of the device, on data that is in no cache,
// and in turn with copies whose bandwidth is the floor: arithmetic is no limit there. Builds
// without CUDA have device_absent.cc instead.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/measure.h"

namespace lln::bench {

// Takes about this many seconds, and some more to make the data. In a graph the calls are captured
// and replayed: what is timed is then a call among others. The problem has been checked.
Result measure_on_device(const Problem& problem, double seconds, const Manner& manner);

}  // namespace lln::bench
