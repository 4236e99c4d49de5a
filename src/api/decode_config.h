// What the parts of a decode state share: the rules of a configuration, its text, and how its
// memory is laid out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cuda/decode.h"
#include "lln/decode.h"
#include "math/state.h"

namespace lln {

// The most tokens that a sequence can count; calls that would pass it are refused.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 62;

// Throws one Error that names every fault; `call` begins its text.
void check_config(const char* call, const DecodeConfig& config);

// For errors: b1h12k12d64v64:lln+diag64, then what the text of a problem has no place for.
std::string describe(const DecodeConfig& config);

// Of a configuration that has been checked.
DecodeShape decode_shape(const DecodeConfig& config) noexcept;
std::int64_t slot_count(const DecodeConfig& config) noexcept;
// Bytes of all slots, and with the counts that follow them on a device.
std::size_t slot_bytes(const DecodeConfig& config) noexcept;
std::size_t state_bytes(const DecodeConfig& config, Device device) noexcept;
// Slots and counts of a state on a device.
cuda::DecodeSlots device_slots(const DecodeConfig& config, std::span<std::byte> memory) noexcept;
// The slot of a sequence and key head, counted sequence by sequence.
DecodeSlot slot_at(const DecodeShape& shape, std::span<std::byte> memory,
                   std::int64_t index) noexcept;

}  // namespace lln
