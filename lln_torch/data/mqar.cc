// Keys, values and places are drawn without replacement. Places have weights: taking those with the
// smallest -ln(u) / weight gives what drawing them one after another would (Efraimidis, Spirakis).
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/mqar.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lln_torch/data/generated.h"

namespace lln_torch {
namespace {

// `count` different numbers of least .. most, in random order (Floyd's way, then shuffled: memory
// is that of the draws and not of the range).
std::vector<std::int32_t> draw_distinct(Random& random, std::int64_t least, std::int64_t most,
                                        std::int64_t count) {
  std::vector<std::int32_t> drawn;
  std::vector<std::int32_t> sorted;
  for (std::int64_t top = most - count + 1; top <= most; ++top) {
    auto number = static_cast<std::int32_t>(random.between(least, top));
    auto place = std::lower_bound(sorted.begin(), sorted.end(), number);
    if (place != sorted.end() && *place == number) {
      number = static_cast<std::int32_t>(top);
      place = sorted.end();
    }
    sorted.insert(place, number);
    drawn.push_back(number);
  }
  for (std::size_t i = drawn.size(); i > 1; --i) {
    std::swap(drawn[i - 1], drawn[random.below(std::uint64_t{i})]);
  }
  return drawn;
}

std::vector<std::int64_t> draw_places(Random& random, std::int64_t places, std::int64_t count,
                                      double power) {
  std::vector<std::pair<double, std::int64_t>> waits;
  waits.reserve(static_cast<std::size_t>(places));
  for (std::int64_t i = 0; i < places; ++i) {
    const double weight = std::pow(static_cast<double>(i + 1), power - 1);
    waits.emplace_back(-std::log(1 - random.uniform()) / weight, i);
  }
  std::partial_sort(waits.begin(), waits.begin() + count, waits.end());
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < count; ++i) {
    result.push_back(waits[static_cast<std::size_t>(i)].second);
  }
  return result;
}

MqarShape mqar_shape(const Settings& data) {
  MqarShape shape;
  shape.vocabulary = data.integer("vocabulary", shape.vocabulary, 8, 1 << 24);
  shape.tokens = data.integer("tokens", shape.tokens, 4, 1 << 24);
  shape.pairs = data.integer("pairs", shape.pairs, 1, 1 << 22);
  shape.power = data.number("power", shape.power, 1e-6, 10);
  shape.random_filler = data.flag("random_filler", shape.random_filler);
  if (shape.tokens % 2 != 0) data.refuse("tokens", "an even number");
  if (shape.pairs * 4 > shape.tokens) {
    data.refuse("pairs", fmt::format("at most a quarter of the tokens, {}", shape.tokens / 4));
  }
  if (shape.pairs > shape.vocabulary / 2 - 1) {
    data.refuse("pairs", fmt::format("at most the {} keys of a vocabulary of {}",
                                     shape.vocabulary / 2 - 1, shape.vocabulary));
  }
  return shape;
}

}  // namespace

MqarExample make_mqar(Random random, const MqarShape& shape) {
  const std::int64_t half = shape.vocabulary / 2;
  const std::vector<std::int32_t> keys = draw_distinct(random, 1, half - 1, shape.pairs);
  const std::vector<std::int32_t> values =
      draw_distinct(random, half, shape.vocabulary - 1, shape.pairs);
  const std::int64_t context = 2 * shape.pairs;
  const std::vector<std::int64_t> places =
      draw_places(random, (shape.tokens - context) / 2, shape.pairs, shape.power);

  MqarExample example;
  example.ids.assign(static_cast<std::size_t>(shape.tokens), 0);
  example.labels.assign(static_cast<std::size_t>(shape.tokens), kIgnoredLabel);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    example.ids[2 * i] = keys[i];
    example.ids[2 * i + 1] = values[i];
    const auto query = static_cast<std::size_t>(context + 2 * places[i]);
    example.ids[query] = keys[i];
    example.labels[query] = values[i];
  }
  if (shape.random_filler) {
    for (std::int32_t& id : example.ids) {
      if (id == 0) id = static_cast<std::int32_t>(random.below(shape.vocabulary));
    }
  }
  return example;
}

std::unique_ptr<Source> make_mqar_source(const Settings& data, const std::string& /*folder*/) {
  const MqarShape shape = mqar_shape(data);
  const GeneratedSplits splits = GeneratedSplits::from_settings(data, 100'000, 3'000, 3'000);

  Task task;
  task.name = "mqar";
  task.kind = TaskKind::next_token;
  task.vocabulary = shape.vocabulary;
  task.max_tokens = shape.tokens;
  task.metrics = {"accuracy", "loss"};
  const std::int64_t value_count = shape.vocabulary - shape.vocabulary / 2;
  task.chance = 1 / static_cast<double>(value_count);
  task.chance_text = fmt::format(
      "one of {} values by chance: {:.3g}%; one of the {} values shown: {:.1f}%", value_count,
      100 * task.chance, shape.pairs, 100 / static_cast<double>(shape.pairs));

  const MakeExamples make = [=](Split split, const std::vector<std::int64_t>& indices) {
    Batch batch;
    batch.rows = static_cast<std::int64_t>(indices.size());
    batch.text.tokens = shape.tokens;
    for (const std::int64_t index : indices) {
      const MqarExample example =
          make_mqar(example_random(splits, Stream("mqar"), split, index), shape);
      batch.text.ids.insert(batch.text.ids.end(), example.ids.begin(), example.ids.end());
      batch.labels.insert(batch.labels.end(), example.labels.begin(), example.labels.end());
    }
    return batch;
  };
  return make_generated_source(std::move(task), splits, make);
}

}  // namespace lln_torch
