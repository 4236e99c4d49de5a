// The text of the last ids again with each new one, and what is new in it.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/text_stream.h"

#include <algorithm>
#include <iterator>
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

bool TextStream::shows(std::int32_t id) const {
  return tokenizer_.decode({&id, 1}).find_first_not_of(' ') != std::string::npos;
}

// All but the last ids, of whose text the end is kept back. Spaces at the beginning of a text are
// not written: an id that shows stands before them, if there was one.
void TextStream::forget(std::size_t kept_back) {
  auto begin = last_.end() - kNeighbours;
  const auto before = std::find_if(std::make_reverse_iterator(begin), last_.rend(),
                                   [this](std::int32_t id) { return shows(id); });
  if (before != last_.rend()) *--begin = *before;
  last_.erase(last_.begin(), begin);
  given_ = tokenizer_.decode(last_).size() - kept_back;
}

std::string TextStream::add(std::span<const std::int32_t> ids) {
  // Any number of them may come, and all but the unknown one have no text.
  const SpecialTokens& special = tokenizer_.special();
  std::ranges::copy_if(ids, std::back_inserter(last_), [&](std::int32_t id) {
    return id == special.unknown || !special.contains(id);
  });
  const std::string text = tokenizer_.decode(last_);
  std::string more = take(text, whole_characters(text));
  if (last_.size() > kMostIds) forget(text.size() - given_);
  return more;
}

std::string TextStream::end() {
  const std::string text = tokenizer_.decode(last_);
  return take(text, text.size());
}

}  // namespace lln_torch
