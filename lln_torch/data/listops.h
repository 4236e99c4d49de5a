// ListOps of the Long Range Arena: nested lists of digits under MIN, MAX, MED (the median, rounded
// down) and SM (the sum modulo 10); what does the expression give? A tree grows an operator with
// probability 1/4 at every place above its greatest depth, with 2 to 10 arguments, and is kept when
// it has more than 500 and fewer than 2000 tokens.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/data/random.h"

namespace lln_torch {

// Ids: 0 pads, 1 .. 10 are the digits, 11 .. 14 the operators with their bracket, 15 is "]".
constexpr std::int32_t kListOpsPad = 0;
constexpr std::int32_t kListOpsDigit = 1;
constexpr std::int32_t kListOpsOperator = 11;
constexpr std::int32_t kListOpsEnd = 15;
constexpr std::int64_t kListOpsVocabulary = 16;

struct ListOpsShape {
  std::int64_t longer_than = 500;
  std::int64_t shorter_than = 2000;
  std::int64_t depth = 10;  // of the tree, the root being 1; the deepest level holds digits alone
  std::int64_t arguments = 10;
  double operators = 0.25;  // share of the places where one may stand
};

struct ListOpsExample {
  std::vector<std::int32_t> ids;
  std::int32_t value = 0;
};

ListOpsExample make_listops(Random random, const ListOpsShape& shape);

// "[MAX 2 9 [MIN 4 7 ] 0 ]"
std::string listops_text(std::span<const std::int32_t> ids);

std::unique_ptr<Source> make_listops_source(const Settings& data, const std::string& folder);

}  // namespace lln_torch
