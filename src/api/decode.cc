// The decode state: what its calls check and change. Nothing changes before everything that can
// fail has been done.
// SPDX-License-Identifier: Apache-2.0
#include "lln/decode.h"

#include <fmt/format.h>

#include <algorithm>

#include "api/decode_config.h"
#include "api/dispatch.h"
#include "api/faults.h"
#include "api/memory_errors.h"
#include "lln/error.h"

namespace lln {
namespace {

float* floats(std::span<std::byte> memory) noexcept {
  return reinterpret_cast<float*>(memory.data());
}

void run(DecodeVerb verb, const DecodeConfig& config, std::span<std::byte> memory,
         std::span<std::int64_t> tokens, const AttentionInputs& in, const View& o,
         const Exec& exec) {
  memory_errors(call_name(verb), [&] {
    CheckedCall checked = check_decode(verb, config, in, o);
    checked.call.state = floats(memory);
    checked.call.tokens_before = tokens;
    run_call(call_name(verb), checked, exec);
    for (std::size_t s = 0; s < tokens.size(); ++s) tokens[s] += checked.sequences[s].k_tokens;
  });
}

void check_same(const char* call, const DecodeConfig& own, const DecodeConfig& other) {
  if (own == other) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: a state of {} and one of {}: expected the same configuration", call,
                          describe(own), describe(other)));
}

}  // namespace

std::size_t decode_state_bytes(const DecodeConfig& config) {
  return memory_errors("decode_state_bytes", [&] {
    check_config("decode_state_bytes", config);
    return static_cast<std::size_t>(slot_count(config) * decode_shape(config).floats()) *
           sizeof(float);
  });
}

DecodeState::DecodeState(const DecodeConfig& config, std::span<std::byte> memory)
    : config_(config), memory_(memory) {
  memory_errors("DecodeState", [&] {
    check_config("DecodeState", config);
    const std::size_t needed = decode_state_bytes(config);
    Faults faults;
    if (memory.size() < needed) {
      faults.add(fmt::format("memory has {} bytes: expected {}", memory.size(), needed));
    }
    if (const auto off = reinterpret_cast<std::uintptr_t>(memory.data()) % 64; off != 0) {
      faults.add(fmt::format("memory starts {} bytes past a multiple of 64", off));
    }
    faults.throw_any("DecodeState", describe(config));
    memory_ = memory.first(needed);
    tokens_.resize(static_cast<std::size_t>(config.batch));
  });
  reset();
}

std::int64_t DecodeState::tokens(std::int64_t sequence) const {
  check_sequence("DecodeState::tokens", sequence);
  return tokens_[static_cast<std::size_t>(sequence)];
}

void DecodeState::check_sequence(const char* call, std::int64_t sequence) const {
  if (sequence >= 0 && sequence < config_.batch) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: sequence {} of {}: expected 0 to {}", call, sequence,
                          describe(config_), config_.batch - 1));
}

void DecodeState::reset() {
  for (std::int64_t b = 0; b < config_.batch; ++b) reset(b);
}

void DecodeState::reset(std::int64_t sequence) {
  check_sequence("DecodeState::reset", sequence);
  const DecodeShape shape = decode_shape(config_);
  for (std::int64_t h = 0; h < config_.heads_k; ++h) {
    clear(shape, shape.slot(floats(memory_), sequence * config_.heads_k + h));
  }
  tokens_[static_cast<std::size_t>(sequence)] = 0;
}

void DecodeState::append(const AttentionInputs& in, const View& o, const Exec& exec) {
  run(DecodeVerb::append, config_, memory_, tokens_, in, o, exec);
}

void DecodeState::read(const AttentionInputs& in, const View& o, const Exec& exec) const {
  // The kernel of a read adds no keys and writes no state, so that counts and memory stay.
  std::vector<std::int64_t> tokens = memory_errors("DecodeState::read", [&] { return tokens_; });
  run(DecodeVerb::read, config_, memory_, tokens, in, o, exec);
}

void DecodeState::step(const AttentionInputs& in, const View& o, const Exec& exec) {
  run(DecodeVerb::step, config_, memory_, tokens_, in, o, exec);
}

void DecodeState::merge(const DecodeState& later) {
  check_same("DecodeState::merge", config_, later.config_);
  Faults faults;
  if (memory_.data() == later.memory_.data() && !memory_.empty()) {
    faults.add("a state cannot follow itself");
  }
  const DecodeShape shape = decode_shape(config_);
  for (std::int64_t b = 0; b < config_.batch && shape.block > 0; ++b) {
    if (later.tokens(b) == 0 || tokens(b) % shape.block == 0) continue;
    faults.add(
        fmt::format("sequence {} has {} tokens, which is no multiple of the block of {}, so that "
                    "the blocks of the {} later ones do not begin at a border",
                    b, tokens(b), shape.block, later.tokens(b)));
  }
  faults.throw_any("DecodeState::merge", describe(config_));
  for (std::int64_t b = 0; b < config_.batch; ++b) {
    if (later.tokens(b) == 0) continue;
    for (std::int64_t h = 0; h < config_.heads_k; ++h) {
      const DecodeSlot into = shape.slot(floats(memory_), b * config_.heads_k + h);
      const DecodeSlot other = shape.slot(floats(later.memory_), b * config_.heads_k + h);
      fold(shape, into);
      lln::merge(shape, into.all, other.all);
      lln::merge(shape, into.recent, other.recent);
      std::copy(other.block_k, other.block_k + shape.block * (shape.dp + shape.dvp), into.block_k);
    }
    tokens_[static_cast<std::size_t>(b)] += later.tokens(b);
  }
}

void DecodeState::copy_from(const DecodeState& other) {
  check_same("DecodeState::copy_from", config_, other.config_);
  if (this == &other) return;
  std::copy(other.memory_.begin(), other.memory_.end(), memory_.begin());
  std::copy(other.tokens_.begin(), other.tokens_.end(), tokens_.begin());
}

}  // namespace lln
