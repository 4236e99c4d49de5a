// Trees are written as ids while they grow, and evaluated on the way; one that becomes too long is
// left at once. The root is always an operator: a lone digit is never long enough to be kept.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/listops.h"

#include <algorithm>
#include <array>

#include "lln/error.h"
#include "lln_torch/data/generated.h"

namespace lln_torch {
namespace {

constexpr std::array<const char*, 4> kListOpsNames = {"MIN", "MAX", "MED", "SM"};

class ListOpsGrower {
 public:
  ListOpsGrower(Random random, const ListOpsShape& shape) : random_(random), shape_(shape) {}

  // False where the tree is too short or too long.
  bool grow(ListOpsExample& example) {
    ids_.clear();
    example.value = list(1);
    const auto size = static_cast<std::int64_t>(ids_.size());
    if (size <= shape_.longer_than || size >= shape_.shorter_than) return false;
    example.ids = ids_;
    return true;
  }

 private:
  std::int32_t place(std::int64_t depth) {
    if (depth < shape_.depth && random_.chance(shape_.operators)) return list(depth);
    const auto digit = static_cast<std::int32_t>(random_.below(std::int64_t{10}));
    ids_.push_back(kListOpsDigit + digit);
    return digit;
  }

  std::int32_t list(std::int64_t depth) {
    const std::int64_t which = random_.below(std::int64_t{4});
    const std::int64_t count = random_.between(2, shape_.arguments);
    ids_.push_back(kListOpsOperator + static_cast<std::int32_t>(which));
    std::array<std::int32_t, 10> counts{};  // of each digit among the arguments
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (static_cast<std::int64_t>(ids_.size()) >= shape_.shorter_than) return 0;
      const std::int32_t value = place(depth + 1);
      ++counts[static_cast<std::size_t>(value)];
      sum += value;
    }
    ids_.push_back(kListOpsEnd);
    switch (which) {
      case 0:
        return ranked(counts, 0);
      case 1:
        return ranked(counts, count - 1);
      case 2:
        return (ranked(counts, (count - 1) / 2) + ranked(counts, count / 2)) / 2;
      default:
        return sum % 10;
    }
  }

  // The value at `rank` of the sorted arguments.
  static std::int32_t ranked(const std::array<std::int32_t, 10>& counts, std::int64_t rank) {
    std::int32_t value = 0;
    for (std::int64_t seen = counts[0]; seen <= rank && value < 9;) {
      seen += counts[static_cast<std::size_t>(++value)];
    }
    return value;
  }

  Random random_;
  const ListOpsShape& shape_;
  std::vector<std::int32_t> ids_;
};

ListOpsShape listops_shape(const Settings& data) {
  ListOpsShape shape;
  shape.longer_than = data.integer("longer_than", shape.longer_than, 0, 1 << 20);
  shape.shorter_than = data.integer("shorter_than", shape.shorter_than, 1, 1 << 20);
  shape.depth = data.integer("depth", shape.depth, 2, 64);
  shape.arguments = data.integer("arguments", shape.arguments, 2, 1000);
  shape.operators = data.number("operators", shape.operators, 0.01, 0.9);
  if (shape.shorter_than - shape.longer_than < 10) {
    data.refuse("shorter_than", "at least 10 more than longer_than");
  }
  return shape;
}

}  // namespace

ListOpsExample make_listops(Random random, const ListOpsShape& shape) {
  ListOpsExample example;
  ListOpsGrower grower(random, shape);
  // Of the usual trees one in ten is kept; a shape that keeps none of so many is a mistake.
  constexpr int kTries = 1'000'000;
  for (int i = 0; i < kTries; ++i) {
    if (grower.grow(example)) return example;
  }
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   "listops: none of a million trees is longer than " +
                       std::to_string(shape.longer_than) + " and shorter than " +
                       std::to_string(shape.shorter_than) + " tokens with depth " +
                       std::to_string(shape.depth) + " and up to " +
                       std::to_string(shape.arguments) + " arguments");
}

std::string listops_text(std::span<const std::int32_t> ids) {
  std::string text;
  for (const std::int32_t id : ids) {
    if (id == kListOpsPad) continue;
    if (!text.empty()) text += ' ';
    if (id >= kListOpsDigit && id < kListOpsOperator) {
      text += std::to_string(id - kListOpsDigit);
    } else if (id >= kListOpsOperator && id < kListOpsEnd) {
      text += std::string("[") + kListOpsNames[static_cast<std::size_t>(id - kListOpsOperator)];
    } else if (id == kListOpsEnd) {
      text += ']';
    } else {
      text += "<" + std::to_string(id) + "?>";
    }
  }
  return text;
}

std::unique_ptr<Source> make_listops_source(const Settings& data, const std::string& /*folder*/) {
  const ListOpsShape shape = listops_shape(data);
  const GeneratedSplits splits = GeneratedSplits::from_settings(data, 96'000, 2'000, 2'000);
  const bool fixed = data.flag("fixed_length", false);

  Task task;
  task.name = "listops";
  task.kind = TaskKind::classes;
  task.classes = 10;
  task.vocabulary = kListOpsVocabulary;
  task.max_tokens = shape.shorter_than - 1;
  task.pad_id = kListOpsPad;
  task.metrics = {"accuracy", "loss"};
  task.text_of_ids = listops_text;

  const PaddedWidth width{.most = task.max_tokens, .unit = 64, .fixed = fixed};
  const MakeExamples make = [=](Split split, const std::vector<std::int64_t>& indices) {
    Batch batch;
    batch.rows = static_cast<std::int64_t>(indices.size());
    std::vector<std::vector<std::int32_t>> rows;
    for (const std::int64_t index : indices) {
      ListOpsExample example =
          make_listops(example_random(splits, Stream("listops"), split, index), shape);
      rows.push_back(std::move(example.ids));
      batch.labels.push_back(example.value);
    }
    batch.text = padded_rows(rows, width, kListOpsPad);
    return batch;
  };
  std::vector<std::int64_t> all;
  constexpr std::int64_t kCounted = 10'000;  // half a second; a share of .17 is known to .004
  for (std::int64_t i = 0; i < std::min(splits.held_out_rows, kCounted); ++i) all.push_back(i);
  const ClassBalance balance = class_balance(make(splits.held_out, all).labels, task.classes);
  task.chance = balance.majority;
  task.chance_text = balance.text;
  return make_generated_source(std::move(task), splits, make);
}

}  // namespace lln_torch
