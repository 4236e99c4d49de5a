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
#include "cuda/host.h"
#include "lln/error.h"

namespace lln {
namespace {

void check_count(Faults& faults, std::size_t sequence, std::int64_t before, std::int64_t added) {
  if (added <= kMostTokens - before) return;
  faults.add(fmt::format("sequence {} has {} tokens and would get {} more: expected at most {}",
                         sequence, before, added, kMostTokens));
}

// What a call of a state works on.
struct Place {
  std::span<std::byte> memory;
  Device device;
  void* stream;
  std::span<const std::int64_t> tokens;
};

// Returns what each sequence has added; of a state on a device nothing, which it counts itself.
std::vector<Sequence> run(DecodeVerb verb, const DecodeConfig& config, const Place& place,
                          const AttentionInputs& in, const View& o, const Exec& exec) {
  return memory_errors(call_name(verb), [&] {
    CheckedCall checked = check_decode(verb, config, in, o);
    Call& call = checked.call;
    Faults faults;
    if (call.problem.device != place.device) {
      faults.add(fmt::format("the tensors are on {} and the state is on {}",
                             to_string(call.problem.device), to_string(place.device)));
    }
    for (std::size_t b = 0; b < checked.sequences.size() && b < place.tokens.size(); ++b) {
      check_count(faults, b, place.tokens[b], checked.sequences[b].k_tokens);
    }
    if (faults.count() > 0) faults.throw_any(call_name(verb), to_string(call.problem));
    call.state = reinterpret_cast<float*>(place.memory.data());
    call.tokens_before = place.tokens;
    Exec where = exec;
    if (place.device.kind != DeviceKind::cpu) {
      call.slot_tokens = device_slots(config, place.memory).tokens;
      if (where.stream == nullptr) where.stream = place.stream;
    }
    run_call(call_name(verb), checked, where);
    return std::move(checked.sequences);
  });
}

void count(const std::vector<Sequence>& added, std::span<std::int64_t> tokens) noexcept {
  for (std::size_t b = 0; b < tokens.size(); ++b) tokens[b] += added[b].k_tokens;
}

void check_same(const char* call, const DecodeState& own, const DecodeState& other) {
  if (own.config() != other.config()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: a state of {} and one of {}: expected the same configuration",
                            call, describe(own.config()), describe(other.config())));
  }
  if (own.device() != other.device()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: a state on {} and one on {}: expected the same device", call,
                            to_string(own.device()), to_string(other.device())));
  }
}

void check_merge(const DecodeState& own, std::span<const std::int64_t> tokens,
                 const DecodeState& later, std::span<const std::int64_t> later_tokens) {
  constexpr const char* kCall = "DecodeState::merge";
  Faults faults;
  if (&own == &later) faults.add("a state cannot follow itself");
  const std::int64_t block = decode_shape(own.config()).block;
  for (std::size_t b = 0; b < tokens.size(); ++b) {
    check_count(faults, b, tokens[b], later_tokens[b]);
    if (block == 0 || later_tokens[b] == 0 || tokens[b] % block == 0) continue;
    faults.add(
        fmt::format("sequence {} has {} tokens, which is no multiple of the block of {}, so that "
                    "the blocks of the {} later ones do not begin at a border",
                    b, tokens[b], block, later_tokens[b]));
  }
  if (faults.count() > 0) faults.throw_any(kCall, describe(own.config()));
}

}  // namespace

std::size_t decode_state_bytes(const DecodeConfig& config, Device device) {
  return memory_errors("decode_state_bytes", [&] {
    check_config("decode_state_bytes", config);
    return state_bytes(config, device);
  });
}

DecodeState::DecodeState(AsItIs, const DecodeConfig& config, std::span<std::byte> memory,
                         Device device, void* stream)
    : config_(config), memory_(memory), device_(device), stream_(stream) {
  memory_errors("DecodeState", [&] {
    check_config("DecodeState", config);
    const std::size_t needed = state_bytes(config, device);
    Faults faults;
    if (memory.size() < needed) {
      faults.add(fmt::format("memory has {} bytes: expected {}", memory.size(), needed));
    }
    if (const auto off = reinterpret_cast<std::uintptr_t>(memory.data()) % 64; off != 0) {
      faults.add(fmt::format("memory starts {} bytes past a multiple of 64", off));
    }
    faults.throw_any("DecodeState", describe(config));
    memory_ = memory.first(needed);
    if (on_host()) {
      tokens_.resize(static_cast<std::size_t>(config.batch));
    } else if (const std::string refusal = cuda::device_refusal(device.index); !refusal.empty()) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("DecodeState: no state of {} on {}: {}", describe(config),
                              to_string(device), refusal));
    }
  });
}

DecodeState::DecodeState(const DecodeConfig& config, std::span<std::byte> memory, Device device,
                         void* stream)
    : DecodeState(AsItIs{}, config, memory, device, stream) {
  reset();
}

