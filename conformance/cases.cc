// The table itself, and how cases are written. Each group varies one subject over the others.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/cases.h"

#include <fmt/format.h>

#include <numeric>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

void add_dims(Table& table) {
  for (std::size_t i = 0; i < kDims.size(); ++i) {
    const int dim = kDims[i];
    const int dim_v = rotate(kDims, i * 5 + 3);
    table.add(fmt::format("f32:cpu:b1h2n65d{}v{}:lln", dim, dim_v));
    table.add(fmt::format("f32:cpu:b1h2n130d{}:lln+diag64:causal", dim));
    table.add(
        fmt::format("{}:cpu:b1h2k1n70d{}v{}:{}", rotate(kTypes, i), dim, dim_v, rotate(kKinds, i)));
  }
}

void add_tokens(Table& table) {
  for (std::size_t i = 0; i < kTokens.size(); ++i) {
    const int tokens = kTokens[i];
    const int dim = tokens > 500 ? 16 : rotate(std::array{32, 24, 7}, i);
    const char* heads = tokens > 500 ? "b1h1" : "b2h2";
    for (const char* kind : {"lln", "lln:causal", "lln+diag48:causal", "lln+diag64"}) {
      table.add(fmt::format("f32:cpu:{}n{}d{}:{}", heads, tokens, dim, kind));
    }
    for (const char* kind : {"softmax", "softmax:causal", "diag64"}) {
      table.add(fmt::format("{}:cpu:{}n{}d{}:{}", rotate(kTypes, i), heads, tokens, dim, kind));
    }
    table.add(fmt::format("bf16:cpu:{}n{}d{}:{}", heads, tokens, dim, rotate(kKinds, i)));
  }
  table.add("f32:cpu:b1h1n4096d3:lln");
  table.add("f32:cpu:b1h1n4096d3:lln+diag64:causal");
}

void add_types_and_features(Table& table) {
  for (const char* type : kTypes) {
    for (const char* feature : kFeatures) {
      table.add(fmt::format("{}:cpu:b1h2n70d24:lln:feature={}", type, feature));
      table.add(fmt::format("{}:cpu:b1h2n70d24:lln+diag16:causal:feature={}", type, feature));
    }
  }
  for (const char* kind : kKinds) table.add(fmt::format("f64:cpu:b1h2k1n40d8v5:{}", kind));
}

void add_weights(Table& table) {
  std::size_t i = 0;
  for (const WeightForm form : {WeightForm::constant, WeightForm::call, WeightForm::head,
                                WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      if (form == WeightForm::constant && two) continue;
      const Case weights{.weights = form, .two_weights = two};
      table.add("f32:cpu:b2h4k2n67d16v20:lln+diag16", weights);
      table.add("f32:cpu:b2h4k2n67d16v20:lln+diag16:causal", weights);
      table.add(fmt::format("{}:cpu:b2h2n50d20:lln+diag64:causal", rotate(kTypes, 1 + i++ % 2)),
                weights);
    }
  }
  table.add("f32:cpu:b1h2n90d16:lln+diag16:packed=3",
            {.weights = WeightForm::token, .lengths = {20, 0, 70}});
}

void add_blocks(Table& table) {
  for (std::size_t i = 0; i < kBlocks.size(); ++i) {
    const int tokens = kBlocks[i] > 128 ? 410 : 257;
    const char* type = rotate(kTypes, i);
    table.add(fmt::format("{}:cpu:b1h1n{}d16:diag{}", type, tokens, kBlocks[i]));
    table.add(fmt::format("f32:cpu:b1h1n{}d32:diag{}:causal", tokens, kBlocks[i]));
    table.add(fmt::format("f32:cpu:b1h1n{}d16:lln+diag{}", tokens, kBlocks[i]));
  }
}

void add_masks(Table& table) {
  std::size_t i = 0;
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    for (const char* kind : kKinds) {
      table.add(fmt::format("f32:cpu:b3h2n150d16:{}:masked", kind), {.keys = keys});
      table.add(fmt::format("{}:cpu:b3h2k1n67d24:{}:masked", rotate(kTypes, 1 + i++ % 2), kind),
                {.keys = keys});
    }
  }
  table.add("f32:cpu:b2h2n33m150d16:lln:masked", {.keys = KeyPattern::holes});
  table.add("f32:cpu:b2h2n33m150d16:softmax:masked", {.keys = KeyPattern::lengths});
}

