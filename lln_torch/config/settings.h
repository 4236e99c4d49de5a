// Settings of a run: a TOML file whose every key is asked for by the part that owns it. A key that
// nobody asks for is an error that names the nearest one, so that a misspelt setting never counts
// as a default. TOML because people write these files by hand: comments, sections, no commas.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lln_torch {

// One table of a config. Copies refer to the same table; what was asked for, with defaults filled
// in, is kept beside it. Faults are lln::Error (invalid_argument) with file, key, value and what
// was expected.
class Settings {
 public:
  Settings();  // an empty table
  // Throws lln::Error (io) with the line where the file is not TOML.
  static Settings from_file(const std::string& path);
  static Settings from_toml(std::string_view text, const std::string& name);
  // What resolved() gave.
  static Settings from_json(const nlohmann::ordered_json& value, const std::string& name);

  // `--set train.steps=300`: the value as TOML, or a string where it is none.
  void set(std::string_view assignment);

  bool has(std::string_view key) const;
  std::int64_t integer(std::string_view key, std::int64_t otherwise, std::int64_t least,
                       std::int64_t most) const;
  double number(std::string_view key, double otherwise, double least, double most) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string text(std::string_view key, std::string_view otherwise) const;
  // One of `choices`.
  std::string choice(std::string_view key, std::string_view otherwise,
                     const std::vector<std::string>& choices) const;
  std::vector<std::string> texts(std::string_view key) const;  // a string counts as a list of one
  // The table under `key`, empty where there is none.
  Settings table(std::string_view key) const;

  // Without a default: an error says what is missing.
  std::string required_text(std::string_view key) const;

  // Throws one lln::Error that names every key, of this table and those in it, that was not asked
  // for, each with the nearest that was.
  void finish() const;
  // All that was asked for, with defaults filled in: what a run stores of its config.
  nlohmann::ordered_json resolved() const;

  // An error about the value of `key` for rules that only its owner knows.
  [[noreturn]] void refuse(std::string_view key, const std::string& expected) const;

 private:
  struct Table;
  explicit Settings(std::shared_ptr<Table> table);
  std::shared_ptr<Table> table_;
};

// The entry of `known` that a user most likely meant by `word`, empty where none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace lln_torch
