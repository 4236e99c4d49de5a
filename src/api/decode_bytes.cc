// A decode state as bytes and back. Everything is little-endian and without padding, so that bytes
// from any machine fit any other; docs/decoding.md has the table of fields.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>

#include "api/decode_config.h"
#include "api/memory_errors.h"
#include "cuda/host.h"
#include "lln/decode.h"
#include "lln/error.h"
#include "math/fnv.h"

namespace lln {
namespace {

constexpr std::array<char, 8> kMagic = {'l', 'l', 'n', 's', 't', 'a', 't', 'e'};
constexpr std::uint32_t kVersion = 1;
// Magic, version, kind, feature, power, mix, a zero, and six integers of 64 bits.
constexpr std::size_t kHeaderBytes = 8 + 6 * 4 + 6 * 8;
constexpr std::size_t kChecksumBytes = 8;

class Writer {
 public:
  explicit Writer(std::byte* at) : at_(at) {}
  template <class T>
  void number(T value) {
    auto bits = static_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i, bits >>= 8) *at_++ = static_cast<std::byte>(bits);
  }
  void real(float value) { number(std::bit_cast<std::uint32_t>(value)); }
  void reals(const float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) real(values[i]);
  }
  void zeros(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) real(0);
  }
  void text(const std::array<char, 8>& value) {
    std::memcpy(at_, value.data(), value.size());
    at_ += value.size();
  }

 private:
  std::byte* at_;
};

// Reads what is known to be there.
class Reader {
 public:
  explicit Reader(const std::byte* at) : at_(at) {}
  template <class T>
  T number() {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
      bits |= std::to_integer<std::uint64_t>(*at_++) << 8 * i;
    return static_cast<T>(bits);
  }
  float real() { return std::bit_cast<float>(number<std::uint32_t>()); }
  void reals(float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = real();
  }
  bool starts_with(const std::array<char, 8>& value) {
    const bool same = std::memcmp(at_, value.data(), value.size()) == 0;
    at_ += value.size();
    return same;
  }

 private:
  const std::byte* at_;
};

std::size_t bytes_of(const DecodeConfig& config) noexcept {
  const DecodeShape shape = decode_shape(config);
  const std::int64_t slot =
      2 * (2 * shape.d + shape.d * shape.dv) + shape.block * (shape.d + shape.dv);
  return kHeaderBytes + 8 * static_cast<std::size_t>(config.batch) +
         4 * static_cast<std::size_t>(slot_count(config) * slot) + kChecksumBytes;
}

// Calls row(numbers, count, used) for the rows of a slot in the order of the bytes. Rows of the
// block that are not used, since no key is in them, may hold anything.
template <class Row>
void each_row(const DecodeShape& shape, const DecodeSlot& slot, std::int64_t tokens, Row&& row) {
  for (const KeySet& set : {slot.all, slot.recent}) {
    row(set.m, shape.d, true);
    row(set.s, shape.d, true);
    for (std::int64_t l = 0; l < shape.d; ++l) row(set.values + l * shape.dvp, shape.dv, true);
  }
  const std::int64_t used = shape.block_tokens(tokens);
  for (std::int64_t j = 0; j < shape.block; ++j) {
    row(slot.block_k + j * shape.dp, shape.d, j < used);
  }
  for (std::int64_t j = 0; j < shape.block; ++j) {
    row(slot.block_v + j * shape.dvp, shape.dv, j < used);
  }
}

[[noreturn]] void refuse(const char* call, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, fmt::format("{}: {}", call, why));
}

DecodeConfig read_config(const char* call, std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes) {
    refuse(call, fmt::format("{} bytes are no saved decode state: expected at least {}",
                             bytes.size(), kHeaderBytes));
  }
  Reader in(bytes.data());
  if (!in.starts_with(kMagic)) {
    refuse(call, "these bytes are no saved decode state: they do not begin with 'llnstate'");
  }
  const auto version = in.number<std::uint32_t>();
  if (version != kVersion) {
    refuse(call, fmt::format("the bytes have version {}: this build reads version {}", version,
                             kVersion));
  }
  DecodeConfig config;
  const auto kind = in.number<std::uint32_t>();
  const auto feature = in.number<std::uint32_t>();
  config.power = in.real();
  config.mix = in.real();
  const auto zero = in.number<std::uint32_t>();
  for (std::int64_t* field : {&config.batch, &config.heads, &config.heads_k, &config.dim,
                              &config.dim_v, &config.diag_block}) {
    *field = in.number<std::int64_t>();
  }
  if (kind > static_cast<std::uint32_t>(Kind::softmax) ||
      feature > static_cast<std::uint32_t>(Feature::power) || zero != 0) {
    refuse(call, fmt::format("the bytes are corrupt: kind {}, feature {}, reserved {}", kind,
                             feature, zero));
  }
  config.kind = static_cast<Kind>(kind);
  config.feature = static_cast<Feature>(feature);
  check_config(call, config);
  return config;
}

