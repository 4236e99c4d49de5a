// Decoding of a case: its tokens go through a decode state in pieces of many lengths, one token at
// a time among them, and the rows must be those of the causal forward.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <span>

#include "conformance/data.h"
#include "conformance/device_data.h"
#include "lln/decode.h"

namespace lln::conformance {

// A decode state with its memory, of the host or of a device.
class OwnedState {
 public:
  explicit OwnedState(const DecodeConfig& config, Device device = {}, void* stream = nullptr);
  DecodeState& operator*() { return *state_; }
  DecodeState* operator->() { return state_.get(); }
  std::span<std::byte> memory() const { return {memory_.get(), bytes_}; }  // of the host
  // Throws Error where something was written before or behind the memory of a device.
  void check_guards() const;

 private:
  struct AlignedDelete {
    void operator()(std::byte* p) const noexcept { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte[], AlignedDelete> memory_;
  std::optional<DeviceMemory> device_memory_;
  std::unique_ptr<DecodeState> state_;
};

DecodeConfig decode_config(const Problem& p, const AttentionOptions& o);
DecodeConfig decode_config(const Case& c);

// The inputs and the rows of tokens [begin, begin + count). `lengths` is where the key lengths of
// the piece are kept when the case has any.
AttentionInputs token_range(const AttentionInputs& in, std::int64_t begin, std::int64_t count,
                            std::vector<std::int32_t>& lengths);
View token_range(const View& o, std::int64_t begin, std::int64_t count);

// All rows of a case, from an empty state where the tensors are.
void decode_all(const Case& c, const Inputs& in, const CaseViews& views, const Exec& exec);

// What the causal forward is asked for instead, and the rows that decoding leaves zero.
Case causal_case(const Case& c);
void zero_rows_past_lengths(const Inputs& in, Tensor& o);

}  // namespace lln::conformance