void add_packed(Table& table) {
  const std::vector<std::int64_t> patterns[] = {
      {0, 64, 1, 0, 135}, {200}, {3, 3, 3, 3, 3, 3, 3, 3, 65, 0}};
  std::size_t i = 0;
  for (const auto& lengths : patterns) {
    const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    for (const char* kind : kKinds) {
      table.add(fmt::format("{}:cpu:b1h2k1n{}d16v24:{}:packed={}", rotate(kTypes, i++ % 4), tokens,
                            kind, lengths.size()),
                {.lengths = lengths});
    }
  }
  for (const char* kind : {"lln", "softmax"}) {
    table.add(fmt::format("f32:cpu:b1h2n80m120d16:{}:packed=4", kind),
              {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
  }
}

void add_heads_and_cross(Table& table) {
  for (const char* heads : {"h1k1", "h4k1", "h8k2", "h8k1", "h8k8"}) {
    table.add(fmt::format("f32:cpu:b2{}n66d16:lln", heads));
    table.add(fmt::format("f32:cpu:b1{}n66d16:lln+diag16:causal", heads));
  }
  for (const char* tokens : {"n1m300", "n300m1", "n64m63", "n5m0", "n0m5", "n70m200"}) {
    table.add(fmt::format("f32:cpu:b2h2{}d24:lln", tokens));
    table.add(fmt::format("f32:cpu:b1h4k2{}d24:softmax", tokens));
  }
  table.add("bf16:cpu:b2h2n70m200d24:lln:feature=elu");
}

void add_difficult_values(Table& table) {
  for (const char* type : kTypes) {
    for (const char* kind : {"lln", "lln:causal", "lln+diag32:causal", "softmax"}) {
      const std::string problem = fmt::format("{}:cpu:b1h2n130d16:{}", type, kind);
      table.add(problem, {.style = InputStyle::large_keys});
      table.add(problem, {.style = InputStyle::constant_rows});
    }
  }
  for (const char* kind : {"lln", "lln:causal", "diag32", "lln+diag32", "lln+diag64:causal"}) {
    for (const char* shape :
         {"f32:cpu:b1h2n130d64", "bf16:cpu:b1h2n130d64", "bf16:cpu:b1h2n130d136"}) {
      table.add(fmt::format("{}:{}", shape, kind), {.style = InputStyle::high_values});
    }
  }
  for (const std::int64_t at : {0, 63, 64, 77, 129}) {
    for (const char* kind : {"lln", "lln:causal", "softmax:causal"}) {
      table.add(fmt::format("f32:cpu:b1h2n130d16:{}", kind),
                {.style = InputStyle::spike, .spike_at = at});
    }
  }
}

// So many tokens that kernels cut a sequence into several pieces, whose sums are joined or, causal,
// carried from piece to piece; 16-bit. Causal ones are without gradients of parameters, which go
// other ways.
void add_pieces(Table& table) {
  table.add("bf16:cpu:b1h2k1n2300d8v16:lln");
  table.add("bf16:cpu:b1h1n2300d8:lln+diag64");
  table.add("bf16:cpu:b1h1n4200d8:lln:causal", {.tensor_cores = true}, false);
  table.add("bf16:cpu:b1h1n4200d8:lln+diag64:causal", {.tensor_cores = true}, false);
  table.add("bf16:cpu:b1h2k1n6300d8v16:lln+diag64:causal:masked",
            {.keys = KeyPattern::left_padding, .tensor_cores = true}, false);
}

// Heads as wide as models have them, in the 16-bit types, without gradients of parameters: what
// tensor-core kernels do themselves.
void add_model_heads(Table& table) {
  const auto add = [&](const std::string& problem, Case form = {}) {
    form.tensor_cores = true;
    table.add(problem, form, false);
  };
  std::size_t i = 0;
  for (const int dim : {64, 128}) {
    for (const char* type : {"bf16", "f16"}) {
      for (const char* kind :
           {"lln", "diag64", "lln+diag64", "lln:causal", "lln+diag64:causal", "lln+diag16"}) {
        add(fmt::format("{}:cpu:b2h2n200d{}:{}", type, dim, kind));
        add(fmt::format("{}:cpu:b3h4k2n150d{}:{}:masked", type, dim, kind),
            {.keys = std::array{KeyPattern::lengths, KeyPattern::left_padding,
                                KeyPattern::holes}[i++ % 3]});
      }
    }
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      add(fmt::format("bf16:cpu:b3h2n70m150d{}:lln:masked", dim), {.keys = keys});
    }
    const std::vector<std::int64_t> patterns[] = {{0, 64, 1, 0, 135}, {200}, {3, 130, 65, 0}};
    for (const auto& lengths : patterns) {
      const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
      for (const char* kind : {"lln", "lln+diag64", "lln:causal"}) {
        add(fmt::format("bf16:cpu:b1h4k2n{}d{}:{}:packed={}", tokens, dim, kind, lengths.size()),
            {.lengths = lengths});
      }
    }
    add(fmt::format("bf16:cpu:b1h2n80m120d{}:lln:packed=4", dim),
        {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
    for (const char* shape : {"b2h2n1m300", "b1h4k1n300m1", "b1h2n5m0", "b2h8k2n64m63"}) {
      add(fmt::format("bf16:cpu:{}d{}:lln", shape, dim));
    }
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add(fmt::format("bf16:cpu:b1h2n130d{}:lln", dim), {.style = style});
    }
    for (const std::int64_t at : {0, 77, 129}) {
      add(fmt::format("bf16:cpu:b1h2n130d{}:lln", dim),
          {.style = InputStyle::spike, .spike_at = at});
    }
    add(fmt::format("bf16:cpu:b1h2k1n1100d{}:lln", dim));
    // About as many key heads as a large device has multiprocessors.
    add(fmt::format("bf16:cpu:b6h12n40m70d{}:lln", dim));
    add(fmt::format("bf16:cpu:b6h24k12n20d{}:lln:masked", dim), {.keys = KeyPattern::holes});
  }
  for (const char* dims : {"d40v72", "d64v128", "d128v64", "d96v8", "d100v64"}) {
    add(fmt::format("bf16:cpu:b2h2k1n130{}:lln", dims));
  }
}

// bf16 in dims of whole vectors, whose products may take two keys, rows or channels at once: odd
// numbers of them, and what those products are not for.
void add_pairs(Table& table) {
  for (const char* kind : {"lln", "diag64", "lln+diag48"}) {
    table.add(fmt::format("bf16:cpu:b2h4k2n197d64v48:{}", kind));
    table.add(fmt::format("bf16:cpu:b1h1n77d128:{}", kind));
    table.add(fmt::format("bf16:cpu:b3h2n67d32:{}:masked", kind), {.keys = KeyPattern::holes});
    table.add(fmt::format("bf16:cpu:b1h2k1n136d16v32:{}:packed=4", kind),
              {.lengths = {0, 63, 1, 72}});
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      table.add(fmt::format("bf16:cpu:b1h2n131d32:{}", kind), {.style = style});
    }
  }
  for (const std::int64_t at : {0, 130}) {
    table.add("bf16:cpu:b1h2n131d64:lln+diag64", {.style = InputStyle::spike, .spike_at = at});
  }
  table.add("bf16:cpu:b2h2n33m151d48:lln");
  table.add("bf16:cpu:b2h2n70d32v64:lln+diag16", {.weights = WeightForm::channel});
}

// Gradients of weights beside kernels that do not give them, in several runs of rows.
void add_weight_gradients(Table& table) {
  const auto add = [&](const std::string& problem, Case form) {
    form.tensor_cores = form.weight_gradients = true;
    table.add(problem, form, false);
  };
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      const Case weights{.weights = form, .two_weights = two};
      add("bf16:cpu:b2h4k2n300d64:lln+diag64", weights);
      add("bf16:cpu:b2h4k2n300d64:lln+diag64:causal", weights);
      add("f16:cpu:b2h2n70d32v96:lln+diag48", weights);
    }
    add("bf16:cpu:b3h2k1n140d128:lln+diag32:masked",
        {.weights = form, .keys = KeyPattern::left_padding});
    add("bf16:cpu:b1h2n90d64:lln+diag32:packed=3", {.weights = form, .lengths = {20, 0, 70}});
  }
}