DecodeState DecodeState::resume(const DecodeConfig& config, std::span<std::byte> memory,
                                std::span<const std::int64_t> tokens, Device device, void* stream) {
  DecodeState state(AsItIs{}, config, memory, device, stream);
  memory_errors("DecodeState::resume", [&] {
    Faults faults;
    if (tokens.size() != state.tokens_.size()) {
      faults.add(fmt::format("{} counts of tokens are given: expected {}", tokens.size(),
                             state.tokens_.size()));
    }
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      if (tokens[b] >= 0 && tokens[b] <= kMostTokens) continue;
      faults.add(
          fmt::format("sequence {} has {} tokens: expected 0 to {}", b, tokens[b], kMostTokens));
    }
    faults.throw_any("DecodeState::resume", describe(config));
  });
  std::copy(tokens.begin(), tokens.end(), state.tokens_.begin());
  return state;
}

DecodeState::DecodeState(DecodeState&& other) noexcept
    : config_(other.config_),
      memory_(std::exchange(other.memory_, {})),
      device_(other.device_),
      stream_(other.stream_),
      tokens_(std::exchange(other.tokens_, {})) {
  other.config_.batch = 0;
}

DecodeState& DecodeState::operator=(DecodeState&& other) noexcept {
  if (this == &other) return *this;
  config_ = other.config_;
  memory_ = std::exchange(other.memory_, {});
  device_ = other.device_;
  stream_ = other.stream_;
  tokens_ = std::exchange(other.tokens_, {});
  other.config_.batch = 0;
  return *this;
}

std::int64_t DecodeState::tokens(std::int64_t sequence) const {
  check_sequence("DecodeState::tokens", sequence);
  if (on_host()) return tokens_[static_cast<std::size_t>(sequence)];
  return memory_errors("DecodeState::tokens", [&] {
    const cuda::CurrentDevice current(device_.index);
    const std::int64_t* const counts = device_slots(config_, memory_).tokens;
    std::int64_t count = 0;
    cuda::copy_to_host(&count, counts + sequence * config_.heads_k, sizeof count, stream_);
    cuda::throw_reported_faults(device_.index);
    return count;
  });
}

std::vector<std::int64_t> DecodeState::device_counts() const {
  const auto slots = static_cast<std::size_t>(slot_count(config_));
  std::vector<std::int64_t> counts(slots);
  const cuda::CurrentDevice current(device_.index);
  cuda::copy_to_host(counts.data(), device_slots(config_, memory_).tokens,
                     slots * sizeof(std::int64_t), stream_);
  cuda::throw_reported_faults(device_.index);
  for (std::size_t b = 0; b < static_cast<std::size_t>(config_.batch); ++b) {
    counts[b] =
        counts[b * static_cast<std::size_t>(config_.heads_k)];  // all its heads have as many
  }
  counts.resize(static_cast<std::size_t>(config_.batch));
  return counts;
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
  if (on_host()) {
    for (std::int64_t b = 0; b < config_.batch; ++b) reset(b);
  } else {
    const cuda::CurrentDevice current(device_.index);
    cuda::decode_clear(decode_shape(config_), device_slots(config_, memory_), 0,
                       slot_count(config_), stream_);
  }
}

void DecodeState::reset(std::int64_t sequence) {
  check_sequence("DecodeState::reset", sequence);
  const DecodeShape shape = decode_shape(config_);
  if (!on_host()) {
    const cuda::CurrentDevice current(device_.index);
    cuda::decode_clear(shape, device_slots(config_, memory_), sequence * config_.heads_k,
                       config_.heads_k, stream_);
    return;
  }
  for (std::int64_t h = 0; h < config_.heads_k; ++h) {
    clear(shape, slot_at(shape, memory_, sequence * config_.heads_k + h));
  }
  tokens_[static_cast<std::size_t>(sequence)] = 0;
}

void DecodeState::append(const AttentionInputs& in, const View& o, const Exec& exec) {
  const Place place{memory_, device_, stream_, tokens_};
  count(run(DecodeVerb::append, config_, place, in, o, exec), tokens_);
}

void DecodeState::read(const AttentionInputs& in, const View& o, const Exec& exec) const {
  // A read adds no keys, and its kernel writes no state.
  const Place place{memory_, device_, stream_, tokens_};
  run(DecodeVerb::read, config_, place, in, o, exec);
}

void DecodeState::step(const AttentionInputs& in, const View& o, const Exec& exec) {
  const Place place{memory_, device_, stream_, tokens_};
  count(run(DecodeVerb::step, config_, place, in, o, exec), tokens_);
}

void DecodeState::merge(const DecodeState& later) {
  memory_errors("DecodeState::merge", [&] {
    check_same("DecodeState::merge", *this, later);
    std::vector<std::int64_t> own, other;
    if (!on_host()) {  // waits for all work of both states
      own = device_counts();
      other = later.device_counts();
    }
    check_merge(*this, on_host() ? tokens_ : own, later, on_host() ? later.tokens_ : other);
  });
  const DecodeShape shape = decode_shape(config_);
  if (!on_host()) {
    const cuda::CurrentDevice current(device_.index);
    cuda::decode_merge(shape, device_slots(config_, memory_), device_slots(config_, later.memory_),
                       slot_count(config_), stream_);
    return;
  }
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
  if (!on_host()) {
    const cuda::CurrentDevice current(device_.index);
    cuda::copy_on_device(memory_.data(), other.memory_.data(), memory_.size(), stream_);
    return;
  }
  std::copy(other.memory_.begin(), other.memory_.end(), memory_.begin());
  std::copy(other.tokens_.begin(), other.tokens_.end(), tokens_.begin());
}

}  // namespace lln
