// The text form of a problem. The grammar is in lln/problem.h; the rules that a problem must obey
// whatever its data are in problem_faults(), shared with the validation of calls.
// SPDX-License-Identifier: Apache-2.0
#include "lln/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "api/validate.h"
#include "lln/error.h"
#include "math/state.h"

namespace lln {
namespace {

constexpr std::int64_t kMaxDim = 256;
// So that byte offsets and the sizes of all scratch memory fit 64 bits.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMaxSequences = std::int64_t{1} << 31;
constexpr double kMaxElements = 0x1p56;  // of one tensor

[[noreturn]] void fail(std::string_view text, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, fmt::format("problem '{}': {}", text, why));
}

// Splits off the part up to the next ':' (or the end).
std::optional<std::string_view> take_part(std::string_view& rest, bool& more) {
  if (!more) return std::nullopt;
  const std::size_t colon = rest.find(':');
  const std::string_view part = rest.substr(0, colon);
  more = colon != std::string_view::npos;
  rest = more ? rest.substr(colon + 1) : std::string_view{};
  return part;
}

template <class Enum, std::size_t N>
std::optional<Enum> find_name(const Enum (&values)[N], std::string_view name) {
  for (const Enum value : values) {
    if (name == to_string(value)) return value;
  }
  return std::nullopt;
}

// Digits only: no sign, no spaces, no overflow.
std::optional<std::int64_t> parse_count(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || text[0] == '-' || error != std::errc{} || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

std::optional<Device> parse_device(std::string_view text) {
  if (text == "cpu") return Device{};
  if (text == "cuda") return Device{DeviceKind::cuda, 0};
  return std::nullopt;
}

void parse_shape(std::string_view text, std::string_view shape, Problem& p) {
  constexpr std::string_view kLetters = "bhknmdv";
  std::int64_t* const fields[] = {&p.batch,    &p.heads, &p.heads_k, &p.tokens,
                                  &p.tokens_k, &p.dim,   &p.dim_v};
  bool seen[kLetters.size()] = {};
  for (std::size_t i = 0; i < shape.size();) {
    const std::size_t letter = kLetters.find(shape[i]);
    if (letter == std::string_view::npos) {
      fail(text, fmt::format("shape '{}': expected one of the letters b h k n m d v before '{}'",
                             shape, shape.substr(i)));
    }
    const std::size_t begin = ++i;
    while (i < shape.size() && shape[i] >= '0' && shape[i] <= '9') ++i;
    const auto value = parse_count(shape.substr(begin, i - begin));
    if (!value) {
      fail(text, fmt::format("shape '{}': '{}' needs a whole number below 2^63 behind it", shape,
                             kLetters[letter]));
    }
    if (seen[letter]) fail(text, fmt::format("shape '{}': '{}' twice", shape, kLetters[letter]));
    seen[letter] = true;
    *fields[letter] = *value;
  }
  if (!seen[3] || !seen[5]) fail(text, fmt::format("shape '{}': n and d are required", shape));
  if (!seen[2]) p.heads_k = p.heads;
  if (!seen[4]) p.tokens_k = p.tokens;
  if (!seen[6]) p.dim_v = p.dim;
}

void parse_flag(std::string_view text, std::string_view flag, std::vector<std::string>& seen,
                Problem& p) {
  const std::string name(flag.substr(0, flag.find('=')));
  if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
    fail(text, fmt::format("flag '{}' twice", name));
  }
  seen.push_back(name);
  if (flag == "causal") {
    p.causal = true;
  } else if (flag == "masked") {
    p.masked = true;
  } else if (flag == "state") {
    p.state = true;
  } else if (flag == "block_origins") {
    p.block_origins = true;
  } else if (flag == "packed") {
    p.packed = true;
  } else if (flag.starts_with("packed=")) {
    const auto count = parse_count(flag.substr(7));
    if (!count) fail(text, fmt::format("flag '{}': expected a number of sequences", flag));
    p.packed = true;
    p.sequences = *count;
  } else if (flag.starts_with("feature=")) {
    parse_feature(flag.substr(8), p.feature, p.power);
  } else {
    fail(text, fmt::format("unknown flag '{}': expected causal, packed, packed=SEQUENCES, "
                           "masked, state, block_origins or feature=NAME",
                           flag));
  }
}

std::string kind_text(const Problem& p) {
  switch (p.kind) {
    case Kind::lln:
      return "lln";
    case Kind::diag:
      return fmt::format("diag{}", p.diag_block);
    case Kind::lln_diag:
      return fmt::format("lln+diag{}", p.diag_block);
    case Kind::softmax:
      return "softmax";
  }
  return "?";
}

}  // namespace

const char* to_string(Op op) noexcept {
  switch (op) {
    case Op::forward:
      return "forward";
    case Op::backward:
      return "backward";
    case Op::append:
      return "append";
    case Op::step:
      return "step";
    case Op::train:
      return "train";
  }
  return "?";
}

