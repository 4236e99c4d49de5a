// The list of attentions: a line here and a file beside it add one, and everything that names
// attentions (configs, `lln zoo`, the tests that hold for all of them) picks it up.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <vector>

#include "lln/error.h"
#include "lln_torch/zoo/attention.h"

// NAME stands for the function ZooEntry NAME_entry() of a file of this folder.
// clang-format off
#define LLN_ZOO_LIST(ENTRY) \
  ENTRY(softmax) \
  ENTRY(softmax_diag) \
  ENTRY(lln) \
  ENTRY(diag) \
  ENTRY(lln_diag) \
  ENTRY(elu) \
  ENTRY(relu) \
  ENTRY(power) \
  ENTRY(quadratic) \
  ENTRY(linear) \
  ENTRY(performer) \
  ENTRY(cosformer) \
  ENTRY(kvt) \
  ENTRY(local) \
  ENTRY(linformer) \
  ENTRY(reformer) \
  ENTRY(nystromformer) \
  ENTRY(skyformer) \
  ENTRY(longformer) \
  ENTRY(bigbird) \
  ENTRY(luna) \
  ENTRY(transformer_ls) \
  ENTRY(fnet) \
  ENTRY(synthesizer) \
  ENTRY(informer)
// clang-format on

namespace lln_torch {

#define LLN_ZOO_DECLARE(name) ZooEntry name##_entry();
LLN_ZOO_LIST(LLN_ZOO_DECLARE)
#undef LLN_ZOO_DECLARE

std::span<const ZooEntry> zoo() {
#define LLN_ZOO_CALL(name) name##_entry(),
  static const std::vector<ZooEntry> entries = {LLN_ZOO_LIST(LLN_ZOO_CALL)};
#undef LLN_ZOO_CALL
  return entries;
}

namespace {

const ZooEntry* entry_named(std::string_view name) {
  for (const ZooEntry& entry : zoo()) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

[[noreturn]] void refuse_attention(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, text);
}

}  // namespace

const ZooEntry& find_attention(const std::string& name) {
  if (const ZooEntry* entry = entry_named(name)) return *entry;
  constexpr std::string_view kDiag = "+diag";
  std::vector<std::string> known;
  for (const ZooEntry& entry : zoo()) {
    known.emplace_back(entry.name);
    if (entry.takes_diag && !known.back().ends_with(kDiag)) {
      known.push_back(known.back() + std::string(kDiag));
    }
  }
  if (name.ends_with(kDiag)) {
    const std::string base = name.substr(0, name.size() - kDiag.size());
    if (const ZooEntry* entry = entry_named(base)) {
      if (entry->takes_diag) return *entry;
      refuse_attention(fmt::format(
          "attention \"{}\": {} cannot be combined with block-diagonal attention", name, base));
    }
  }
  const std::string meant = nearest(name, known);
  refuse_attention(fmt::format("there is no attention \"{}\"{}; `lln zoo` lists them", name,
                               meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant)));
}

std::shared_ptr<Attention> make_attention(const AttentionConfig& config, const Settings& options) {
  const ZooEntry& entry = find_attention(config.name);
  if (config.dim < 1 || config.heads < 1 || config.dim % config.heads != 0) {
    refuse_attention(fmt::format("attention \"{}\": dim {} does not divide into {} heads",
                                 config.name, config.dim, config.heads));
  }
  if (config.max_tokens < 1) {
    refuse_attention(fmt::format("attention \"{}\": max_tokens is {}, expected at least 1",
                                 config.name, config.max_tokens));
  }
  if (config.causal && !entry.causal) {
    refuse_attention(fmt::format("attention \"{}\" has no causal form", config.name));
  }
  return entry.make(config, options);
}

}  // namespace lln_torch
