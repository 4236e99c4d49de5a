// Any bytes given as a saved decode state, with the checksum that belongs to them, since no fuzzer
// finds that: refused with an lln::Error, or a state that saves what it has loaded and takes a
// token.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "lln/decode.h"
#include "lln/error.h"
#include "math/fnv.h"

namespace {

constexpr std::size_t kAlignment = 64;
// Larger states, and more query heads, which cost rows but no state, show nothing new.
constexpr std::size_t kMostMemory = std::size_t{1} << 24;
constexpr std::int64_t kMostHeads = 1024;
constexpr std::size_t kChecksumBytes = 8;

std::vector<std::byte> with_checksum(std::span<const std::byte> input) {
  std::vector<std::byte> bytes(input.begin(), input.end());
  if (bytes.size() < kChecksumBytes) return bytes;
  const std::size_t end = bytes.size() - kChecksumBytes;
  std::uint64_t sum = lln::fnv1a(std::span(bytes).first(end));
  for (std::size_t i = end; i < bytes.size(); ++i, sum >>= 8) {
    bytes[i] = static_cast<std::byte>(sum);
  }
  return bytes;
}

std::vector<std::byte> saved(const lln::DecodeState& state) {
  std::vector<std::byte> bytes(state.saved_bytes());
  state.save(bytes);
  return bytes;
}

void step(lln::DecodeState& state) {
  const lln::DecodeConfig& c = state.config();
  const auto floats = [&](std::int64_t heads, std::int64_t channels) {
    return std::vector<float>(static_cast<std::size_t>(c.batch * heads * channels), 0.5F);
  };
  const std::vector<float> q = floats(c.heads, c.dim);
  const std::vector<float> k = floats(c.heads_k, c.dim);
  const std::vector<float> v = floats(c.heads_k, c.dim_v);
  std::vector<float> o = floats(c.heads, c.dim_v);
  const float one = 1;
  state.step({.q = lln::view(q.data(), lln::Shape{c.batch, c.heads, 1, c.dim}),
              .k = lln::view(k.data(), lln::Shape{c.batch, c.heads_k, 1, c.dim}),
              .v = lln::view(v.data(), lln::Shape{c.batch, c.heads_k, 1, c.dim_v}),
              .alpha = lln::scalar(&one),
              .beta = lln::scalar(&one)},
             lln::view(o.data(), lln::Shape{c.batch, c.heads, 1, c.dim_v}));
}

void load_and_step(std::span<const std::byte> bytes) {
  const lln::DecodeConfig config = lln::saved_decode_config(bytes);
  const std::size_t needed = lln::decode_state_bytes(config);
  // The scratch memory of a step grows with the block even where there is no sequence.
  lln::DecodeConfig one = config;
  one.batch = std::max<std::int64_t>(config.batch, 1);
  if (lln::decode_state_bytes(one) > kMostMemory || config.heads > kMostHeads) return;
  struct AlignedDelete {
    void operator()(std::byte* p) const noexcept {
      ::operator delete[](p, std::align_val_t{kAlignment});
    }
  };
  const std::unique_ptr<std::byte[], AlignedDelete> memory(new (std::align_val_t{kAlignment})
                                                               std::byte[needed]);
  lln::DecodeState state(config, {memory.get(), needed});
  state.load(bytes);
  const std::vector<std::byte> once = saved(state);
  state.load(once);
  if (saved(state) != once) std::abort();
  std::vector<std::int64_t> tokens;
  for (std::int64_t b = 0; b < config.batch; ++b) tokens.push_back(state.tokens(b));
  step(state);
  state.load(saved(state));
  for (std::int64_t b = 0; b < config.batch; ++b) {
    if (state.tokens(b) != tokens[static_cast<std::size_t>(b)] + 1) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    load_and_step(with_checksum(std::as_bytes(std::span(data, size))));
  } catch (const lln::Error& e) {
    if (e.code() != lln::ErrorCode::invalid_argument) std::abort();
  }
  return 0;
}
