// TOML is read by toml++ and kept as JSON: one tree of values for files, --set and what a run
// stores.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/config/settings.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "lln/error.h"

namespace lln_torch {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void throw_invalid(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, text);
}

Json to_json(const toml::node& node, const std::string& where) {
  if (const auto* table = node.as_table()) {
    Json value = Json::object();
    for (const auto& [key, member] : *table) {
      const std::string name(key.str());
      value[name] = to_json(member, where.empty() ? name : where + "." + name);
    }
    return value;
  }
  if (const auto* array = node.as_array()) {
    Json value = Json::array();
    for (const auto& member : *array) value.push_back(to_json(member, where));
    return value;
  }
  if (const auto* x = node.as_string()) return x->get();
  if (const auto* x = node.as_integer()) return x->get();
  if (const auto* x = node.as_floating_point()) return x->get();
  if (const auto* x = node.as_boolean()) return x->get();
  throw_invalid(fmt::format("{}: dates and times are no settings", where));
}

const char* type_text(const Json& value) {
  if (value.is_object()) return "a table";
  if (value.is_array()) return "a list";
  if (value.is_string()) return "a string";
  if (value.is_boolean()) return "true or false";
  return "a number";
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  std::string best;
  std::size_t least = std::max<std::size_t>(word.size() / 2, 1) + 1;
  for (const std::string& candidate : known) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

struct Settings::Table {
  std::string file;
  std::string path;  // of the table in the file, "" for the whole
  Json given = Json::object();
  Json asked = Json::object();
  std::map<std::string, std::shared_ptr<Table>, std::less<>> tables;

  std::string full(std::string_view key) const {
    return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
  }

  const Json* find(std::string_view key) const {
    const auto found = given.find(key);
    return found == given.end() ? nullptr : &*found;
  }

  [[noreturn]] void fail(std::string_view key, const std::string& text) const {
    throw_invalid(fmt::format("{}: {}: {}", file, full(key), text));
  }

  void collect_unknown(std::vector<std::string>& faults) const {
    std::vector<std::string> known;
    for (const auto& [key, value] : asked.items()) known.push_back(key);
    for (const auto& [key, table] : tables) known.push_back(key);
    for (const auto& [key, value] : given.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const std::string meant = nearest(key, known);
      faults.push_back(fmt::format("{}{}", full(key),
                                   meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant)));
    }
    for (const auto& [key, table] : tables) table->collect_unknown(faults);
  }

  Json resolved() const {
    Json value = asked;
    for (const auto& [key, table] : tables) value[key] = table->resolved();
    return value;
  }
};

Settings::Settings() : table_(std::make_shared<Table>()) { table_->file = "settings"; }

Settings::Settings(std::shared_ptr<Table> table) : table_(std::move(table)) {}

Settings Settings::from_file(const std::string& path) {
  try {
    const toml::table parsed = toml::parse_file(path);
    return from_json(to_json(parsed, ""), path);
  } catch (const toml::parse_error& error) {
    const toml::source_region& region = error.source();
    // A file that cannot be opened has no line.
    const std::string line = region.begin.line > 0 ? fmt::format(":{}", region.begin.line) : "";
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}{}: {}", path, line, error.description()));
  }
}

Settings Settings::from_toml(std::string_view text, const std::string& name) {
  try {
    const toml::table parsed = toml::parse(text);
    return from_json(to_json(parsed, ""), name);
  } catch (const toml::parse_error& error) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}:{}: {}", name, error.source().begin.line,
                                                     error.description()));
  }
}

Settings Settings::from_json(const nlohmann::ordered_json& value, const std::string& name) {
  if (!value.is_object()) throw_invalid(name + ": expected a table");
  auto table = std::make_shared<Table>();
  table->file = name;
  table->given = value;
  return Settings(std::move(table));
}

void Settings::set(std::string_view assignment) {
  const std::size_t equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    throw_invalid(fmt::format("--set {}: expected KEY=VALUE", assignment));
  }
  const std::string key(assignment.substr(0, equals));
  const std::string text(assignment.substr(equals + 1));
  Json value = text;
  try {
    const toml::table parsed = toml::parse("value = " + text);
    if (parsed.size() != 1) {
      throw_invalid(
          fmt::format("--set {}: expected one value, found {} lines with keys of their "
                      "own",
                      key, parsed.size() - 1));
    }
    value = to_json(*parsed.get("value"), key);
  } catch (const toml::parse_error&) {  // a word without quotes is a string
  }
  Json* place = &table_->given;
  std::istringstream parts(key);
  for (std::string part; std::getline(parts, part, '.');) {
    if (!place->is_object()) throw_invalid(fmt::format("--set {}: a part is no table", assignment));
    place = &(*place)[part];
    if (place->is_null() && !parts.eof()) *place = Json::object();
  }
  *place = std::move(value);
}

