// Text from ids that come one by one, as a model writes it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

// What it gives out one after another is what the tokenizer makes of all ids at once. An id costs
// the same however long the text is, because the text of the last few is made again with it.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}  // which outlives this

  // What ids add to the text. A character whose last bytes are still to come is kept back.
  std::string add(std::span<const std::int32_t> ids);
  // What was kept back, at the end of the text.
  std::string end();

 private:
  std::string take(const std::string& text, std::size_t length);
  void forget(std::size_t kept_back);
  bool shows(std::int32_t id) const;

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> last_;  // ids, so many that the next one reads the same as behind all
  std::size_t given_ = 0;           // bytes of their text
};

}  // namespace lln_torch
