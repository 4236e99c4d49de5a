// Files of token ids that training reads through memory maps. Little endian:
//   header (96 bytes, see token_shard.cc), tokens (2 or 4 bytes each, filled up to 8),
//   the end of every document as u64, a checksum of every 64 KiB of the two as u64.
// All of a file is checked when it is opened, so that what damaged it is known by offset.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lln_torch {

// Tokens of whole documents, gathered in memory and written as one file.
class TokenShardWriter {
 public:
  TokenShardWriter(std::int64_t vocabulary, std::uint64_t tokenizer);
  // A document: ids below the vocabulary. Empty ones are left out.
  void add(std::span<const std::int32_t> ids);
  std::int64_t tokens() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::int64_t documents() const { return static_cast<std::int64_t>(ends_.size()); }
  // Writes the file, complete or not at all, and starts anew. Throws lln::Error (io).
  void write(const std::string& path, const std::function<bool()>& interrupted);

 private:
  std::int64_t vocabulary_;
  std::uint64_t tokenizer_;
  std::vector<std::uint32_t> tokens_;
  std::vector<std::uint64_t> ends_;
};

// Calls are const and re-entrant. The file must not be changed while it is mapped.
class TokenShard {
 public:
  // Throws lln::Error (io) with file and offset where anything is wrong.
  explicit TokenShard(const std::string& path);
  ~TokenShard();
  TokenShard(const TokenShard&) = delete;
  TokenShard& operator=(const TokenShard&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t vocabulary() const { return vocabulary_; }
  std::uint64_t tokenizer() const { return tokenizer_; }  // fingerprint() of what made the ids
  std::int64_t tokens() const { return tokens_; }
  std::int64_t documents() const { return static_cast<std::int64_t>(ends_.size()); }
  // Tokens [begin, end) of document `index`.
  std::int64_t document_begin(std::int64_t index) const;
  std::int64_t document_end(std::int64_t index) const;
  std::int64_t document_of(std::int64_t token) const;
  void copy(std::int64_t first, std::span<std::int32_t> into) const;
  // Adds to counts[id] how often every id occurs; vocabulary() entries.
  void count(std::span<std::int64_t> counts) const;

 private:
  void read_header();
  void check_blocks() const;
  void check_tokens() const;

  std::string path_;
  const unsigned char* bytes_ = nullptr;
  std::uint64_t size_ = 0;
  std::int64_t vocabulary_ = 0;
  std::uint64_t tokenizer_ = 0;
  std::uint32_t width_ = 0;
  std::int64_t tokens_ = 0;
  std::span<const std::uint64_t> ends_;
  std::span<const std::uint64_t> checksums_;
};

}  // namespace lln_torch
