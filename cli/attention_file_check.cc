// The rules for the tensors of a file. Each rule adds to one list of faults.
// SPDX-License-Identifier: Apache-2.0
#include "attention_file_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "lln/error.h"
#include "scales.h"
#include "verb.h"

namespace lln::cli {
namespace {

const std::vector<std::string_view> kAttentionTypes = {"F32", "F16", "BF16"};
const std::vector<std::string_view> kParameterTypes = {"F32"};
const std::vector<std::string_view> kIndexTypes = {"I32", "I64"};
const std::vector<std::string_view> kMaskTypes = {"BOOL", "U8"};
const std::vector<std::string_view> kAllNames = {"q",
                                                 "k",
                                                 "v",
                                                 "g",
                                                 "alpha",
                                                 "beta",
                                                 "mix",
                                                 "lln_weight",
                                                 "diag_weight",
                                                 "key_lengths",
                                                 "key_mask",
                                                 "cu_seqlens",
                                                 "cu_seqlens_q",
                                                 "cu_seqlens_k"};

bool contains(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::vector<std::string> AttentionFileCheck::warnings() const {
  std::vector<std::string> texts;
  for (const io::TensorInfo& t : file_.tensors()) {
    const std::string_view reason = !known(t.name)  ? "is not known"
                                    : used(t.name)  ? ""
                                    : t.name == "g" ? "plays no part without --backward"
                                                    : "plays no part in this kind";
    if (reason.empty()) continue;
    texts.push_back(fmt::format("{}: tensor {} {} and was ignored", file_.path(),
                                io::printable(t.name), reason));
  }
  return texts;
}

bool AttentionFileCheck::known(std::string_view name) { return contains(kAllNames, name); }

bool AttentionFileCheck::used(std::string_view name) const {
  const bool mixture = request_.kind == Kind::lln_diag;
  if (name == "g") return request_.backward;
  if (name == "alpha" || name == "beta") return mixture || request_.kind == Kind::lln;
  if (name == "mix" || name == "lln_weight" || name == "diag_weight") return mixture;
  return true;
}

bool AttentionFileCheck::has(std::string_view name) const {
  return used(name) && file_.find(name) != nullptr;
}

std::optional<Matching> AttentionFileCheck::matching() const {
  if (!used("alpha")) return std::nullopt;
  const bool given = request_.alpha || request_.beta || request_.calibrated != nullptr ||
                     has("alpha") || has("beta");
  return request_.matching.value_or(given ? Matching::frozen : Matching::per_head);
}

void AttentionFileCheck::check_all() {
  measure();
  const auto order = [&](Dimension b, Dimension h, Dimension n, Dimension d) {
    return request_.layout == FileLayout::bhnd ? Form{b, h, n, d} : Form{b, n, h, d};
  };
  const io::TensorInfo* q = file_.find("q");
  const Names types =
      q != nullptr && contains(kAttentionTypes, q->dtype) ? Names{q->dtype} : kAttentionTypes;
  required("q", kAttentionTypes, {order({}, {}, {}, {})});
  required("k", types, {order(batch_, {}, {}, dim_)});
  required("v", types, {order(batch_, heads_k_, tokens_k_, {})});
  if (used("g")) required("g", types, {order(batch_, heads_, tokens_, dim_v_)});
  if (used("alpha")) check_scales();
  if (used("mix")) check_weights();
  optional("key_lengths", kIndexTypes, {{batch_}});
  optional("key_mask", kMaskTypes, {{batch_, tokens_k_}});
  check_packing();
  if (faults_.empty()) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: {} fault{}: {}", file_.path(), faults_.size(),
                          faults_.size() == 1 ? "" : "s", fmt::join(faults_, "; ")));
}

void AttentionFileCheck::measure() {
  const auto size = [&](const char* name, std::size_t i) -> Dimension {
    const io::TensorInfo* t = file_.find(name);
    return t != nullptr && t->shape.size() == 4 ? Dimension(t->shape[i]) : Dimension();
  };
  const std::size_t head = request_.layout == FileLayout::bhnd ? 1 : 2;
  const std::size_t token = 3 - head;
  batch_ = size("q", 0);
  heads_ = size("q", head);
  tokens_ = size("q", token);
  dim_ = size("q", 3);
  heads_k_ = size("k", head);
  tokens_k_ = size("k", token);
  dim_v_ = size("v", 3);
  sequences_ = batch_;
  for (const char* name : {"cu_seqlens", "cu_seqlens_q"}) {
    const io::TensorInfo* t = file_.find(name);
    if (t == nullptr || t->shape.size() != 1) continue;
    sequences_ = std::max<std::int64_t>(t->shape[0], 1) - 1;
  }
}

void AttentionFileCheck::required(const char* name, const Names& types, const Forms& forms) {
  if (file_.find(name) == nullptr) {
    missing(name, types, forms, "");
  } else {
    optional(name, types, forms);
  }
}

void AttentionFileCheck::optional(const std::string& name, const Names& types, const Forms& forms) {
  const io::TensorInfo* t = file_.find(name);
  if (t == nullptr) return;
  const bool shape_fits = std::any_of(forms.begin(), forms.end(), [&](const Form& form) {
    return std::equal(t->shape.begin(), t->shape.end(), form.begin(), form.end(),
                      [](std::int64_t size, Dimension d) { return !d || *d == size; });
  });
  if (shape_fits && contains(types, t->dtype)) return;
  faults_.push_back(fmt::format("{} is {} {}: expected {} {}", name, t->dtype,
                                io::shape_text(t->shape), fmt::join(types, "/"), to_text(forms)));
}

// A tensor or a flag, exactly one of them.
void AttentionFileCheck::parameter(const std::string& name, const char* flag, const Forms& forms) {
  if (file_.find(name) == nullptr) {
    if (flag == nullptr) missing(name, kParameterTypes, forms, ", or --" + name);
    return;
  }
  if (flag != nullptr) {
    faults_.push_back(fmt::format("{} is given by the file and by {}", name, flag));
  }
  optional(name, kParameterTypes, forms);
}

void AttentionFileCheck::missing(const std::string& name, const Names& types, const Forms& forms,
                                 const std::string& otherwise) {
  faults_.push_back(fmt::format("{} is missing: expected {} {}{}", name, fmt::join(types, "/"),
                                to_text(forms), otherwise));
}

void AttentionFileCheck::check_scales() {
  const Forms alpha = {{heads_}, {sequences_, heads_}}, beta = {{heads_k_}, {sequences_, heads_k_}};
  if (matching() == Matching::frozen) {
    const CalibratedLayer* const found = request_.calibrated;
    const char* const calibration = found != nullptr ? "--calibration" : nullptr;
    parameter("alpha", request_.alpha ? "--alpha" : calibration, alpha);
    parameter("beta", request_.beta ? "--beta" : calibration, beta);
    if (found == nullptr || !heads_ || !heads_k_ || !dim_) return;
    const std::string obstacle = calibration_obstacle(*found, *heads_, *heads_k_, *dim_);
    if (!obstacle.empty()) faults_.push_back(obstacle);
    return;
  }
  for (const char* name : {"alpha", "beta"}) {
    if (!has(name)) continue;
    throw UsageError(fmt::format("{}: tensor {} contradicts --matching {}: use --matching frozen",
                                 file_.path(), name, to_string(*request_.matching)));
  }
  if (request_.matching || (!request_.causal && request_.feature == Feature::exp)) return;
  const std::string reason =
      request_.causal ? "their default, --matching per_head, reads the whole sequence, so a causal "
                        "row would depend on its future"
                      : "their default, --matching per_head, is for --feature exp";
  faults_.push_back(fmt::format(
      "alpha and beta are missing: {}: expected F32 {} and {}, or --alpha and --beta, or "
      "--matching none",
      reason, to_text(alpha), to_text(beta)));
}

void AttentionFileCheck::check_weights() {
  const Forms forms = {{}, {1}, {heads_}, {heads_, dim_v_}, {batch_, heads_, tokens_}};
  for (const char* name : {"mix", "lln_weight", "diag_weight"}) {
    optional(name, kParameterTypes, forms);
    if (request_.mix && has(name)) {
      faults_.push_back(fmt::format("{} is given by the file together with --mix", name));
    }
  }
}

void AttentionFileCheck::check_packing() {
  for (const char* name : {"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}) {
    optional(name, kIndexTypes, {{Dimension()}});
  }
  if (has("cu_seqlens") && (has("cu_seqlens_q") || has("cu_seqlens_k"))) {
    faults_.push_back("cu_seqlens is given together with cu_seqlens_q or cu_seqlens_k");
  }
}

std::string AttentionFileCheck::to_text(const Forms& forms) {
  std::vector<std::string> texts;
  for (const Form& form : forms) {
    std::vector<std::string> sizes;
    for (const Dimension& d : form) sizes.push_back(d ? std::to_string(*d) : "*");
    std::string text = fmt::format("[{}]", fmt::join(sizes, ", "));
    if (std::count(texts.begin(), texts.end(), text) == 0) texts.push_back(std::move(text));
  }
  return fmt::to_string(fmt::join(texts, " or "));
}

}  // namespace lln::cli
