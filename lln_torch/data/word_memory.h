// Encodes texts, and remembers words: text repeats itself, and looking a word up is many times
// faster than cutting it into pieces.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

// Encodes lines, and remembers words: text repeats itself, and looking a word up is many times
// faster than cutting it into pieces. One for every thread.
class WordMemory {
 public:
  void encode(const Tokenizer& tokenizer, std::string_view line, std::vector<std::int32_t>& ids) {
    if (!tokenizer.word_by_word()) {
      append(tokenizer.encode(line), ids);
      return;
    }
    while (!line.empty()) {
      const std::string_view word = line.substr(0, line.find(' '));
      line.remove_prefix(std::min(word.size() + 1, line.size()));
      if (word.empty()) continue;
      if (words_.size() > kMostWords) words_.clear();
      auto [place, added] = words_.try_emplace(std::string(word));
      if (added) place->second = tokenizer.encode(word);
      append(place->second, ids);
    }
  }

 private:
  static constexpr std::size_t kMostWords = 500'000;  // some tens of megabytes

  static void append(const std::vector<std::int32_t>& more, std::vector<std::int32_t>& ids) {
    ids.insert(ids.end(), more.begin(), more.end());
  }

  std::unordered_map<std::string, std::vector<std::int32_t>> words_;
};

}  // namespace lln_torch