// LLN+Diag of such heads: weights of every form, tiles that begin late, several pieces, exponents
// that a row's own reference must be found for.
void add_model_blocks(Table& table) {
  const auto add = [&](const std::string& problem, Case form = {}) {
    form.tensor_cores = true;
    table.add(problem, form, false);
  };
  for (const int dim : {64, 128}) {
    for (const WeightForm form :
         {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
      for (const bool two : {false, true}) {
        add(fmt::format("bf16:cpu:b2h4k{}n130d{}:lln+diag64", two ? 2 : 4, dim),
            {.weights = form, .two_weights = two});
      }
    }
    add(fmt::format("bf16:cpu:b1h2n90d{}:lln+diag32:packed=3", dim),
        {.weights = WeightForm::token, .lengths = {20, 0, 70}});
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add(fmt::format("bf16:cpu:b1h2n130d{}:lln+diag64", dim), {.style = style});
    }
    for (const std::int64_t at : {0, 77, 129}) {
      add(fmt::format("bf16:cpu:b1h2n130d{}:lln+diag64", dim),
          {.style = InputStyle::spike, .spike_at = at});
    }
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      add(fmt::format("bf16:cpu:b3h2k1n140d{}:lln+diag64:masked", dim), {.keys = keys});
    }
    for (const int block : {1, 8, 32, 48, 128}) {
      add(fmt::format("bf16:cpu:b1h2n200d{}:lln+diag{}", dim, block));
    }
    add(fmt::format("bf16:cpu:b1h1n1100d{}:lln+diag64", dim));
    add(fmt::format("bf16:cpu:b1h1n50d{}:lln+diag100", dim));
  }
  // One key: all channels of the state hold its value, and dq is 0.
  for (const int dim : {32, 64, 96, 128}) {
    for (const char* type : {"bf16", "f16"}) {
      add(fmt::format("{}:cpu:b3h2n1d{}:lln+diag16", type, dim));
    }
  }
  for (const char* dims : {"d40v72", "d64v128", "d128v64", "d96v8", "d8v96"}) {
    add(fmt::format("bf16:cpu:b2h2k1n130{}:lln+diag64", dims));
  }
}

