// A loop over independent tasks on the threads that a verb computes with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "lln/exec.h"

namespace lln::cli {

// Calls body(task) for every task in [0, tasks).
template <class Body>
void for_each_task(Parallel& parallel, std::int64_t tasks, Body body) {
  parallel.run(
      tasks, [](void* context, std::int64_t task, int) { (*static_cast<Body*>(context))(task); },
      &body);
}

}  // namespace lln::cli
