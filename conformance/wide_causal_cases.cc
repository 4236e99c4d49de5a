// Cases of causal LLN and LLN+Diag in bf16 for heads of 129 to 256 channels: tiles of 64 tokens,
// pieces of 256, and widths that fill the parts of warps and blocks and that do not.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <span>
#include <vector>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

// Of aligned tensors and without gradients of parameters, with which kernels go other ways.
void add(Table& table, const std::string& problem, Case form = {}) {
  form.tensor_cores = true;
  table.add("bf16:cpu:" + problem, form, false);
  for (Case& c : std::span(table.cases).last(2)) {
    if (c.layout == Layout::gaps) c.layout = Layout::bnhd;
  }
}

void add_shapes(Table& table) {
  for (const char* dims : {"d256", "d136v200", "d256v72", "d40v256", "d192v136", "d8v136"}) {
    add(table, fmt::format("b1h2k1n130{}:lln:causal", dims));
    add(table, fmt::format("b1h1n330{}:lln:causal", dims));
  }
  for (const int tokens : {0, 1, 63, 64, 65, 255, 256, 257}) {
    add(table, fmt::format("b2h2n{}d144:lln:causal", tokens));
  }
  // The cheapest ones of two pieces.
  for (const char* dims : {"d8v136", "d136v8"}) {
    add(table, fmt::format("b1h1n260{}:lln:causal", dims));
    add(table, fmt::format("b1h1n260{}:lln+diag64:causal", dims));
  }
  for (const char* shape : {"h2k1n600d256", "h6k2n300d136", "h4k1n520d8v136", "h1n1300d136v8"}) {
    add(table, fmt::format("b1{}:lln:causal", shape));
  }
}

void add_lln_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    add(table, "b3h2k1n150d256:lln:causal:masked", {.keys = keys});
    add(table, "b3h2n400d136v40:lln:causal:masked", {.keys = keys});
  }
  add(table, "b1h2k1n130d256:lln:causal:packed=5", {.lengths = {20, 0, 69, 1, 40}});
  add(table, "b1h2k1n700d200:lln:causal:packed=4", {.lengths = {257, 0, 33, 410}});
}

void add_lln_numbers(Table& table) {
  for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
    add(table, "b1h2n130d256:lln:causal", {.style = style});
    add(table, "b2h2n300d136v16:lln:causal", {.style = style});
  }
  for (const std::int64_t at : {0, 77, 269}) {
    add(table, "b1h2k1n270d136:lln:causal", {.style = InputStyle::spike, .spike_at = at});
  }
}

// Blocks that divide a tile, that do not, and that are longer than a piece.
void add_both_shapes(Table& table) {
  for (const char* dims : {"d256", "d136v200", "d256v72", "d40v256"}) {
    for (const char* flags : {"diag64", "diag100"}) {
      add(table, fmt::format("b1h2k1n130{}:lln+{}:causal", dims, flags));
    }
  }
  for (const int block : {1, 16, 48, 128, 300, 1000}) {
    add(table, fmt::format("b1h1n330d136:lln+diag{}:causal", block));
  }
  for (const int tokens : {0, 1, 64, 257}) {
    add(table, fmt::format("b2h2n{}d144:lln+diag64:causal", tokens));
  }
  add(table, "b1h6k2n270d256:lln+diag128:causal");
}

void add_both_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    for (const int block : {16, 100}) {
      add(table, fmt::format("b3h2k1n150d256:lln+diag{}:causal:masked", block), {.keys = keys});
    }
  }
  add(table, "b1h2k1n700d136:lln+diag64:causal:packed=4", {.lengths = {257, 0, 33, 410}});
}

// Weights of every form and their gradients, heads that are out of reach.
void add_both_numbers(Table& table) {
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      add(table, "b2h2k1n70d136v144:lln+diag16:causal", {.weights = form, .two_weights = two});
      add(table, "b1h2n130d256:lln+diag64:causal",
          {.weights = form, .two_weights = two, .weight_gradients = true});
    }
    add(table, "b3h2k1n90d256:lln+diag100:causal:masked",
        {.weights = form, .two_weights = true, .keys = KeyPattern::left_padding});
  }
  add(table, "b1h2n60d200:lln+diag16:causal:packed=3",
      {.weights = WeightForm::token, .lengths = {10, 0, 50}});
  for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
    add(table, "b1h2n130d256:lln+diag64:causal", {.style = style});
  }
  add(table, "b1h2n130d136:lln+diag64:causal", {.style = InputStyle::spike, .spike_at = 77});
}

}  // namespace

void add_wide_causal_cases(Table& table) {
  add_shapes(table);
  add_lln_sequences(table);
  add_lln_numbers(table);
  add_both_shapes(table);
  add_both_sequences(table);
  add_both_numbers(table);
}

}  // namespace lln::conformance
