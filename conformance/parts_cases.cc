// Cases of LLN+Diag that devices compute as LLN and Diag in two calls, and of gradients of alpha,
// beta and the weights, which they make beside kernels that do not give them. Small ones: every
// kernel that they come to has cases of its own.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <span>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

// Of aligned tensors; gradients of parameters rotate.
void add(Table& table, const std::string& problem, Case form = {}) {
  form.tensor_cores = true;
  table.add(problem, form);
  for (Case& c : std::span(table.cases).last(2)) {
    if (c.layout == Layout::gaps) c.layout = Layout::bnhd;
  }
}

// The backward pass alone: there is nothing else in the forward pass.
Case& add_gradients(Table& table, const std::string& problem, Case form = {}) {
  add(table, problem, form);
  table.cases.erase(table.cases.end() - 2);
  Case& c = table.cases.back();
  c.parameter_gradients = true;
  return c;
}

// Blocks that the causal walks in bf16 do not hold, and long ones in f32.
void add_blocks(Table& table) {
  for (const char* dims : {"d64", "d128", "d24v40", "d8v96", "d60"}) {
    add(table, fmt::format("bf16:cpu:b1h2k1n90{}:lln+diag48:causal", dims));
  }
  for (const int block : {3, 65, 128, 1000}) {
    add(table, fmt::format("bf16:cpu:b1h1n150d32:lln+diag{}:causal", block));
  }
  add(table, "f32:cpu:b1h2k1n110d32:lln+diag100");
  add(table, "f32:cpu:b1h2k1n110d36v20:lln+diag100:causal");
  for (const int tokens : {0, 1, 65}) {
    add(table, fmt::format("bf16:cpu:b2h2n{}d16:lln+diag100:causal", tokens));
  }
}

void add_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    add(table, "bf16:cpu:b3h2k1n110d32:lln+diag100:causal:masked", {.keys = keys});
  }
  add(table, "f32:cpu:b3h1n90d24:lln+diag80:masked", {.keys = KeyPattern::holes});
  for (const char* type : {"bf16", "f32"}) {
    add(table, fmt::format("{}:cpu:b1h2k1n130d48:lln+diag100:causal:packed=5", type),
        {.lengths = {20, 0, 69, 1, 40}});
  }
}

// Weights of every form; those of channels in causal gradients are for two calls with any block.
void add_weights(Table& table) {
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      add(table,
          two ? "f32:cpu:b1h2k1n90d24v36:lln+diag80" : "bf16:cpu:b2h2k1n70d64:lln+diag48:causal",
          {.weights = form, .two_weights = two});
    }
  }
  for (const char* shape : {"b1h2k1n70d64:lln+diag64", "b1h2n70d250v140:lln+diag32"}) {
    for (const bool two : {false, true}) {
      add_gradients(table, fmt::format("bf16:cpu:{}:causal", shape),
                    {.weights = WeightForm::channel, .two_weights = two});
    }
  }
}

// Every type and family, rows of any kind, every way in which scales are shared.
void add_scales(Table& table) {
  std::size_t i = 0;
  constexpr std::array kDims = {"d64", "d128", "d24v40", "d60v36", "d32"};
  for (const char* type : kTypes) {
    for (const char* kind : {"lln", "lln:causal", "lln+diag32", "lln+diag64:causal"}) {
      add_gradients(table, fmt::format("{}:cpu:b2h2k1n70{}:{}", type, rotate(kDims, i++), kind));
      add_gradients(table,
                    fmt::format("{}:cpu:b3h2k1n50{}:{}:masked", type, rotate(kDims, i++), kind),
                    {.keys = KeyPattern::holes});
    }
    add_gradients(table, fmt::format("{}:cpu:b1h2k1n90{}:lln:packed=4", type, rotate(kDims, i++)),
                  {.lengths = {20, 0, 69, 1}});
  }
  for (const char* kind : {"lln", "lln:causal", "lln+diag32"}) {
    add_gradients(table, fmt::format("bf16:cpu:b1h1n70d250v140:{}", kind));
  }
  for (const char* tokens : {"n5m0", "n0m5", "n1m130", "n130m1"}) {
    add_gradients(table, fmt::format("bf16:cpu:b2h2{}d64:lln", tokens));
  }
  for (const char* type : {"bf16", "f32"}) {
    add_gradients(table, fmt::format("{}:cpu:b2h2k1n50d64:lln:state", type));
    // Several jobs of several sequences, each with scales of its own.
    for (const char* dims : {"d8", "d7v8"}) {
      add_gradients(table, fmt::format("{}:cpu:b3h1n1100{}:lln", type, dims)).parameters =
          ParameterForm::sequence;
    }
    add_gradients(table, fmt::format("{}:cpu:b1h1n70d64:lln", type),
                  {.style = InputStyle::large_keys});
  }
  add_gradients(table, "bf16:cpu:b1h2n80m120d32:lln:packed=4",
                {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
  add_gradients(table, "bf16:cpu:b1h1n2203d8:lln:packed=4", {.lengths = {700, 0, 1500, 3}})
      .parameters = ParameterForm::sequence;
}

}  // namespace

void add_parts_cases(Table& table) {
  add_blocks(table);
  add_sequences(table);
  add_weights(table);
  add_scales(table);
}

}  // namespace lln::conformance
