// The limits of the machine that a kernel is held against: multiply-adds per second and bytes per
// second, on the threads that the kernel has.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lln/exec.h"
#include "lln/tensor.h"

namespace lln::bench {

// What the system calls its CPU, "unknown CPU" where it does not say.
std::string cpu_name();

// Floating-point operations per second of products of numbers of this type, a multiply-add counting
// two: one sample of about this length on all threads. They are those of f32, or of bf16 pairs
// where the CPU has them.
double product_peak(Parallel& threads, double seconds, DType dtype);

// Bytes read and written per second by a copy of arrays larger than the caches on all threads: the
// median of at least three copies in about this time.
double copy_bandwidth(Parallel& threads, double seconds);

}  // namespace lln::bench
