// The decode state: what its calls check and change. Nothing changes before everything that can
// fail has been done.
// SPDX-License-Identifier: Apache-2.0
#include "lln/decode.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "api/decode_config.h"
#include "api/dispatch.h"
#include "api/faults.h"
#include "api/memory_errors.h"
#include "lln/error.h"

namespace lln {
namespace {

std::size_t memory_bytes(const DecodeConfig& config) noexcept {
  return static_cast<std::size_t>(slot_count(config) * decode_shape(config).floats()) *
         sizeof(float);
}

void check_count(Faults& faults, std::size_t sequence, std::int64_t before, std::int64_t added) {
  if (added <= kMostTokens - before) return;
  faults.add(fmt::format("sequence {} has {} tokens and would get {} more: expected at most {}",
                         sequence, before, added, kMostTokens));
}

// Returns what each sequence has added.
std::vector<Sequence> run(DecodeVerb verb, const DecodeConfig& config, std::span<std::byte> memory,
                          std::span<const std::int64_t> tokens, const AttentionInputs& in,
                          const View& o, const Exec& exec) {
  return memory_errors(call_name(verb), [&] {
    CheckedCall checked = check_decode(verb, config, in, o);
    Faults faults;
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      check_count(faults, b, tokens[b], checked.sequences[b].k_tokens);
    }
    if (faults.count() > 0) faults.throw_any(call_name(verb), to_string(checked.call.problem));
    checked.call.state = reinterpret_cast<float*>(memory.data());
    checked.call.tokens_before = tokens;
    run_call(call_name(verb), checked, exec);
    return std::move(checked.sequences);
  });
}

void count(const std::vector<Sequence>& added, std::span<std::int64_t> tokens) noexcept {
  for (std::size_t b = 0; b < tokens.size(); ++b) tokens[b] += added[b].k_tokens;
}

void check_same(const char* call, const DecodeState& own, const DecodeState& other) {
  if (own.config() == other.config()) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: a state of {} and one of {}: expected the same configuration", call,
                          describe(own.config()), describe(other.config())));
}

void check_merge(const DecodeState& own, const DecodeState& later) {
  constexpr const char* kCall = "DecodeState::merge";
  check_same(kCall, own, later);
  Faults faults;
  if (&own == &later) faults.add("a state cannot follow itself");
  const std::int64_t block = decode_shape(own.config()).block;
  for (std::int64_t b = 0; b < own.config().batch; ++b) {
    check_count(faults, static_cast<std::size_t>(b), own.tokens(b), later.tokens(b));
    if (block == 0 || later.tokens(b) == 0 || own.tokens(b) % block == 0) continue;
    faults.add(
        fmt::format("sequence {} has {} tokens, which is no multiple of the block of {}, so that "
                    "the blocks of the {} later ones do not begin at a border",
                    b, own.tokens(b), block, later.tokens(b)));
  }
  if (faults.count() > 0) faults.throw_any(kCall, describe(own.config()));
}

}  // namespace

std::size_t decode_state_bytes(const DecodeConfig& config) {
  return memory_errors("decode_state_bytes", [&] {
    check_config("decode_state_bytes", config);
    return memory_bytes(config);
  });
}

DecodeState::DecodeState(const DecodeConfig& config, std::span<std::byte> memory)
    : config_(config), memory_(memory) {
  memory_errors("DecodeState", [&] {
    check_config("DecodeState", config);
    const std::size_t needed = memory_bytes(config);
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

DecodeState::DecodeState(DecodeState&& other) noexcept
    : config_(other.config_),
      memory_(std::exchange(other.memory_, {})),
      tokens_(std::exchange(other.tokens_, {})) {
  other.config_.batch = 0;
}

DecodeState& DecodeState::operator=(DecodeState&& other) noexcept {
  if (this == &other) return *this;
  config_ = other.config_;
  memory_ = std::exchange(other.memory_, {});
  tokens_ = std::exchange(other.tokens_, {});
  other.config_.batch = 0;
  return *this;
}

std::int64_t DecodeState::tokens(std::int64_t sequence) const {
  check_sequence("DecodeState::tokens", sequence);
  return tokens_[static_cast<std::size_t>(sequence)];
}

void DecodeState::check_sequence(const char* call, std::int64_t sequence) const {
  if (sequence >= 0 && sequence < config_.batch) return;
  memory_errors(call, [&] {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: sequence {} of {}: expected 0 to {}", call, sequence,
                            describe(config_), config_.batch - 1));
  });
}

void DecodeState::reset() {
  for (std::int64_t b = 0; b < config_.batch; ++b) reset(b);
}

void DecodeState::reset(std::int64_t sequence) {
  check_sequence("DecodeState::reset", sequence);
  const DecodeShape shape = decode_shape(config_);
  for (std::int64_t h = 0; h < config_.heads_k; ++h) {
    clear(shape, slot_at(shape, memory_, sequence * config_.heads_k + h));
  }
  tokens_[static_cast<std::size_t>(sequence)] = 0;
}

void DecodeState::append(const AttentionInputs& in, const View& o, const Exec& exec) {
  count(run(DecodeVerb::append, config_, memory_, tokens_, in, o, exec), tokens_);
}

void DecodeState::read(const AttentionInputs& in, const View& o, const Exec& exec) const {
  // A read adds no keys, and its kernel writes no state.
  run(DecodeVerb::read, config_, memory_, tokens_, in, o, exec);
}

void DecodeState::step(const AttentionInputs& in, const View& o, const Exec& exec) {
  count(run(DecodeVerb::step, config_, memory_, tokens_, in, o, exec), tokens_);
}

void DecodeState::merge(const DecodeState& later) {
  memory_errors("DecodeState::merge", [&] { check_merge(*this, later); });
  const DecodeShape shape = decode_shape(config_);
  for (std::int64_t i = 0; i < slot_count(config_); ++i) {
    if (later.tokens_[static_cast<std::size_t>(i / config_.heads_k)] == 0) continue;
    const DecodeSlot into = slot_at(shape, memory_, i);
    const DecodeSlot other = slot_at(shape, later.memory_, i);
    fold(shape, into);
    lln::merge(shape, into.all, other.all);
    lln::merge(shape, into.recent, other.recent);
    std::copy(other.block_k, other.block_k + shape.block * (shape.dp + shape.dvp), into.block_k);
  }
  for (std::size_t b = 0; b < tokens_.size(); ++b) tokens_[b] += later.tokens_[b];
}

void DecodeState::copy_from(const DecodeState& other) {
  constexpr const char* kCall = "DecodeState::copy_from";
  memory_errors(kCall, [&] { check_same(kCall, *this, other); });
  if (this == &other) return;
  std::copy(other.memory_.begin(), other.memory_.end(), memory_.begin());
  std::copy(other.tokens_.begin(), other.tokens_.end(), tokens_.begin());
}

}  // namespace lln
