// Cases of causal Diag in the 16-bit types for kernels on tensor cores: tiles that the mask cuts
// and tiles that lie behind all rows, in blocks that divide a tile of 64 tokens and that do not. In
// f16 the same kernels add it to an LLN part.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <span>
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

// LLN+Diag in f16, of aligned tensors.
void add_both(Table& table, const std::string& problem, Case form = {}) {
  form.tensor_cores = true;
  table.add("f16:cpu:" + problem, form, false);
  for (Case& c : std::span(table.cases).last(2)) {
    if (c.layout == Layout::gaps) c.layout = Layout::bnhd;
  }
}

void add_both_shapes(Table& table) {
  for (const char* dims :
       {"d32", "d64", "d128", "d24v40", "d72v64", "d40v120", "d120v64", "d96v8", "d8v16"}) {
    for (const int block : {64, 100}) {
      add_both(table, fmt::format("b1h2k1n130{}:lln+diag{}:causal", dims, block));
    }
  }
  for (const int block : {1, 3, 16, 48, 64, 100, 128, 200, 1000}) {
    for (const int dim : {32, 64, 128}) {
      // Blocks of 3 and 48 with 32 and 128 channels, the others with 64.
      if ((block % 3 == 0) == (dim == 64)) continue;
      add_both(table, fmt::format("b1h1n257d{}:lln+diag{}:causal", dim, block));
    }
  }
  for (const int tokens : {0, 1, 16, 31, 33, 63, 64, 65, 128, 257}) {
    for (const int block : {48, 64, 1000}) {
      add_both(table, fmt::format("b2h2n{}d16:lln+diag{}:causal", tokens, block));
    }
  }
  for (const char* heads : {"h4k1", "h6k2"}) {
    for (const int dim : {64, 128}) {
      add_both(table, fmt::format("b2{}n100d{}:lln+diag64:causal", heads, dim));
    }
  }
}

void add_both_sequences(Table& table) {
  for (const KeyPattern keys : {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
    for (const int block : {16, 64, 100, 128}) {
      const int dim = block == 100 ? 128 : 32;
      add_both(table, fmt::format("b3h4k2n150d{}:lln+diag{}:causal:masked", dim, block),
               {.keys = keys});
    }
  }
  for (const int block : {32, 64, 100, 1000}) {
    const int dim = block == 100 ? 128 : 64;
    add_both(table, fmt::format("b1h4k2n130d{}:lln+diag{}:causal:packed=5", dim, block),
             {.lengths = {20, 0, 69, 1, 40}});
  }
  add_both(table, "b1h2k1n4200d8v16:lln+diag64:causal:masked", {.keys = KeyPattern::left_padding});
  add_both(table, "b1h1n4200d16v8:lln+diag200:causal");
  add_both(table, "b1h1n4150d8:lln+diag48:causal:packed=3", {.lengths = {30, 4110, 10}});
}

// Weights of every form, exponents that the walks leave to others and scores far from each other.
void add_both_numbers(Table& table) {
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      const Case weights{.weights = form, .two_weights = two};
      add_both(table, "b2h2k1n70d8v72:lln+diag16:causal", weights);
      add_both(table, "b1h2n150d64:lln+diag100:causal", weights);
      add_both(table, "b2h4k2n300d64:lln+diag100:causal",
               {.weights = form, .two_weights = two, .weight_gradients = true});
    }
    add_both(table, "b3h2k1n140d32:lln+diag32:causal:masked",
             {.weights = form, .keys = KeyPattern::left_padding, .weight_gradients = true});
    add_both(table, "b1h2n130d24v32:lln+diag64:causal", {.weights = form, .two_weights = true});
  }
  add_both(table, "b1h2n60d8:lln+diag16:causal:packed=3",
           {.weights = WeightForm::token, .lengths = {10, 0, 50}});
  for (const int block : {64, 200}) {
    for (const InputStyle style : {InputStyle::large_keys, InputStyle::constant_rows}) {
      add_both(table, fmt::format("b1h2n130d32:lln+diag{}:causal", block), {.style = style});
    }
    for (const std::int64_t at : {0, 77, 129}) {
      add_both(table, fmt::format("b1h2n130d64:lln+diag{}:causal", block),
               {.style = InputStyle::spike, .spike_at = at});
    }
  }
}

// Forward alone: plain gradients of such values are not finite.
void add_both_largest(Table& table) {
  for (const char* block : {"16", "64", "100"}) {
    for (const bool two : {false, true}) {
      add_both(
          table, fmt::format("b1h2n130d32:lln+diag{}:causal", block),
          {.weights = WeightForm::head, .two_weights = two, .style = InputStyle::large_values});
      table.cases.pop_back();
    }
  }
}

}  // namespace

void add_diag_cases(Table& table) {
  add_shapes(table);
  add_sequences(table);
  add_difficult(table);
  add_both_shapes(table);
  add_both_sequences(table);
  add_both_numbers(table);
  add_both_largest(table);
}

}  // namespace lln::conformance
