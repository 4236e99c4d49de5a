// The text of the last ids again with each new one, and what is new in it.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/text_stream.h"

#include <algorithm>
#include <string_view>

namespace lln_torch {
namespace {

// How a piece is written depends on its neighbours: a space before it, bytes of one character.
constexpr std::size_t kNeighbours = 16;
constexpr std::size_t kMostIds = 64;

// Of UTF-8 text without the bytes at its end that may begin a character.
std::size_t whole_characters(std::string_view text) {
  // SentencePiece writes this for a byte that is no character, as long as it is none.
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  constexpr std::size_t kMostMissing = 3;
  std::size_t length = text.size();
  for (std::size_t i = 0; i < kMostMissing; ++i) {
    if (text.substr(0, length).ends_with(kReplacement)) length -= kReplacement.size();
  }
  if (length < text.size()) return length;
  for (std::size_t back = 1; back <= std::min(kMostMissing, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0U) == 0x80U) continue;  // inside of a character
    const std::size_t bytes = byte >= 0xF0U ? 4 : byte >= 0xE0U ? 3 : byte >= 0xC0U ? 2 : 1;
    return bytes > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace

std::string TextStream::take(const std::string& text, std::size_t length) {
  if (length <= given_) return {};
  std::string more = text.substr(given_, length - given_);
  given_ = length;
  return more;
}

std::string TextStream::add(std::span<const std::int32_t> ids) {
  last_.insert(last_.end(), ids.begin(), ids.end());
  const std::string text = tokenizer_.decode(last_);
  std::string more = take(text, whole_characters(text));
  if (last_.size() > kMostIds && given_ == text.size()) {
    last_.erase(last_.begin(), last_.end() - kNeighbours);
    given_ = tokenizer_.decode(last_).size();
  }
  return more;
}

std::string TextStream::end() {
  const std::string text = tokenizer_.decode(last_);
  return take(text, text.size());
}

}  // namespace lln_torch