void add_decoding(Table& table) {
  for (const char* type : kTypes) {
    for (const char* kind : {"lln", "lln+diag32", "lln+diag16:feature=elu", "lln:feature=relu",
                             "lln+diag200:feature=softplus", "lln:feature=power2"}) {
      table.add_append(fmt::format("{}:cpu:b1h4k2n260d24v40:{}", type, kind));
    }
  }
  // In reach of the causal walks: pieces begin at borders of some blocks and not of others.
  for (const int dim : {64, 128}) {
    for (const char* kind : {"lln", "lln+diag8", "lln+diag16", "lln+diag64"}) {
      table.add_append(fmt::format("bf16:cpu:b2h4k2n320d{}:{}", dim, kind));
    }
    table.add_append(fmt::format("bf16:cpu:b3h2n320d{}:lln+diag32:masked", dim),
                     {.keys = KeyPattern::lengths});
    for (const WeightForm form : {WeightForm::channel, WeightForm::token}) {
      table.add_append(fmt::format("bf16:cpu:b2h2n200d{}:lln+diag64", dim), {.weights = form});
    }
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::large_values}) {
      table.add_append(fmt::format("bf16:cpu:b1h2n200d{}:lln", dim), {.style = style});
    }
  }
  for (const int dim : kDims) table.add_append(fmt::format("f32:cpu:b1h2n70d{}:lln+diag16", dim));
  for (const int block : kBlocks) {
    table.add_append(fmt::format("f32:cpu:b1h1n410d16:lln+diag{}", block));
  }
  for (const char* heads : {"h1k1", "h3k1", "h5k1", "h8k2", "h8k1"}) {
    table.add_append(fmt::format("f32:cpu:b2{}n66d16v7:lln+diag64", heads));
  }
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    table.add_append("f32:cpu:b2h4k2n170d16v20:lln+diag48", {.weights = form});
    table.add_append("bf16:cpu:b2h2n70d16v20:lln+diag48", {.weights = form, .two_weights = true});
  }
  for (const char* kind : {"lln", "lln+diag32"}) {
    table.add_append(fmt::format("f32:cpu:b3h2n200d16:{}:masked", kind),
                     {.keys = KeyPattern::lengths});
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows,
                                   InputStyle::large_values, InputStyle::denormal}) {
      table.add_append(fmt::format("f32:cpu:b1h2n130d16:{}", kind), {.style = style});
    }
    for (const std::int64_t at : {0, 5, 6, 63, 77, 129}) {
      table.add_append(fmt::format("f32:cpu:b1h2n130d16:{}", kind),
                       {.style = InputStyle::spike, .spike_at = at});
    }
  }
}