bool Settings::has(std::string_view key) const { return table_->find(key) != nullptr; }

std::int64_t Settings::integer(std::string_view key, std::int64_t otherwise, std::int64_t least,
                               std::int64_t most) const {
  std::int64_t value = otherwise;
  if (const Json* given = table_->find(key)) {
    if (!given->is_number_integer()) {
      table_->fail(key, fmt::format("expected an integer, found {}", given->dump()));
    }
    value = given->get<std::int64_t>();
  }
  if (value < least || value > most) {
    table_->fail(key, fmt::format("expected {} to {}, found {}", least, most, value));
  }
  table_->asked[std::string(key)] = value;
  return value;
}

double Settings::number(std::string_view key, double otherwise, double least, double most) const {
  double value = otherwise;
  if (const Json* given = table_->find(key)) {
    if (!given->is_number()) {
      table_->fail(key, fmt::format("expected a number, found {}", given->dump()));
    }
    value = given->get<double>();
  }
  if (!(value >= least && value <= most)) {
    table_->fail(key, fmt::format("expected {} to {}, found {}", least, most, value));
  }
  table_->asked[std::string(key)] = value;
  return value;
}

bool Settings::flag(std::string_view key, bool otherwise) const {
  bool value = otherwise;
  if (const Json* given = table_->find(key)) {
    if (!given->is_boolean()) {
      table_->fail(key, fmt::format("expected true or false, found {}", given->dump()));
    }
    value = given->get<bool>();
  }
  table_->asked[std::string(key)] = value;
  return value;
}

std::string Settings::text(std::string_view key, std::string_view otherwise) const {
  std::string value(otherwise);
  if (const Json* given = table_->find(key)) {
    if (!given->is_string()) {
      table_->fail(key, fmt::format("expected a string, found {}", given->dump()));
    }
    value = given->get<std::string>();
  }
  table_->asked[std::string(key)] = value;
  return value;
}

std::string Settings::choice(std::string_view key, std::string_view otherwise,
                             const std::vector<std::string>& choices) const {
  std::string value = text(key, otherwise);
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    const std::string meant = nearest(value, choices);
    table_->fail(key,
                 fmt::format("expected one of {}, found \"{}\"{}", fmt::join(choices, ", "), value,
                             meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant)));
  }
  return value;
}

std::vector<std::string> Settings::texts(std::string_view key) const {
  std::vector<std::string> values;
  if (const Json* given = table_->find(key)) {
    if (given->is_string()) {
      values.push_back(given->get<std::string>());
    } else if (given->is_array() && std::all_of(given->begin(), given->end(),
                                                [](const Json& x) { return x.is_string(); })) {
      values = given->get<std::vector<std::string>>();
    } else {
      table_->fail(key, fmt::format("expected a list of strings, found {}", given->dump()));
    }
  }
  table_->asked[std::string(key)] = values;
  return values;
}

std::string Settings::required_text(std::string_view key) const {
  if (!has(key)) table_->fail(key, "missing: expected a string");
  return text(key, "");
}

Settings Settings::table(std::string_view key) const {
  auto [place, added] = table_->tables.try_emplace(std::string(key));
  if (added) {
    auto member = std::make_shared<Table>();
    member->file = table_->file;
    member->path = table_->full(key);
    if (const Json* given = table_->find(key)) {
      if (!given->is_object()) {
        table_->fail(key, fmt::format("expected a table, found {}", type_text(*given)));
      }
      member->given = *given;
    }
    place->second = std::move(member);
  }
  return Settings(place->second);
}

void Settings::finish() const {
  std::vector<std::string> faults;
  table_->collect_unknown(faults);
  if (faults.empty()) return;
  throw_invalid(fmt::format("{}: unknown {}: {}", table_->file,
                            faults.size() == 1 ? "setting" : "settings", fmt::join(faults, ", ")));
}

nlohmann::ordered_json Settings::resolved() const { return table_->resolved(); }

void Settings::refuse(std::string_view key, const std::string& expected) const {
  const Json* given = table_->find(key);
  table_->fail(key, fmt::format("expected {}, found {}", expected,
                                given == nullptr ? "none" : given->dump()));
}

}  // namespace lln_torch
