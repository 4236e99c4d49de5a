// Cases of heads wider than those that models mostly have, 129 to 256 channels, in the 16-bit
// types: what kernels for tensor cores split over warps and blocks.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

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

}  // namespace lln::conformance
