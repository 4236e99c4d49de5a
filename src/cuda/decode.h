// Decoding on a device: the kernels of append and step, and what the state itself does with its
// memory. No header of CUDA is included here, so that src/api can ask for it in every build.
//
// The memory of a state on a device is the slots of math/state.h followed by one count of tokens
// for each slot, in bytes of decode_counts_bytes(). Counts lie on the device and every slot has its
// own, so that the block that works on a slot reads and advances it: a captured step that is
// replayed goes on where the last one ended, and nothing waits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/kernel.h"
#include "math/state.h"

namespace lln::cuda {

std::vector<Kernel> tiled_append_kernels();
std::vector<Kernel> decode_append_kernels();
std::vector<Kernel> decode_step_kernels();

// The slots of a state and their counts, in device memory.
struct DecodeSlots {
  float* memory = nullptr;
  std::int64_t* tokens = nullptr;  // [slots]
};

// Everything below runs on a stream of the current device.

// Slots [first, first + count) become empty.
void decode_clear(const DecodeShape& shape, const DecodeSlots& slots, std::int64_t first,
                  std::int64_t count, void* stream);
// Every slot of `into` is followed by the tokens of its slot of `later`.
void decode_merge(const DecodeShape& shape, const DecodeSlots& into, const DecodeSlots& later,
                  std::int64_t count, void* stream);
// Copies in the order of the stream; those to and from the host wait until they are done.
void copy_on_device(void* to, const void* from, std::size_t bytes, void* stream);
void copy_to_host(void* to, const void* from, std::size_t bytes, void* stream);
void copy_from_host(void* to, const void* from, std::size_t bytes, void* stream);

}  // namespace lln::cuda
