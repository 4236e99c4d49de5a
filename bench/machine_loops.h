// The loops that find a machine's limits, at the widest vectors that the library's kernels use
// here. Apart from machine.h, which decides how long they run and on which threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lln::bench {

// Multiply-adds in independent chains of registers, nothing else: no load, no store, and more
// chains than latency times units of any CPU that exists. The result depends on all of them.
float fma_chains(std::int64_t rounds);
std::int64_t flops_per_round();
// The same with products of bf16 pairs, twice as many operations a round, on CPUs that have them.
bool has_pairs();
float pair_chains(std::int64_t rounds);

// Copies `floats` numbers past the caches, as only a copy can that never reads them again. Both
// pointers are aligned to 64 bytes, `floats` is a multiple of 64.
void copy_past_caches(const float* from, float* to, std::int64_t floats);

}  // namespace lln::bench
