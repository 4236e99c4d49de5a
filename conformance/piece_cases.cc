// Cases of calls on pieces of longer sequences: states of keys elsewhere, blocks that are counted
// from elsewhere.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

// The state of keys elsewhere is given, and in the backward a gradient of the state of all keys
// comes back: what the pieces of a cut sequence are. Rows that read a state alone, and keys alone
// whose state is wanted, are pieces too.
void add_states(Table& table) {
  constexpr std::array<const char*, 4> kForms = {"lln", "lln:causal", "lln+diag16",
                                                 "lln+diag16:causal"};
  for (std::size_t i = 0; i < kDims.size(); ++i) {
    table.add(fmt::format("f32:cpu:b2h2k1n70d{}v{}:{}:state", kDims[i], rotate(kDims, i * 5 + 3),
                          rotate(kForms, i)));
  }
  for (const char* kind : kForms) {
    for (const char* type : kTypes) {
      for (const char* feature : kFeatures) {
        table.add(fmt::format("{}:cpu:b2h2n70d24:{}:state:feature={}", type, kind, feature));
      }
      table.add(fmt::format("{}:cpu:b3h2n130d16:{}:state", type, kind),
                {.style = InputStyle::large_keys});
    }
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      table.add(fmt::format("f32:cpu:b3h4k2n150d16:{}:masked:state", kind), {.keys = keys});
      table.add(fmt::format("bf16:cpu:b3h2n67d24:{}:masked:state", kind), {.keys = keys});
    }
    table.add(fmt::format("f32:cpu:b1h2k1n200d16v24:{}:packed=5:state", kind),
              {.lengths = {0, 64, 1, 0, 135}});
    for (const std::int64_t at : {0, 63, 77, 129}) {
      table.add(fmt::format("f32:cpu:b1h2n130d16:{}:state", kind),
                {.style = InputStyle::spike, .spike_at = at});
    }
    table.add(fmt::format("f32:cpu:b3h1n0d8:{}:state", kind));
    table.add(fmt::format("f32:cpu:b1h1n1100d8:{}:state", kind));
    table.add(fmt::format("f32:cpu:b2h1n1100d4:{}:masked:state", kind),
              {.keys = KeyPattern::left_padding});
    table.add(fmt::format("f64:cpu:b2h2k1n40d8v5:{}:state", kind));
  }
  for (const char* tokens : {"n5m0", "n0m5", "n1m300", "n300m1", "n700m0", "n0m700"}) {
    table.add(fmt::format("f32:cpu:b3h4k2{}d24v16:lln:state", tokens));
    table.add(fmt::format("bf16:cpu:b3h2{}d24:lln:state:feature=elu", tokens));
  }
  table.add("f32:cpu:b1h2n80m120d16:lln:packed=4:state",
            {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
}

// Heads of the widths that kernels for tensor cores have, and long enough for several of their
// pieces.
void add_wide_states(Table& table) {
  for (const char* type : {"bf16", "f16", "f32"}) {
    for (const char* shape :
         {"b3h2k1n300d64", "b3h2n200m0d64", "b3h2k1n0m2100d64", "b1h1n2100m70d64",
          "b3h1n70m1100d128", "b3h2n150m0d128v64", "b3h1n0m90d40v128"}) {
      table.add(fmt::format("{}:cpu:{}:lln:state", type, shape));
    }
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      table.add(fmt::format("{}:cpu:b3h2n300d64:lln:masked:state", type), {.keys = keys});
    }
    table.add(fmt::format("{}:cpu:b1h2k1n700m1300d64:lln:packed=5:state", type),
              {.lengths = {30, 0, 570, 100, 0}, .lengths_k = {0, 20, 1200, 80, 0}});
    table.add(fmt::format("{}:cpu:b3h1n130d64:lln:state", type), {.style = InputStyle::large_keys});
  }
}

// Blocks are counted from tokens before the sequence, inside of it or behind it: smaller than a
// tile, as large, larger, and with all that their rows and keys can be.
void add_block_origins(Table& table) {
  constexpr std::array<const char*, 6> kParts = {"diag",           "diag:causal",
                                                 "lln+diag",       "lln+diag:causal",
                                                 "lln+diag:state", "lln+diag:causal:state"};
  const auto with_block = [](std::string kind, int block) {
    return kind.insert(kind.find("diag") + 4, std::to_string(block)) + ":block_origins";
  };
  std::size_t i = 0;
  for (const char* part : kParts) {
    for (const int block : kBlocks) {
      table.add(fmt::format("{}:cpu:b5{}d16:{}", rotate(kTypes, i++ % 4),
                            block > 128 ? "h1n330" : "h2k1n150", with_block(part, block)));
    }
    const std::string kind = with_block(part, 16);
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      table.add(fmt::format("f32:cpu:b5h2n150d16:{}:masked", kind), {.keys = keys});
      table.add(fmt::format("f32:cpu:b5h2k1n250d8:{}:masked", with_block(part, 200)),
                {.keys = keys});
    }
    table.add(fmt::format("f32:cpu:b1h2k1n200d16v24:{}:packed=5", kind),
              {.lengths = {0, 64, 1, 0, 135}});
    table.add(fmt::format("f32:cpu:b2h1n1100d4:{}", kind));
    table.add(fmt::format("f64:cpu:b5h2k1n40d8v5:{}", kind));
  }
}

// Blocks that do not fill a tile, that are one, or span several, with weights that belong to
// channels or tokens.
void add_weighted_blocks(Table& table) {
  for (const WeightForm form : {WeightForm::channel, WeightForm::token}) {
    for (const int block : {48, 100, 200}) {
      const Case weights{.weights = form, .two_weights = block == 100};
      Case masked = weights;
      masked.keys = KeyPattern::holes;
      for (const char* causal : {"", ":causal"}) {
        const std::string kind = fmt::format("lln+diag{}{}:state", block, causal);
        table.add("f32:cpu:b2h4k2n230d16v20:" + kind, weights);
        table.add("f32:cpu:b5h4k2n230d16v20:" + kind + ":masked:block_origins", masked);
      }
    }
  }
}

}  // namespace

void add_piece_cases(Table& table) {
  add_states(table);
  add_wide_states(table);
  add_block_origins(table);
  add_weighted_blocks(table);
}

}  // namespace lln::conformance
