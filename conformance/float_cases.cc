// Cases of f32 for kernels on tensor cores: every width of their tiles, blocks of Diag that fill a
// tile or not, and causal walks, which f16 shares.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

// LLN in f32 on tensor cores: every width of tiles, filled and not, with rows and keys of every
// kind, several pieces, and states that were saved and not.
void add_float_heads(Table& table) {
  const auto add = [&](const std::string& problem, Case form = {}) {
    form.tensor_cores = true;
    table.add(problem, form, false);
  };
  for (const char* dims :
       {"d32", "d64", "d128", "d24v40", "d80v24", "d40v120", "d120v64", "d96v8", "d8v16"}) {
    add(fmt::format("f32:cpu:b1h2k1n70{}:lln", dims));
    add(fmt::format("f32:cpu:b1h1n35m50{}:lln", dims));
  }
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    add("f32:cpu:b3h2n40m70d32:lln:masked", {.keys = keys});
    add("f32:cpu:b3h4k2n40d48v64:lln:masked", {.keys = keys});
  }
  add("f32:cpu:b1h2k1n90d24:lln:packed=4", {.lengths = {20, 0, 69, 1}});
  add("f32:cpu:b1h2n80m120d64:lln:packed=4",
      {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
  for (const char* dims : {"d32", "d72v40"}) {
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add(fmt::format("f32:cpu:b1h1n70{}:lln", dims), {.style = style});
    }
    for (const std::int64_t at : {0, 37, 69}) {
      add(fmt::format("f32:cpu:b1h1n70{}:lln", dims), {.style = InputStyle::spike, .spike_at = at});
    }
  }
  add("f32:cpu:b1h4k1n20d8:lln");
  add("f32:cpu:b1h1n2100d8:lln");
  add("f32:cpu:b1h1n1100d64v8:lln:masked", {.keys = KeyPattern::left_padding});
}

// Diag and LLN+Diag in f32 on tensor cores: the same, with blocks that fill tiles and that do not,
// tiles that begin late, and weights of every form.
void add_float_blocks(Table& table) {
  const auto add = [&](const std::string& problem, Case form = {}) {
    form.tensor_cores = true;
    table.add(problem, form, false);
  };
  for (const char* dims : {"d32", "d64", "d128", "d24v40", "d120v64", "d8v96"}) {
    add(fmt::format("f32:cpu:b1h1n70{}:lln+diag64", dims));
  }
  for (const char* kind : {"diag5", "lln+diag16", "diag33", "lln+diag48", "diag64"}) {
    add(fmt::format("f32:cpu:b1h1n100d32:{}", kind));
  }
  add("f32:cpu:b1h4k2n20d40:diag16");
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    add("f32:cpu:b3h1n70d24:lln+diag64:masked", {.keys = keys});
    add("f32:cpu:b3h2k1n50d16v32:lln+diag48:masked", {.keys = keys});
    add("f32:cpu:b3h1n70d16:diag16:masked", {.keys = keys});
  }
  for (const char* kind : {"lln+diag16", "diag64"}) {
    add(fmt::format("f32:cpu:b1h1n90d24:{}:packed=4", kind), {.lengths = {20, 0, 69, 1}});
  }
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      add("f32:cpu:b2h2k1n20d8v24:lln+diag16", {.weights = form, .two_weights = two});
    }
  }
  add("f32:cpu:b1h2n30d8:lln+diag16:packed=3",
      {.weights = WeightForm::token, .lengths = {10, 0, 20}});
  add("f32:cpu:b1h1n40d96v72:lln+diag64", {.weights = WeightForm::channel, .two_weights = true});
  add("f32:cpu:b1h1n50d32:lln+diag100");
  add("f32:cpu:b1h1n70d32:lln+diag64", {.style = InputStyle::large_keys});
  add("f32:cpu:b1h1n300d8:lln+diag48:masked", {.keys = KeyPattern::left_padding});
  add("f32:cpu:b1h1n560d8:diag64:packed=2", {.lengths = {30, 530}});
}

// Causal LLN in f32 and f16 on tensor cores: every width, chunks that are filled and not, keys that
// begin late or are missing, several pieces, and heads that are out of reach.
void add_causal_heads(Table& table, const std::string& type) {
  const auto add = [&](const std::string& problem, Case form = {}) {
    form.tensor_cores = true;
    table.add(type + ":cpu:" + problem, form, false);
  };
  for (const char* dims : {"d32", "d64", "d128", "d24v40", "d80v24", "d40v120", "d96v8", "d8v16"}) {
    add(fmt::format("b1h2k1n70{}:lln:causal", dims));
  }
  for (const int tokens : {1, 16, 31, 32, 33, 64}) {
    add(fmt::format("b2h3n{}d16:lln:causal", tokens));
  }
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    add("b3h4k2n90d32v64:lln:causal:masked", {.keys = keys});
  }
  add("b1h4k2n130d24v48:lln:causal:packed=5", {.lengths = {20, 0, 69, 1, 40}});
  for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
    add("b1h2n70d72v40:lln:causal", {.style = style});
  }
  for (const std::int64_t at : {0, 37, 69}) {
    add("b1h2n70d32:lln:causal", {.style = InputStyle::spike, .spike_at = at});
  }
  add("b1h1n4200d8:lln:causal");
}

// Causal Diag and LLN+Diag in f32 on tensor cores: the same, with blocks that fill tiles and that
// do not, and weights of every form.
void add_causal_blocks(Table& table) {
  const auto add = [&](const std::string& problem, Case form = {}) {
    form.tensor_cores = true;
    table.add("f32:cpu:" + problem, form, false);
  };
  for (const char* dims : {"d32", "d64", "d128", "d24v40", "d40v120", "d96v8"}) {
    add(fmt::format("b1h1n100{}:lln+diag64:causal", dims));
  }
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    add("b3h2k1n70d16v104:lln+diag48:causal:masked", {.keys = keys});
    add("b3h2k1n90d40:diag16:causal:masked", {.keys = keys});
  }
  for (const char* kind : {"lln+diag32", "diag64"}) {
    add(fmt::format("b1h4k2n130d24v48:{}:causal:packed=5", kind), {.lengths = {20, 0, 69, 1, 40}});
  }
  for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
    add("b1h2n70d32:lln+diag64:causal", {.style = style});
  }
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      add("b2h2k1n40d8v72:lln+diag16:causal", {.weights = form, .two_weights = two});
    }
  }
  add("b1h2n60d8:lln+diag16:causal:packed=3",
      {.weights = WeightForm::token, .lengths = {10, 0, 50}});
  add("b1h1n50d32:lln+diag100:causal");
  add("b1h2k1n4200d8v16:lln+diag64:causal:masked", {.keys = KeyPattern::left_padding});
  add("b1h1n4150d8:lln:causal:packed=3", {.lengths = {30, 4110, 10}});
}

}  // namespace

void add_float_cases(Table& table) {
  add_float_heads(table);
  add_float_blocks(table);
  for (const char* type : {"f32", "f16"}) add_causal_heads(table, type);
  add_causal_blocks(table);
}

}  // namespace lln::conformance
