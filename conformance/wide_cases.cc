// Cases of heads wider than those that models mostly have, 129 to 256 channels, in the 16-bit
// types: what kernels for tensor cores split over warps and blocks. LLN, then Diag, then
// both.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <span>
#include <vector>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

// Without gradients of parameters, with which kernels go other ways.
void add(Table& table, const std::string& problem, Case form = {}) {
  form.tensor_cores = true;
  table.add(problem, form, false);
}

// Several tiles of rows and keys, widths that fill none of the groups of channels that warps share,
// and several pieces: sums of rows have one block for up to 128 channels of v, and two for more.
void add_heads(Table& table, const char* type) {
  int tokens = 65;
  for (const char* dims : {"d256", "d136v200", "d256v72", "d40v256"}) {
    add(table, fmt::format("{}:cpu:b1h2k1n{}{}:lln", type, tokens, dims));
    tokens += 5;
  }
  add(table, fmt::format("{}:cpu:b1h2k1n1050m40d136v8:lln", type));
  add(table, fmt::format("{}:cpu:b1h1n1050m40d8v136:lln", type));
}

void add_difficult(Table& table, const char* type) {
  add(table, fmt::format("{}:cpu:b3h2k1n45d248:lln:masked", type), {.keys = KeyPattern::holes});
  add(table, fmt::format("{}:cpu:b1h2k1n75d256:lln:packed=5", type),
      {.lengths = {0, 33, 1, 0, 41}});
  add(table, fmt::format("{}:cpu:b1h1n66d256:lln", type), {.style = InputStyle::large_keys});
  add(table, fmt::format("{}:cpu:b1h2n70d200:lln", type),
      {.style = InputStyle::spike, .spike_at = 47});
}

void add_states(Table& table, const char* type) {
  for (const char* shape : {"b2h2k1n35m40d256", "b2h1n40m0d136v256", "b2h1n0m40d256v136"}) {
    add(table, fmt::format("{}:cpu:{}:lln:state", type, shape));
  }
  add(table, fmt::format("{}:cpu:b3h1n35d144:lln:masked:state", type), {.keys = KeyPattern::holes});
}

// In both types, one after the other: of any problem at least one has aligned tensors.
void add_diag(Table& table, const std::string& shape, const std::string& flags, Case form = {}) {
  for (const char* type : {"bf16", "f16"}) {
    add(table, fmt::format("{}:cpu:{}:{}", type, shape, flags), form);
  }
}

// Widths that fill the parts of the warps of a group and that do not, blocks and lengths around
// borders of tiles.
void add_diag_shapes(Table& table) {
  for (const char* dims : {"d256", "d136v200", "d256v72", "d40v256", "d192v136"}) {
    for (const char* flags : {"diag64", "diag100:causal"}) {
      add_diag(table, fmt::format("b1h2k1n130{}", dims), flags);
    }
  }
  for (const int block : {1, 3, 16, 48, 64, 100, 128, 200, 1000}) {
    const int dim = block % 3 == 1 ? 256 : 136;
    add_diag(table, fmt::format("b1h1n257d{}", dim), fmt::format("diag{}", block));
    add_diag(table, fmt::format("b1h1n140d{}", dim), fmt::format("diag{}:causal", block));
  }
  for (const int tokens : {0, 1, 63, 64, 65}) {
    for (const char* flags : {"diag64:causal", "diag48", "diag1000"}) {
      add_diag(table, fmt::format("b2h2n{}d144", tokens), flags);
    }
  }
  for (const char* heads : {"h4k1", "h6k2"}) {
    add_diag(table, fmt::format("b2{}n100d256", heads), "diag128");
    add_diag(table, fmt::format("b2{}n100d160", heads), "diag64:causal");
  }
}

// Keys that begin late, end early or are missing, and sequences that follow each other.
void add_diag_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    for (const int block : {16, 64, 100, 128}) {
      const std::string flags = fmt::format("diag{}:masked", block);
      add_diag(table, "b3h2k1n150d136", flags, {.keys = keys});
      add_diag(table, "b3h2k1n130d256", fmt::format("diag{}:causal:masked", block), {.keys = keys});
    }
  }
  for (const int block : {32, 64, 100, 1000}) {
    const std::vector<std::int64_t> lengths = {20, 0, 69, 1, 40};
    for (const char* causal : {"", ":causal"}) {
      add_diag(table, "b1h2k1n130d200", fmt::format("diag{}{}:packed=5", block, causal),
               {.lengths = lengths});
    }
  }
  for (const int block : {64, 1000}) {
    add_diag(table, "b1h2k1n2300d8v136", fmt::format("diag{}:masked", block),
             {.keys = KeyPattern::left_padding});
  }
}

// Scores far from each other.
void add_diag_numbers(Table& table) {
  for (const char* flags : {"diag64", "diag200:causal"}) {
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add_diag(table, "b1h2n130d256", flags, {.style = style});
    }
    for (const std::int64_t at : {0, 77, 129}) {
      add_diag(table, "b1h1n130d136", flags, {.style = InputStyle::spike, .spike_at = at});
    }
  }
}

