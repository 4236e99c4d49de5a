// Cases of heads wider than those that models mostly have, 129 to 256 channels, in the 16-bit
// types: what kernels for tensor cores split over warps and blocks.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

constexpr std::array kPatterns = {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes};

// Without gradients of parameters, with which kernels go other ways.
void add(Table& table, const std::string& problem, Case form = {}) {
  form.tensor_cores = true;
  table.add(problem, form, false);
}

// Several tiles of rows and keys, widths that fill none of the groups of channels that warps share,
// and all that keys and values can be.
void add_heads(Table& table, const char* type) {
  int tokens = 65;
  for (const char* dims : {"d256", "d192", "d136", "d256v72", "d40v256", "d136v200"}) {
    add(table, fmt::format("{}:cpu:b1h2k1n{}{}:lln", type, tokens, dims));
    tokens += 5;
  }
  for (std::size_t i = 0; i < kPatterns.size(); ++i) {
    add(table, fmt::format("{}:cpu:b3h4k2n45d{}:lln:masked", type, 176 + 40 * i),
        {.keys = kPatterns[i]});
  }
  add(table, fmt::format("{}:cpu:b1h2k1n100d256:lln:packed=5", type),
      {.lengths = {0, 64, 1, 0, 35}});
  for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
    add(table, fmt::format("{}:cpu:b1h1n66d256:lln", type), {.style = style});
  }
  for (const std::int64_t at : {0, 47}) {
    add(table, fmt::format("{}:cpu:b1h2n70d200:lln", type),
        {.style = InputStyle::spike, .spike_at = at});
  }
  // Several pieces; sums of rows have one block for up to 128 channels of v, and two for more.
  add(table, fmt::format("{}:cpu:b1h2k1n1100d136v8:lln", type));
  add(table, fmt::format("{}:cpu:b1h1n1100d8v136:lln", type));
}

void add_states(Table& table, const char* type) {
  for (const char* shape :
       {"b2h2k1n70m50d256", "b3h1n40m0d136v256", "b3h1n0m40d256v136", "b3h2n33d192v64"}) {
    add(table, fmt::format("{}:cpu:{}:lln:state", type, shape));
  }
  add(table, fmt::format("{}:cpu:b3h2n40d144:lln:masked:state", type), {.keys = KeyPattern::holes});
  add(table, fmt::format("{}:cpu:b1h2k1n70m90d256:lln:packed=4:state", type),
      {.lengths = {30, 0, 40, 0}, .lengths_k = {0, 20, 70, 0}});
  add(table, fmt::format("{}:cpu:b3h1n40d256:lln:state", type), {.style = InputStyle::large_keys});
}

}  // namespace

void add_wide_cases(Table& table) {
  for (const char* type : {"bf16", "f16"}) {
    add_heads(table, type);
    add_states(table, type);
  }
  add(table, "bf16:cpu:b1h2n80m120d256:lln:packed=4",
      {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
  for (const char* shape : {"b2h2n1m90", "b1h4k1n70m1", "b1h2n5m0", "b1h2n33m32"}) {
    add(table, fmt::format("bf16:cpu:{}d256:lln", shape));
  }
}

}  // namespace lln::conformance
