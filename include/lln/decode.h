// Decoding: causal LLN and LLN+Diag, token after token, with a state whose size does not depend on
// how many tokens it has seen. For each sequence and key head it holds sums over all keys, and for
// LLN+Diag the keys and values of the running diagonal block. Appending in any pieces gives the
// rows of the causal forward pass, to rounding.
//
//   DecodeState state(config, memory);          // memory of decode_state_bytes(config), caller's
//   state.append({.q = ..., .k = ..., .v = ..., .alpha = ..., .beta = ...}, o);  // the prompt
//   state.step({...one token...}, o);           // then one token at a time
//
// A state is one object used by one thread at a time; a call spreads its work over Exec::parallel.
// A call that throws has changed nothing.
//
// A state on a CUDA device takes tensors of that device. Its calls put their work into a stream and
// return: append, read and step into Exec::stream, or where that is null into the state's own,
// reset and copy_from into the state's own. Who uses several streams orders them. These calls can
// be captured in a CUDA graph, and since the counts of tokens are on the device too, a graph that
// is replayed goes on from what the state then is. tokens, merge, save and load wait for the device
// and cannot be captured.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lln/attention.h"
#include "lln/exec.h"

namespace lln {

struct DecodeConfig {
  std::int64_t batch = 1;        // sequences that are decoded together
  std::int64_t heads = 1;        // of q and o
  std::int64_t heads_k = 1;      // of k and v; divides heads
  std::int64_t dim = 0;          // channels of q and k
  std::int64_t dim_v = 0;        // channels of v and o
  Kind kind = Kind::lln;         // lln or lln_diag
  std::int64_t diag_block = 64;  // of LLN+Diag
  Feature feature = Feature::exp;
  float power = 2;   // of Feature::power
  float mix = 0.5F;  // LLN+Diag, where no tensor gives the weights
  bool operator==(const DecodeConfig&) const = default;
};

// Memory of a state where it is to live; throws Error naming every fault of the configuration.
std::size_t decode_state_bytes(const DecodeConfig& config, Device device = {});

class DecodeState {
 public:
  // An empty state in `memory`, which must stay alive and untouched and be aligned to 64 bytes:
  // that of the device, where one is named. `stream` is a CUDA stream, null the default one.
  DecodeState(const DecodeConfig& config, std::span<std::byte> memory, Device device = {},
              void* stream = nullptr);
  // The state that another object of this configuration and device left in `memory`, which that one
  // uses no more: for callers who keep memory and counts, not objects. `tokens` are those that each
  // sequence has seen; on a device there are none to give, because they lie in its memory.
  static DecodeState resume(const DecodeConfig& config, std::span<std::byte> memory,
                            std::span<const std::int64_t> tokens, Device device = {},
                            void* stream = nullptr);
  // Two objects must not share memory.
  DecodeState(const DecodeState&) = delete;
  DecodeState& operator=(const DecodeState&) = delete;
  // `other` becomes a state of no sequences, without memory.
  DecodeState(DecodeState&& other) noexcept;
  DecodeState& operator=(DecodeState&& other) noexcept;

  const DecodeConfig& config() const noexcept { return config_; }
  Device device() const noexcept { return device_; }
  // Tokens that a sequence has seen.
  std::int64_t tokens(std::int64_t sequence = 0) const;

  // Forgets everything, or one sequence, whose place another may then take.
  void reset();
  void reset(std::int64_t sequence);

  // Adds the tokens of k and v: [batch, heads_k, tokens, dim] and dim_v, with alpha and beta as in
  // attention_forward. With q and o: also the output row of every token, which sees itself and all
  // before it. key_lengths: sequence b adds its first key_lengths[b] tokens only, and its rows of o
  // after them are zero; on a device they are read there, and one that is out of range is reported
  // by a later call. Masks and packed sequences are refused.
  void append(const AttentionInputs& in, const View& o = {}, const Exec& exec = {});

  // Rows of q that see all tokens so far, as if each stood at the place of the last one; nothing
  // changes. Sequences without a token give zero rows.
  void read(const AttentionInputs& in, const View& o, const Exec& exec = {}) const;

  // One token: append and read in one pass over the state.
  void step(const AttentionInputs& in, const View& o, const Exec& exec = {});

  // This state followed by the tokens of `later`, which was filled from nothing with the same
  // configuration. With LLN+Diag this state must end at a block border in every sequence where
  // `later` has tokens.
  void merge(const DecodeState& later);

  // Becomes a copy of `other` (same configuration and device): a fork, and the way back to a saved
  // point. Between devices a state travels by save and load.
  void copy_from(const DecodeState& other);

  // The state as bytes that any machine reads back: configuration, tokens, sums, a version and a
  // checksum. `out` has saved_bytes(), in host memory. A state of any device reads them.
  std::size_t saved_bytes() const noexcept;
  void save(std::span<std::byte> out) const;
  // Refuses bytes that are cut, corrupt, of another version or of another configuration.
  void load(std::span<const std::byte> bytes);

 private:
  struct AsItIs {};  // without a reset
  DecodeState(AsItIs, const DecodeConfig& config, std::span<std::byte> memory, Device device,
              void* stream);
  void check_sequence(const char* call, std::int64_t sequence) const;
  bool on_host() const noexcept { return device_.kind == DeviceKind::cpu; }
  // Tokens of every sequence of a state on a device, once it has done all its work.
  std::vector<std::int64_t> device_counts() const;

  DecodeConfig config_;
  std::span<std::byte> memory_;
  Device device_;
  void* stream_ = nullptr;
  std::vector<std::int64_t> tokens_;  // on a device empty: there they lie behind the sums
};

// What saved bytes need to be loaded: the configuration that they were saved with.
DecodeConfig saved_decode_config(std::span<const std::byte> bytes);

}  // namespace lln
