// Cases of dim and dim_v that are no multiples of 8: kernels for tensor cores get rows of them with
// padding behind, of which nothing may be seen. In all kinds and types, one of the two a multiple
// of 8 or none.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "conformance/case_table.h"

namespace lln::conformance {
namespace {

constexpr std::array<const char*, 6> kPaddedKinds = {
    "lln", "lln:causal", "diag16", "diag48:causal", "lln+diag32", "lln+diag64:causal"};
constexpr std::array<const char*, 8> kPaddedDims = {"d60",     "d100",  "d36v64", "d64v36",
                                                    "d50v100", "d7v20", "d33",    "d102v58"};

// Without gradients of parameters, with which kernels go other ways.
void add(Table& table, const std::string& problem, Case form = {}) {
  form.tensor_cores = true;
  table.add(problem, form, false);
}

// Every kind in every type, with dims that rotate.
void add_kinds(Table& table) {
  std::size_t i = 0;
  for (const char* type : kTypes) {
    for (const char* kind : kPaddedKinds) {
      for (int times = 0; times < 3; ++times) {
        add(table, fmt::format("{}:cpu:b2h2k1n130{}:{}", type, rotate(kPaddedDims, i++), kind));
      }
    }
  }
  for (const char* dims : {"d1", "d2v9", "d4v8", "d8v4", "d127", "d121v3"}) {
    for (const char* kind : {"lln", "lln+diag16:causal"}) {
      add(table, fmt::format("{}:cpu:b1h2n70{}:{}", rotate(kTypes, i++), dims, kind));
    }
  }
  for (const char* dims : {"d130", "d250v140", "d100v196"}) {
    add(table, fmt::format("{}:cpu:b1h2k1n70{}:lln", rotate(kTypes, 1 + i++ % 2), dims));
    add(table, fmt::format("{}:cpu:b1h2k1n130{}:lln+diag32", rotate(kTypes, 1 + i % 2), dims));
    add(table, fmt::format("{}:cpu:b1h2n130{}:diag48:causal", rotate(kTypes, 1 + i % 2), dims));
    add(table, fmt::format("bf16:cpu:b2h2k1n300{}:lln:causal", dims));
  }
  add(table, "bf16:cpu:b2h2k1n130d250v140:lln+diag32:causal");
}

// Queries and keys that a channel of zeros would outweigh, and exponents that the first way of a
// kernel is not for: the others have to know of the padding, too.
void add_exponents(Table& table) {
  std::size_t i = 0;
  for (const char* type : kTypes) {
    for (const char* kind : {"lln", "lln:causal", "lln+diag32", "lln+diag32:causal"}) {
      const auto problem = [&] {
        return fmt::format("{}:cpu:b1h2n130{}:{}", type, rotate(kPaddedDims, i++), kind);
      };
      add(table, problem(), {.style = InputStyle::far_below});
      add(table, problem(), {.style = InputStyle::large_keys});
      add(table, problem(), {.style = InputStyle::spike, .spike_at = 77});
    }
    add(table, fmt::format("{}:cpu:b1h2n130d60:lln", type), {.style = InputStyle::constant_rows});
  }
  for (const char* dims : {"d250v140", "d196"}) {
    add(table, fmt::format("bf16:cpu:b1h1n70{}:lln", dims), {.style = InputStyle::far_below});
  }
  add(table, "bf16:cpu:b1h1n300d250v140:lln:causal", {.style = InputStyle::far_below});
}

void add_sequences(Table& table) {
  std::size_t i = 0;
  for (const char* kind : kPaddedKinds) {
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      add(table,
          fmt::format("{}:cpu:b3h4k2n90{}:{}:masked", rotate(kTypes, i + i / 3),
                      rotate(kPaddedDims, i), kind),
          {.keys = keys});
      ++i;
    }
    add(table,
        fmt::format("{}:cpu:b1h4k2n130{}:{}:packed=5", rotate(kTypes, i / 3),
                    rotate(kPaddedDims, i), kind),
        {.lengths = {20, 0, 69, 1, 40}});
  }
  add(table, "bf16:cpu:b1h2n80m120d60:lln:packed=4",
      {.lengths = {30, 0, 50, 0}, .lengths_k = {0, 20, 60, 40}});
  for (const char* tokens : {"n5m0", "n0m5", "n1m130", "n130m1"}) {
    add(table, fmt::format("bf16:cpu:b2h2{}d60v36:lln", tokens));
  }
  // Several pieces, and about as many heads as a large device has multiprocessors.
  for (const char* type : {"bf16", "f32"}) {
    add(table, fmt::format("{}:cpu:b1h2k1n2300d12v7:lln", type));
    add(table, fmt::format("{}:cpu:b1h1n4200d6v12:lln:causal", type),
        {.style = InputStyle::far_below});
  }
  add(table, "bf16:cpu:b1h1n4200d12v6:lln+diag64:causal");
  add(table, "bf16:cpu:b6h12n40m70d60:lln");
}

// Weights of every form, with gradients of them and without: those of channels are padded, too.
void add_weights(Table& table) {
  std::size_t i = 0;
  for (const WeightForm form :
       {WeightForm::call, WeightForm::head, WeightForm::channel, WeightForm::token}) {
    for (const bool two : {false, true}) {
      const Case weights{.weights = form, .two_weights = two};
      Case gradients = weights;
      gradients.weight_gradients = true;
      for (const char* type : kTypes) {
        for (const char* causal : {"", ":causal"}) {
          add(table,
              fmt::format("{}:cpu:b2h4k2n70{}:lln+diag32{}", type, rotate(kPaddedDims, i++),
                          causal),
              two ? weights : gradients);
        }
      }
      add(table, fmt::format("bf16:cpu:b2h2n130{}:lln+diag64", rotate(kPaddedDims, i++)),
          two ? gradients : weights);
    }
  }
}

// Pieces of longer sequences.
void add_states(Table& table) {
  std::size_t i = 0;
  for (const char* type : kTypes) {
    for (const char* shape : {"b3h2k1n90", "b3h2n70m0", "b3h1n0m90", "b2h1n70m1100"}) {
      add(table, fmt::format("{}:cpu:{}{}:lln:state", type, shape, rotate(kPaddedDims, i++)));
    }
    add(table, fmt::format("{}:cpu:b3h2n130d60:lln:state", type),
        {.style = InputStyle::large_keys});
  }
  add(table, "bf16:cpu:b1h2k1n70m130d60v36:lln:packed=5:state",
      {.lengths = {30, 0, 20, 20, 0}, .lengths_k = {0, 20, 80, 30, 0}});
}

}  // namespace

void add_padded_cases(Table& table) {
  add_kinds(table);
  add_exponents(table);
  add_sequences(table);
  add_weights(table);
  add_states(table);
}

}  // namespace lln::conformance