const char* to_string(Feature feature) noexcept {
  switch (feature) {
    case Feature::exp:
      return "exp";
    case Feature::elu:
      return "elu";
    case Feature::relu:
      return "relu";
    case Feature::softplus:
      return "softplus";
    case Feature::power:
      return "power";
  }
  return "?";
}

std::vector<std::string> problem_faults(const Problem& p) {
  std::vector<std::string> faults;
  // Texts are made for faults alone: every call comes through here, a decode step of 2 us too.
  const auto expect = [&]<class... Args>(bool ok, fmt::format_string<Args...> text,
                                         Args&&... args) {
    if (!ok) faults.push_back(fmt::format(text, std::forward<Args>(args)...));
  };
  const auto within = [](std::int64_t value, std::int64_t most) {
    return value >= 0 && value <= most;
  };
  expect(within(p.tokens, kMaxTokens) && within(p.tokens_k, kMaxTokens),
         "tokens must be 0 to {}: {} of q, {} of k", kMaxTokens, p.tokens, p.tokens_k);
  expect(within(p.batch, kMaxSequences) && within(p.sequences, kMaxSequences),
         "batch and sequences must be 0 to {}: batch {}, {} sequences", kMaxSequences, p.batch,
         p.sequences);
  expect(p.heads >= 1 && p.heads_k >= 1,
         "at least one head is needed: {} query heads, {} key heads", p.heads, p.heads_k);
  expect(p.heads_k < 1 || p.heads % p.heads_k == 0,
         "query heads must be a multiple of key heads: {} and {}", p.heads, p.heads_k);
  expect(p.dim >= 1 && p.dim <= kMaxDim, "channels of q and k must be 1 to {}: {}", kMaxDim, p.dim);
  expect(p.dim_v >= 1 && p.dim_v <= kMaxDim, "channels of v must be 1 to {}: {}", kMaxDim, p.dim_v);
  const double widest = static_cast<double>(std::max(p.dim, p.dim_v)) *
                        static_cast<double>(std::max(p.heads, p.heads_k)) *
                        static_cast<double>(std::max(p.tokens, p.tokens_k)) *
                        static_cast<double>(p.batch);
  expect(widest <= kMaxElements, "a tensor of {:.3g} elements is too large", widest);
  // Kernels pad the channels of states.
  const double states = static_cast<double>(std::max(p.dim, kStatePad)) *
                        static_cast<double>(std::max(p.dim_v, kStatePad)) *
                        static_cast<double>(p.heads_k) * static_cast<double>(p.sequences);
  expect(!p.has_lln() || states <= kMaxElements,
         "states of {:.3g} elements are too large: {} sequences, {} key heads", states, p.sequences,
         p.heads_k);
  expect(!p.has_diag() || (p.diag_block >= 1 && p.diag_block <= kMaxTokens),
         "the block size must be 1 to {}: {}", kMaxTokens, p.diag_block);
  const bool cross = p.tokens != p.tokens_k;
  expect(!(cross && p.causal),
         "causal attention needs as many keys as queries, since row i sees keys up to "
         "i: {} queries, {} keys",
         p.tokens, p.tokens_k);
  const bool decoding = p.op == Op::append || p.op == Op::step;
  expect(decoding || !(cross && p.has_diag()),
         "block-diagonal attention needs as many keys as queries, since a block holds "
         "the same tokens of both: {} queries, {} keys",
         p.tokens, p.tokens_k);
  if (p.feature != Feature::exp && !p.has_lln()) {
    expect(false, "feature {} belongs to LLN; {} has none", to_string(p.feature), kind_text(p));
  }
  expect(std::isfinite(p.power) && p.power > 0, "the power must be positive and finite: {}",
         p.power);
  if (p.state && !p.has_lln()) {
    expect(false, "a state of keys belongs to LLN; {} has none", kind_text(p));
  }
  if (p.block_origins && !p.has_diag()) {
    expect(false, "block_origins belongs to Diag and LLN+Diag; {} has no blocks", kind_text(p));
  }
  expect(!p.packed || p.batch == 1, "packed sequences need batch 1: batch {}", p.batch);
  expect(!(p.packed && p.masked), "packed sequences take no key mask and no key lengths");
  if (decoding) {
    expect(!p.causal, "decoding is causal without the flag");
    expect(!p.state, "decoding keeps a state of its own and takes no other");
    expect(!p.block_origins, "decoding counts blocks from the first token: block_origins is given");
    expect(!p.packed, "decoding takes a batch of sequences, not packed ones");
    expect(p.op != Op::append || p.tokens == p.tokens_k || p.tokens == 0,
           "an append has a row for each new key or none: {} rows, {} keys", p.tokens, p.tokens_k);
    expect(p.op != Op::step || p.tokens_k == 0 || (p.tokens == 1 && p.tokens_k == 1),
           "a step has one row and one key, or only rows: {} rows, {} keys", p.tokens, p.tokens_k);
  }
  expect(p.packed || p.sequences == p.batch, "{} sequences with batch {}: only packed ones differ",
         p.sequences, p.batch);
  return faults;
}

