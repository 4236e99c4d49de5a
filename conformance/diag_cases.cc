// Cases of causal Diag in the 16-bit types for kernels on tensor cores: tiles that the mask cuts
// and tiles that lie behind all rows, in blocks that divide a tile of 64 tokens and that do not.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <vector>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

// In both types, one after the other: of any problem at least one has aligned tensors.
void add(Table& table, const std::string& shape, int block, const std::string& flags = "",
         Case form = {}) {
  form.tensor_cores = true;
  for (const char* type : {"bf16", "f16"}) {
    table.add(fmt::format("{}:cpu:{}:diag{}:causal{}", type, shape, block, flags), form, false);
  }
}

// Every width of tiles, filled and not; blocks and lengths around borders of tiles.
void add_shapes(Table& table) {
  for (const char* dims : {"d32", "d64", "d128", "d24v40", "d72v64", "d40v120", "d96v8", "d8v16"}) {
    for (const int block : {64, 100}) add(table, fmt::format("b1h2k1n130{}", dims), block);
  }
  for (const int block : {1, 3, 16, 48, 64, 100, 128, 200, 1000}) {
    add(table, fmt::format("b1h1n257d{}", block % 64 == 0 ? 128 : 32), block);
  }
  for (const int tokens : {0, 1, 63, 64, 65, 130, 257}) {
    for (const int block : {64, 1000}) add(table, fmt::format("b2h2n{}d16", tokens), block);
  }
  for (const char* heads : {"h4k1", "h6k2"}) add(table, fmt::format("b2{}n200d64", heads), 128);
}

// Keys that begin late, end early or are missing, and sequences that follow each other.
void add_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    for (const int block : {16, 64, 100, 128}) {
      add(table, fmt::format("b3h4k2n150d{}", block == 100 ? 128 : 32), block, ":masked",
          {.keys = keys});
    }
  }
  const std::vector<std::int64_t> patterns[] = {{20, 0, 69, 1, 40}, {64, 130, 0, 65, 1}};
  for (const auto& lengths : patterns) {
    const int tokens = lengths[1] == 0 ? 130 : 260;
    for (const int block : {32, 64, 100, 1000}) {
      add(table, fmt::format("b1h4k2n{}d{}", tokens, block == 100 ? 128 : 64), block, ":packed=5",
          {.lengths = lengths});
    }
  }
}

// Scores far from each other, and sequences that are cut into pieces of several tiles.
void add_difficult(Table& table) {
  for (const int block : {64, 200}) {
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add(table, "b1h2n130d32", block, "", {.style = style});
    }
    for (const std::int64_t at : {0, 77, 129}) {
      add(table, "b1h2n130d64", block, "", {.style = InputStyle::spike, .spike_at = at});
    }
  }
  for (const int block : {64, 100, 1000}) {
    add(table, "b1h2k1n2300d8v16", block, ":masked", {.keys = KeyPattern::left_padding});
  }
}

}  // namespace

void add_diag_cases(Table& table) {
  add_shapes(table);
  add_sequences(table);
  add_difficult(table);
}

}  // namespace lln::conformance
