// The rules of a decode configuration.
// SPDX-License-Identifier: Apache-2.0
#include "api/decode_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "api/faults.h"
#include "api/validate.h"

namespace lln {
namespace {

constexpr double kMaxBytes = 0x1p56;

// An append of one token: what holds for it holds for the state.
Problem problem_of(const DecodeConfig& config) {
  Problem p;
  p.op = Op::append;
  p.batch = p.sequences = config.batch;
  p.heads = config.heads;
  p.heads_k = config.heads_k;
  p.tokens = p.tokens_k = 1;
  p.dim = config.dim;
  p.dim_v = config.dim_v;
  p.kind = config.kind;
  p.diag_block = p.has_diag() ? config.diag_block : 0;
  p.feature = config.feature;
  if (p.feature == Feature::power) p.power = config.power;
  return p;
}

// In f64, since the numbers of the configuration may be anything. Of at least one sequence: the
// size of a slot must fit also where there is none.
double estimated_bytes(const DecodeConfig& c) {
  const double block = c.kind == Kind::lln_diag ? static_cast<double>(c.diag_block) : 0;
  const double dp = static_cast<double>(c.dim) + kStatePad;
  const double dvp = static_cast<double>(c.dim_v) + kStatePad;
  const double floats = 2 * (2 * dp + static_cast<double>(c.dim) * dvp) + block * (dp + dvp);
  return 4 * floats * static_cast<double>(std::max<std::int64_t>(c.batch, 1)) *
         static_cast<double>(c.heads_k);
}

}  // namespace

void check_config(const char* call, const DecodeConfig& config) {
  Faults faults;
  const Problem p = problem_of(config);
  for (std::string& fault : problem_faults(p)) faults.add(std::move(fault));
  if (!p.has_lln()) faults.add("kind: decoding is of lln and lln+diagB alone");
  // Also where they play no part: a state with NaN here would not equal its own copy.
  if (!std::isfinite(config.mix)) {
    faults.add(fmt::format("mix is {}: expected a finite number", config.mix));
  }
  if (p.feature != Feature::power && !std::isfinite(config.power)) {
    faults.add(fmt::format("power is {}: expected a finite number", config.power));
  }
  if (const double bytes = estimated_bytes(config); faults.count() == 0 && bytes > kMaxBytes) {
    faults.add(fmt::format("a state of {:.3g} bytes is too large", bytes));
  }
  faults.throw_any(call, describe(config));
}

std::string describe(const DecodeConfig& c) {
  // A problem without its op, type, device and tokens.
  std::string text = to_string(problem_of(c));
  const std::string shape =
      fmt::format("b{}h{}k{}d{}v{}", c.batch, c.heads, c.heads_k, c.dim, c.dim_v);
  std::size_t colon = 0;
  for (int i = 0; i < 4; ++i) colon = text.find(':', colon) + 1;
  text = shape + ":" + text.substr(colon);
  if (c.kind == Kind::lln_diag) text += fmt::format(" mix {}", c.mix);
  return text;
}

DecodeShape decode_shape(const DecodeConfig& config) noexcept {
  return {config.dim, config.dim_v, config.kind == Kind::lln_diag ? config.diag_block : 0};
}

std::int64_t slot_count(const DecodeConfig& config) noexcept {
  return config.batch * config.heads_k;
}

std::size_t slot_bytes(const DecodeConfig& config) noexcept {
  return static_cast<std::size_t>(slot_count(config) * decode_shape(config).floats()) *
         sizeof(float);
}

std::size_t state_bytes(const DecodeConfig& config, Device device) noexcept {
  if (device.kind == DeviceKind::cpu) return slot_bytes(config);
  return slot_bytes(config) + static_cast<std::size_t>(slot_count(config)) * sizeof(std::int64_t);
}

cuda::DecodeSlots device_slots(const DecodeConfig& config, std::span<std::byte> memory) noexcept {
  return {reinterpret_cast<float*>(memory.data()),
          reinterpret_cast<std::int64_t*>(memory.data() + slot_bytes(config))};
}

DecodeSlot slot_at(const DecodeShape& shape, std::span<std::byte> memory,
                   std::int64_t index) noexcept {
  return shape.slot(reinterpret_cast<float*>(memory.data()), index);
}

}  // namespace lln