void parse_kind(std::string_view text, Kind& kind, std::int64_t& diag_block) {
  const auto block = [&](std::string_view digits) {
    const auto value = parse_count(digits);
    if (!value || *value < 1) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("kind '{}': expected a block size of at least 1 behind 'diag', as in "
                              "diag64",
                              text));
    }
    return *value;
  };
  if (text == "lln") {
    kind = Kind::lln;
    diag_block = 0;
  } else if (text == "softmax") {
    kind = Kind::softmax;
    diag_block = 0;
  } else if (text.starts_with("diag")) {
    diag_block = block(text.substr(4));
    kind = Kind::diag;
  } else if (text.starts_with("lln+diag")) {
    diag_block = block(text.substr(8));
    kind = Kind::lln_diag;
  } else {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("unknown kind '{}': expected lln, diagB, lln+diagB or softmax", text));
  }
}

void parse_feature(std::string_view text, Feature& feature, float& power) {
  constexpr Feature kPlain[] = {Feature::exp, Feature::elu, Feature::relu, Feature::softplus};
  if (const auto plain = find_name(kPlain, text)) {
    feature = *plain;
    power = 2;
    return;
  }
  if (text.starts_with("power")) {
    const std::string_view digits = text.substr(5);
    float value = 2;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool whole = end == digits.data() + digits.size();
    if (digits.empty() || (error == std::errc{} && whole && std::isfinite(value) && value > 0)) {
      feature = Feature::power;
      power = value;
      return;
    }
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("unknown feature '{}': expected exp, elu, relu, softplus or powerP with "
                          "P > 0",
                          text));
}

std::string to_string(const Problem& p) {
  std::string text = fmt::format("{}:{}:{}:b{}h{}", to_string(p.op), to_string(p.dtype),
                                 to_string(p.device), p.batch, p.heads);
  if (p.heads_k != p.heads) text += fmt::format("k{}", p.heads_k);
  text += fmt::format("n{}", p.tokens);
  if (p.tokens_k != p.tokens) text += fmt::format("m{}", p.tokens_k);
  text += fmt::format("d{}", p.dim);
  if (p.dim_v != p.dim) text += fmt::format("v{}", p.dim_v);
  text += ":" + kind_text(p);
  if (p.causal) text += ":causal";
  if (p.packed) text += p.sequences == 1 ? ":packed" : fmt::format(":packed={}", p.sequences);
  if (p.masked) text += ":masked";
  if (p.state) text += ":state";
  if (p.block_origins) text += ":block_origins";
  if (p.feature == Feature::power) {
    text += fmt::format(":feature=power{}", p.power);
  } else if (p.feature != Feature::exp) {
    text += fmt::format(":feature={}", to_string(p.feature));
  }
  return text;
}

Problem parse_problem(std::string_view text) {
  constexpr Op kOps[] = {Op::forward, Op::backward, Op::append, Op::step, Op::train};
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
  Problem p;
  std::string_view rest = text;
  bool more = true;
  const std::string_view op = take_part(rest, more).value_or("");
  const std::string_view dtype = take_part(rest, more).value_or("");
  const std::string_view device = take_part(rest, more).value_or("");
  // A device index looks like a part of its own: cuda:1.
  std::optional<std::int64_t> index;
  if (device == "cuda" && more) index = parse_count(rest.substr(0, rest.find(':')));
  if (index) take_part(rest, more);
  const std::string_view shape = take_part(rest, more).value_or("");
  const auto kind = take_part(rest, more);
  if (!kind) {
    fail(text,
         "expected op:dtype:device:shape:kind[:flags], as in "
         "forward:f32:cpu:b1h12n16384d64:lln");
  }

  const auto parsed_op = find_name(kOps, op);
  if (!parsed_op) {
    fail(text,
         fmt::format("unknown op '{}': expected forward, backward, append, step or train", op));
  }
  const auto parsed_dtype = find_name(kTypes, dtype);
  if (!parsed_dtype) {
    fail(text, fmt::format("unknown dtype '{}': expected f32, f16, bf16 or f64", dtype));
  }
  const auto parsed_device = parse_device(device);
  if (!parsed_device) {
    fail(text, fmt::format("unknown device '{}': expected cpu, cuda or cuda:INDEX", device));
  }
  p.op = *parsed_op;
  p.dtype = *parsed_dtype;
  p.device = *parsed_device;
  if (index) {
    if (*index > 1023) fail(text, fmt::format("device index {} is above 1023", *index));
    p.device.index = static_cast<int>(*index);
  }
  parse_shape(text, shape, p);
  try {
    parse_kind(*kind, p.kind, p.diag_block);
    std::vector<std::string> seen;
    while (const auto flag = take_part(rest, more)) parse_flag(text, *flag, seen, p);
  } catch (const Error& error) {
    const std::string_view what = error.what();
    if (what.starts_with("problem '")) throw;
    fail(text, std::string(what));
  }
  if (!p.packed) p.sequences = p.batch;
  if (const auto faults = problem_faults(p); !faults.empty()) {
    fail(text, fmt::format("{}", fmt::join(faults, "; ")));
  }
  return p;
}

}  // namespace lln
