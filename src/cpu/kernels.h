// Entries of the CPU back end: one kernel per operation and vector target, best target first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "api/kernel.h"

namespace lln {

std::vector<Kernel> cpu_forward_kernels();
std::vector<Kernel> cpu_backward_kernels();
std::vector<Kernel> cpu_append_kernels();
std::vector<Kernel> cpu_step_kernels();
std::vector<std::string> cpu_target_names();  // those that this CPU runs

}  // namespace lln
