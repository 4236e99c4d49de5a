// Text to ids and back, the same for SentencePiece models, WordPiece vocabularies and bytes: what
// tasks and models know of a tokenizer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lln_torch {

// Ids that stand for no text. One that a vocabulary lacks is counted behind its last piece, so that
// every tokenizer serves every task.
struct SpecialTokens {
  std::int32_t pad = 0;
  std::int32_t unknown = 0;
  std::int32_t start = 0;      // [CLS]
  std::int32_t separator = 0;  // [SEP]
  std::int32_t mask = 0;       // [MASK]

  bool contains(std::int32_t id) const {
    return id == pad || id == unknown || id == start || id == separator || id == mask;
  }
};

// Calls are const and re-entrant.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;  // no special tokens
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;    // skips special ones
  virtual std::int64_t vocabulary() const = 0;  // of ids: all are below it
  virtual const SpecialTokens& special() const = 0;
  // Words between spaces are encoded one by one, so that those seen before need no work.
  virtual bool word_by_word() const { return false; }
  // Of the model or vocabulary: shards name the tokenizer that made them by it.
  virtual std::uint64_t fingerprint() const = 0;
};

// "bytes", a SentencePiece model (.model), or a BERT vocabulary (.txt, one piece a line; a
// tokenizer_config.json beside it says whether it is cased). Throws lln::Error (io).
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);

// One id for each byte behind five special ones: 261 in all.
std::unique_ptr<Tokenizer> byte_tokenizer();
constexpr std::int32_t kByteTokens = 256;
constexpr std::int32_t kFirstByteToken = 5;

// One row of a model: [CLS] first [SEP], or [CLS] first [SEP] second [SEP] with segments 0 and 1.
// Where it is longer than `most` tokens (at least 3), the longer text loses its end.
struct EncodedRow {
  std::vector<std::int32_t> ids;
  std::int64_t first_segment = 0;  // tokens of segment 0
};
EncodedRow make_row(const SpecialTokens& special, std::vector<std::int32_t> first,
                    std::vector<std::int32_t> second, bool pair, std::int64_t most);

}  // namespace lln_torch