const char* to_string(Layout layout) {
  constexpr std::array kNames = {"bhnd", "bnhd", "gaps"};
  return kNames[static_cast<std::size_t>(layout)];
}

}  // namespace

std::string to_string(const Case& c) {
  constexpr std::array kWeights = {"constant", "call", "head", "channel", "token"};
  constexpr std::array kParameters = {"one", "head", "sequence"};
  constexpr std::array kPatterns = {"all", "lengths", "left_padding", "holes"};
  constexpr std::array kStyles = {"normal",       "large_keys", "spike",       "constant_rows",
                                  "large_values", "denormal",   "high_values", "far_below"};
  const auto name = [](const auto& names, auto value) {
    return names[static_cast<std::size_t>(value)];
  };
  std::string text = fmt::format("{} layout={} parameters={}", to_string(c.problem),
                                 to_string(c.layout), name(kParameters, c.parameters));
  if (c.weights != WeightForm::constant) {
    text += fmt::format(" weights={}{}", name(kWeights, c.weights), c.two_weights ? ",two" : "");
  }
  if (c.keys != KeyPattern::all) text += fmt::format(" keys={}", name(kPatterns, c.keys));
  if (c.style != InputStyle::normal) text += fmt::format(" values={}", name(kStyles, c.style));
  if (c.style == InputStyle::spike) text += fmt::format(" at={}", c.spike_at);
  if (!c.lengths.empty()) text += fmt::format(" lengths={}", fmt::join(c.lengths, ","));
  if (!c.lengths_k.empty()) text += fmt::format(" lengths_k={}", fmt::join(c.lengths_k, ","));
  if (c.saved) text += " saved";
  if (c.problem.op == Op::backward && c.parameter_gradients) text += " parameter_gradients";
  if (c.problem.op == Op::backward && c.weight_gradients) text += " weight_gradients";
  return text;
}

AttentionOptions options(const Case& c) {
  AttentionOptions options;
  options.kind = c.problem.kind;
  options.diag_block = c.problem.diag_block;
  options.causal = c.problem.causal;
  options.feature = c.problem.feature;
  options.power = c.problem.power;
  options.mix = 0.375F;
  return options;
}

std::vector<Case> on_device(std::vector<Case> cases, Device device) {
  if (device.kind == DeviceKind::cpu) {
    std::erase_if(cases, [](const Case& c) { return c.tensor_cores; });
    return cases;
  }
  std::erase_if(cases, [](const Case& c) { return c.problem.dtype == DType::f64; });
  for (Case& c : cases) c.problem.device = device;
  return cases;
}

std::vector<Case> cases() {
  Table table;
  add_dims(table);
  add_tokens(table);
  add_types_and_features(table);
  add_weights(table);
  add_blocks(table);
  add_masks(table);
  add_packed(table);
  add_heads_and_cross(table);
  add_difficult_values(table);
  add_decoding(table);
  add_pairs(table);
  add_pieces(table);
  add_model_heads(table);
  add_model_blocks(table);
  add_piece_cases(table);
  add_weight_gradients(table);
  add_float_cases(table);
  add_wide_cases(table);
  add_diag_cases(table);
  add_wide_diag_cases(table);
  add_wide_causal_cases(table);
  add_padded_cases(table);
  add_parts_cases(table);
  return std::move(table.cases);
}

std::vector<Case> quick_cases() {
  std::vector<Case> all = cases();
  std::erase_if(all, [](const Case& c) { return !c.quick; });
  return all;
}

}  // namespace lln::conformance