// LLN+Diag, of aligned tensors.
void add_both(Table& table, const std::string& shape, const std::string& flags, Case form = {}) {
  for (const char* type : {"bf16", "f16"}) {
    add(table, fmt::format("{}:cpu:{}:lln+{}", type, shape, flags), form);
    for (Case& c : std::span(table.cases).last(2)) {
      if (c.layout == Layout::gaps) c.layout = Layout::bnhd;
    }
  }
}

void add_both_shapes(Table& table) {
  for (const char* dims : {"d256", "d136v200", "d256v72", "d40v256", "d192v136"}) {
    for (const char* flags : {"diag64", "diag100"}) {
      add_both(table, fmt::format("b1h2k1n130{}", dims), flags);
    }
  }
  for (const int block : {1, 3, 16, 48, 64, 128, 200, 1000}) {
    const int dim = block % 3 == 1 ? 256 : 136;
    add_both(table, fmt::format("b1h1n150d{}", dim), fmt::format("diag{}", block));
  }
  for (const int tokens : {0, 1, 33, 64, 65}) {
    for (const char* flags : {"diag16", "diag1000"}) {
      add_both(table, fmt::format("b2h2n{}d144", tokens), flags);
    }
  }
  add_both(table, "b2h6k2n100d256", "diag64");
  // One key: all channels of the state hold its value, and dq is 0.
  add_both(table, "b3h2n1d256", "diag16");
}

void add_both_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    for (const int block : {16, 100}) {
      const int dim = block == 100 ? 256 : 136;
      add_both(table, fmt::format("b3h2k1n130d{}", dim), fmt::format("diag{}:masked", block),
               {.keys = keys});
    }
  }
  for (const int block : {32, 1000}) {
    add_both(table, "b1h2k1n130d200", fmt::format("diag{}:packed=5", block),
             {.lengths = {20, 0, 69, 1, 40}});
  }
  for (const char* dims : {"d8v136", "d136v8"}) {
    add_both(table, fmt::format("b1h2k1n2100{}", dims), "diag64:masked",
             {.keys = KeyPattern::left_padding});
  }
}

// Weights of every form and their gradients, scores and exponents far from each other.
void add_both_numbers(Table& table) {
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      const Case weights{.weights = form, .two_weights = two};
      add_both(table, "b2h2k1n70d136v144", "diag16", weights);
      add_both(table, "b1h2n130d256", "diag64",
               {.weights = form, .two_weights = two, .weight_gradients = true});
    }
    add_both(table, "b3h2k1n90d256", "diag100:masked",
             {.weights = form, .two_weights = true, .keys = KeyPattern::left_padding});
  }
  add_both(table, "b1h2n60d200", "diag16:packed=3",
           {.weights = WeightForm::token, .lengths = {10, 0, 50}});
  for (const char* flags : {"diag64", "diag200"}) {
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add_both(table, "b1h2n130d256", flags, {.style = style});
    }
    for (const std::int64_t at : {0, 77, 129}) {
      add_both(table, "b1h2n130d136", flags, {.style = InputStyle::spike, .spike_at = at});
    }
  }
  // Forward alone: plain gradients of such values are not finite.
  for (const bool two : {false, true}) {
    add(table, "f16:cpu:b1h2n130d256:lln+diag64",
        {.weights = WeightForm::head, .two_weights = two, .style = InputStyle::large_values});
    table.cases.pop_back();
  }
}

}  // namespace

void add_wide_cases(Table& table) {
  for (const char* type : {"bf16", "f16"}) {
    add_heads(table, type);
    add_difficult(table, type);
    add_states(table, type);
  }
  for (const char* dims : {"n70d192", "n75d136", "n33m32d256"}) {
    add(table, fmt::format("bf16:cpu:b1h2k1{}:lln", dims));
  }
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding}) {
    add(table, "bf16:cpu:b3h1n45d176:lln:masked", {.keys = keys});
  }
  add(table, "bf16:cpu:b1h1n40m60d256:lln:packed=4",
      {.lengths = {10, 0, 30, 0}, .lengths_k = {0, 10, 30, 20}});
  add(table, "bf16:cpu:b1h2k1n50m60d256v136:lln:packed=4:state",
      {.lengths = {20, 0, 30, 0}, .lengths_k = {0, 20, 40, 0}});
  for (const char* shape : {"b2h1n1m90", "b1h2k1n70m1", "b1h2n5m0"}) {
    add(table, fmt::format("bf16:cpu:{}d256:lln", shape));
  }
  add(table, "bf16:cpu:b1h1n70d256v16:lln", {.style = InputStyle::constant_rows});
  for (const int batch : {3, 2}) {  // with a state in some channels, and in all or none
    add(table, fmt::format("bf16:cpu:b{}h1n40d256v16:lln:state", batch),
        {.style = InputStyle::large_keys});
  }
}

void add_wide_diag_cases(Table& table) {
  add_diag_shapes(table);
  add_diag_sequences(table);
  add_diag_numbers(table);
  add_both_shapes(table);
  add_both_sequences(table);
  add_both_numbers(table);
}

}  // namespace lln::conformance