// The configuration of bytes that are whole: every length fits and nothing has changed.
DecodeConfig check_bytes(const char* call, std::span<const std::byte> bytes) {
  const DecodeConfig config = read_config(call, bytes);
  const std::size_t expected = bytes_of(config);
  if (bytes.size() != expected) {
    refuse(call, fmt::format("{} bytes: a saved state of {} has {}", bytes.size(), describe(config),
                             expected));
  }
  const std::size_t end = expected - kChecksumBytes;
  const std::uint64_t found = Reader(bytes.data() + end).number<std::uint64_t>();
  const std::uint64_t sum = fnv1a(bytes.first(end));
  if (found != sum) {
    refuse(call, fmt::format("the bytes are corrupt: their checksum is {:016x}, stored is {:016x}",
                             sum, found));
  }
  Reader tokens(bytes.data() + kHeaderBytes);
  for (std::int64_t b = 0; b < config.batch; ++b) {
    const auto count = tokens.number<std::int64_t>();
    if (count < 0 || count > kMostTokens) {
      refuse(call,
             fmt::format("sequence {} has {} tokens: expected 0 to {}", b, count, kMostTokens));
    }
  }
  return config;
}

// Bytes that have been checked.
void read_state(const DecodeConfig& config, std::span<const std::byte> bytes,
                std::span<std::byte> memory, std::span<std::int64_t> tokens) {
  Reader from(bytes.data() + kHeaderBytes);
  for (std::int64_t& count : tokens) count = from.number<std::int64_t>();
  const DecodeShape shape = decode_shape(config);
  for (std::int64_t i = 0; i < slot_count(config); ++i) {
    each_row(shape, slot_at(shape, memory, i), tokens[static_cast<std::size_t>(i / config.heads_k)],
             [&](float* row, std::int64_t count, bool) { from.reals(row, count); });
  }
}

}  // namespace

std::size_t DecodeState::saved_bytes() const noexcept { return bytes_of(config_); }

// What may fail, allocations and copies from a device, comes before the first byte is written.
void DecodeState::save(std::span<std::byte> out) const {
  constexpr const char* kCall = "DecodeState::save";
  if (out.size() != saved_bytes()) {
    memory_errors(kCall, [&] {
      refuse(kCall, fmt::format("{} bytes for a state of {}: expected {}", out.size(),
                                describe(config_), saved_bytes()));
    });
  }
  std::span<std::byte> memory = memory_;
  std::vector<std::byte> copy;
  std::vector<std::int64_t> copied_tokens;
  if (!on_host()) {
    memory_errors(kCall, [&] {
      copied_tokens = device_counts();
      copy.resize(slot_bytes(config_));
      const cuda::CurrentDevice current(device_.index);
      cuda::copy_to_host(copy.data(), memory_.data(), copy.size(), stream_);
      memory = copy;
    });
  }
  const std::vector<std::int64_t>& seen = on_host() ? tokens_ : copied_tokens;
  Writer to(out.data());
  to.text(kMagic);
  to.number(kVersion);
  to.number(static_cast<std::uint32_t>(config_.kind));
  to.number(static_cast<std::uint32_t>(config_.feature));
  to.real(config_.power);
  to.real(config_.mix);
  to.number(std::uint32_t{0});
  for (const std::int64_t field : {config_.batch, config_.heads, config_.heads_k, config_.dim,
                                   config_.dim_v, config_.diag_block}) {
    to.number(field);
  }
  for (const std::int64_t count : seen) to.number(count);
  const DecodeShape shape = decode_shape(config_);
  for (std::int64_t i = 0; i < slot_count(config_); ++i) {
    const std::int64_t tokens = seen[static_cast<std::size_t>(i / config_.heads_k)];
    each_row(shape, slot_at(shape, memory, i), tokens,
             [&](const float* row, std::int64_t count, bool used) {
               // Equal states have equal bytes.
               used ? to.reals(row, count) : to.zeros(count);
             });
  }
  to.number(fnv1a(out.first(out.size() - kChecksumBytes)));
}

void DecodeState::load(std::span<const std::byte> bytes) {
  constexpr const char* kCall = "DecodeState::load";
  memory_errors(kCall, [&] {
    const DecodeConfig config = check_bytes(kCall, bytes);
    if (config == config_) return;
    refuse(kCall, fmt::format("the bytes are of {}: this state is of {}", describe(config),
                              describe(config_)));
  });
  if (on_host()) {
    read_state(config_, bytes, memory_, tokens_);
    return;
  }
  memory_errors(kCall, [&] {
    std::vector<std::byte> copy(memory_.size());
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(config_.batch));
    read_state(config_, bytes, copy, tokens);
    std::int64_t* const counts = device_slots(config_, copy).tokens;
    for (std::int64_t i = 0; i < slot_count(config_); ++i) {
      counts[i] = tokens[static_cast<std::size_t>(i / config_.heads_k)];
    }
    const cuda::CurrentDevice current(device_.index);
    cuda::copy_from_host(memory_.data(), copy.data(), copy.size(), stream_);
  });
}

DecodeConfig saved_decode_config(std::span<const std::byte> bytes) {
  return memory_errors("saved_decode_config",
                       [&] { return check_bytes("saved_decode_config", bytes); });
}

}  // namespace lln
