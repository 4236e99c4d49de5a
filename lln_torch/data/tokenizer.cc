// Bytes as tokens, rows of a model, and the choice of a tokenizer by the name of its file.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/tokenizer.h"

#include <fmt/format.h>

#include "lln/error.h"
#include "lln_torch/data/wordpiece.h"

namespace lln_torch {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    ids.reserve(text.size());
    for (const char c : text) ids.push_back(kFirstByteToken + static_cast<unsigned char>(c));
    return ids;
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id >= kFirstByteToken && id < kFirstByteToken + kByteTokens) {
        text += static_cast<char>(id - kFirstByteToken);
      }
    }
    return text;
  }

  std::int64_t vocabulary() const override { return kFirstByteToken + kByteTokens; }
  const SpecialTokens& special() const override { return special_; }
  std::uint64_t fingerprint() const override { return 0x6279746573u; }  // "bytes"

 private:
  SpecialTokens special_{.pad = 0, .unknown = 1, .start = 2, .separator = 3, .mask = 4};
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  if (path == "bytes") return byte_tokenizer();
  if (path.ends_with(".model")) return load_sentencepiece(path);
  if (path.ends_with(".txt")) return load_wordpiece(path);
  throw lln::Error(
      lln::ErrorCode::invalid_argument,
      fmt::format("tokenizer {}: expected \"bytes\", a SentencePiece model (.model) or "
                  "a WordPiece vocabulary (.txt)",
                  path));
}

EncodedRow make_row(const SpecialTokens& special, std::vector<std::int32_t> first,
                    std::vector<std::int32_t> second, bool pair, std::int64_t most) {
  const std::int64_t room = std::max<std::int64_t>(most - (pair ? 3 : 2), 0);
  const auto size = [](const std::vector<std::int32_t>& ids) {
    return static_cast<std::int64_t>(ids.size());
  };
  while (size(first) + size(second) > room) {
    // Each step ends where both are of one length, or where all fits.
    std::vector<std::int32_t>& longer = first.size() > second.size() ? first : second;
    const std::vector<std::int32_t>& other = first.size() > second.size() ? second : first;
    const std::int64_t excess = size(first) + size(second) - room;
    const std::int64_t cut =
        std::min(excess, std::max<std::int64_t>(1, size(longer) - size(other)));
    longer.resize(longer.size() - static_cast<std::size_t>(cut));
  }
  EncodedRow row;
  row.ids.reserve(first.size() + second.size() + 3);
  row.ids.push_back(special.start);
  row.ids.insert(row.ids.end(), first.begin(), first.end());
  row.ids.push_back(special.separator);
  row.first_segment = size(row.ids);
  if (pair) {
    row.ids.insert(row.ids.end(), second.begin(), second.end());
    row.ids.push_back(special.separator);
  }
  return row;
}

}  // namespace lln_torch
