// What a device of compute capability 9.0 does beside the threads of a block: products of
// warpgroups, and copies of boxes of tensors, which barriers that count bytes wait for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <array>

namespace emulated {

// 16 of the sum; a: a descriptor, or 64 rows in registers.
void begin_product(float* results, std::size_t columns, std::uint64_t a, const std::uint32_t* words,
                   bool a_transposed, std::uint64_t b, bool b_transposed, bool accumulate);
void commit_products();
void wait_products(std::size_t pending_groups);

struct ByteBarrier {
  std::uint16_t expected, pending;  // arrivals of a phase, and those that are left of this one
  std::uint32_t parity : 1;
  std::int32_t bytes : 31;  // announced and not there yet
};
static_assert(sizeof(ByteBarrier) == 8);

void barrier_init(ByteBarrier& barrier, unsigned arrivals);
void barrier_arrive(ByteBarrier& barrier, unsigned times, int bytes);
void barrier_wait(const ByteBarrier& barrier, std::uint32_t parity);

using Corner = std::array<int, 4>;
void load_box(void* to, const CUtensorMap& map, const Corner& corner, ByteBarrier& barrier);
void store_box(const CUtensorMap& map, const void* from, const Corner& corner);
void commit_stores();
void wait_stores_read(std::size_t pending_groups);

}  // namespace emulated
