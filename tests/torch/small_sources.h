// Sources of data from lines of TOML, and rows of bytes as text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"

namespace lln_torch {

inline std::unique_ptr<Source> source_of(const std::string& toml, const std::string& folder = "") {
  const Settings settings = Settings::from_toml(toml, "test.toml");
  std::unique_ptr<Source> result = make_source(settings, folder);
  settings.finish();
  return result;
}

// The text of a row of bytes; the tokens before and after a text as marks.
inline std::string row_text(const TextRows& rows, std::int64_t row) {
  std::string text;
  for (std::int64_t i = row * rows.tokens; i < (row + 1) * rows.tokens; ++i) {
    const std::int32_t id = rows.ids[static_cast<std::size_t>(i)];
    if (id == 2) text += '<';
    if (id == 3) text += '>';
    if (id >= 5) text += static_cast<char>(id - 5);
  }
  return text;
}

}  // namespace lln_torch
