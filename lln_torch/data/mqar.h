// Multi-query associative recall (Arora et al., "Zoology", 2023): pairs of a key and a value, then
// the keys again, scattered, each to be answered by its value. What a state of fixed size must lose
// from some number of pairs on.
//   k1 v1 k2 v2 .. | k2 .. k1 ..     labels at the repeated keys alone: v2, v1
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/data/random.h"

namespace lln_torch {

struct MqarShape {
  std::int64_t vocabulary = 8192;  // 0 fills, then keys below the half, values from it on
  std::int64_t tokens = 256;       // even
  std::int64_t pairs = 16;         // at most a quarter of the tokens
  // Places of the queries: the i-th place (from 1) has weight i^(power - 1), so that small powers
  // ask soon and 1 asks anywhere.
  double power = 0.01;
  // What stands between the queries: any token, or 0.
  bool random_filler = true;
};

struct MqarExample {
  std::vector<std::int32_t> ids;     // [tokens]
  std::vector<std::int32_t> labels;  // [tokens]: the value at a query, kIgnoredLabel elsewhere
};

MqarExample make_mqar(Random random, const MqarShape& shape);

std::unique_ptr<Source> make_mqar_source(const Settings& data, const std::string& folder);

}  // namespace lln_torch
