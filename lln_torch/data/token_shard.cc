// The header, by offset: 0 magic "LLNTOKEN", 8 u32 version, 12 u32 bytes of a token, 16 u64
// vocabulary, 24 u64 fingerprint of the tokenizer, 32 u64 tokens, 40 u64 documents, 48 u64 bytes of
// the file, 56 zeros, 88 u64 checksum of the 88 bytes before. Lengths are compared with the size of
// the file before anything is read by them.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/token_shard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "io/output_file.h"
#include "lln/error.h"

namespace lln_torch {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are little endian");

constexpr std::uint64_t kShardHeader = 96;
constexpr std::uint64_t kShardBlock = std::uint64_t{1} << 16;
constexpr std::uint32_t kShardVersion = 1;
constexpr std::uint64_t kMostVocabulary = std::uint64_t{1} << 31;
constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 48;
constexpr const char* kShardMagic = "LLNTOKEN";

// Every step is one to one in the word and in the state: no change of one word goes unseen.
std::uint64_t shard_checksum(const unsigned char* bytes, std::uint64_t size) {
  std::uint64_t hash = 0xCBF29CE484222325u ^ size;
  for (std::uint64_t i = 0; i < size; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<std::uint64_t>(8, size - i));
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

std::uint64_t round_up(std::uint64_t x, std::uint64_t unit) { return (x + unit - 1) / unit * unit; }

// Where the parts of a shard lie.
struct ShardLayout {
  std::uint64_t ends = 0;
  std::uint64_t checksums = 0;
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;

  ShardLayout(std::uint64_t tokens, std::uint32_t width, std::uint64_t documents) {
    ends = kShardHeader + round_up(tokens * width, 8);
    checksums = ends + documents * 8;
    blocks = round_up(checksums - kShardHeader, kShardBlock) / kShardBlock;
    bytes = checksums + blocks * 8;
  }
};

template <class Value>
Value header_value(const unsigned char* bytes, std::size_t offset) {
  Value value;
  std::memcpy(&value, bytes + offset, sizeof value);
  return value;
}

}  // namespace

TokenShardWriter::TokenShardWriter(std::int64_t vocabulary, std::uint64_t tokenizer)
    : vocabulary_(vocabulary), tokenizer_(tokenizer) {}

void TokenShardWriter::add(std::span<const std::int32_t> ids) {
  if (ids.empty()) return;
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= vocabulary_) {
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       fmt::format("expected ids below {}, found {}", vocabulary_, id));
    }
    tokens_.push_back(static_cast<std::uint32_t>(id));
  }
  ends_.push_back(tokens_.size());
}

void TokenShardWriter::write(const std::string& path, const std::function<bool()>& interrupted) {
  const std::uint32_t width = vocabulary_ <= 65536 ? 2 : 4;
  const ShardLayout layout(tokens_.size(), width, ends_.size());
  std::vector<unsigned char> bytes(layout.bytes);
  std::memcpy(bytes.data(), kShardMagic, 8);
  const auto put = [&](std::uint64_t offset, auto value) {
    std::memcpy(bytes.data() + offset, &value, sizeof value);
  };
  put(8, kShardVersion);
  put(12, width);
  put(16, static_cast<std::uint64_t>(vocabulary_));
  put(24, tokenizer_);
  put(32, std::uint64_t{tokens_.size()});
  put(40, std::uint64_t{ends_.size()});
  put(48, layout.bytes);
  put(88, shard_checksum(bytes.data(), 88));
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    if (width == 2) {
      put(kShardHeader + 2 * i, static_cast<std::uint16_t>(tokens_[i]));
    } else {
      put(kShardHeader + 4 * i, tokens_[i]);
    }
  }
  if (!ends_.empty()) std::memcpy(bytes.data() + layout.ends, ends_.data(), ends_.size() * 8);
  for (std::uint64_t b = 0; b < layout.blocks; ++b) {
    const std::uint64_t begin = kShardHeader + b * kShardBlock;
    const std::uint64_t size = std::min(kShardBlock, layout.checksums - begin);
    put(layout.checksums + 8 * b, shard_checksum(bytes.data() + begin, size));
  }
  lln::io::OutputFile file(path, interrupted);
  file.write(std::as_bytes(std::span(bytes)));
  file.rename_to_target();
  tokens_.clear();
  ends_.clear();
}

TokenShard::TokenShard(const std::string& path) : path_(path) {
  const auto fail = [&](const std::string& text) {
    throw lln::Error(lln::ErrorCode::io, path + ": " + text);
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail(fmt::format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  void* mapped = MAP_FAILED;
  const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  if (regular && status.st_size >= static_cast<off_t>(kShardHeader)) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    mapped = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  }
  const int code = errno;
  ::close(file);
  if (!regular) fail("is not a regular file");
  if (size_ == 0) {
    fail(fmt::format("expected a token shard, found {} bytes, less than its header of {}",
                     status.st_size, kShardHeader));
  }
  if (mapped == MAP_FAILED) fail(fmt::format("cannot be mapped: {}", std::strerror(code)));
  bytes_ = static_cast<const unsigned char*>(mapped);
  try {
    read_header();
    check_blocks();
    check_tokens();
  } catch (...) {
    ::munmap(mapped, size_);
    throw;
  }
}

TokenShard::~TokenShard() { ::munmap(const_cast<unsigned char*>(bytes_), size_); }

void TokenShard::read_header() {
  const auto fail = [&](int offset, const std::string& text) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: offset {}: {}", path_, offset, text));
  };
  if (std::memcmp(bytes_, kShardMagic, 8) != 0) fail(0, "expected a token shard");
  const auto version = header_value<std::uint32_t>(bytes_, 8);
  if (version != kShardVersion) {
    fail(8, fmt::format("expected version {}, found {}", kShardVersion, version));
  }
  if (header_value<std::uint64_t>(bytes_, 88) != shard_checksum(bytes_, 88)) {
    fail(88, "the header is damaged: its checksum differs");
  }
  width_ = header_value<std::uint32_t>(bytes_, 12);
  const auto vocabulary = header_value<std::uint64_t>(bytes_, 16);
  const auto tokens = header_value<std::uint64_t>(bytes_, 32);
  const auto documents = header_value<std::uint64_t>(bytes_, 40);
  if (width_ != 2 && width_ != 4) fail(12, fmt::format("tokens of {} bytes", width_));
  if (vocabulary < 1 || vocabulary > kMostVocabulary || (width_ == 2 && vocabulary > 65536)) {
    fail(16, fmt::format("a vocabulary of {} in tokens of {} bytes", vocabulary, width_));
  }
  if (tokens > kMostTokens || documents > tokens) {
    fail(32, fmt::format("{} tokens in {} documents", tokens, documents));
  }
  const ShardLayout layout(tokens, width_, documents);
  if (layout.bytes != size_) {
    fail(48, fmt::format("{} tokens in {} documents need {} bytes, found {}", tokens, documents,
                         layout.bytes, size_));
  }
  vocabulary_ = static_cast<std::int64_t>(vocabulary);
  tokenizer_ = header_value<std::uint64_t>(bytes_, 24);
  tokens_ = static_cast<std::int64_t>(tokens);
  // A map starts at a page and all parts at multiples of 8.
  ends_ = {reinterpret_cast<const std::uint64_t*>(bytes_ + layout.ends), documents};
  checksums_ = {reinterpret_cast<const std::uint64_t*>(bytes_ + layout.checksums), layout.blocks};
}

void TokenShard::check_blocks() const {
  const std::uint64_t all = size_ - kShardHeader - checksums_.size() * 8;
  for (std::uint64_t b = 0; b < checksums_.size(); ++b) {
    const std::uint64_t begin = b * kShardBlock;
    const std::uint64_t size = std::min(kShardBlock, all - begin);
    if (shard_checksum(bytes_ + kShardHeader + begin, size) != checksums_[b]) {
      throw lln::Error(
          lln::ErrorCode::io,
          fmt::format("{}: offset {}: damaged between here and offset {}: the checksum "
                      "differs",
                      path_, kShardHeader + begin, kShardHeader + begin + size));
    }
  }
}

// A file with right checksums may still have been made by something else.
void TokenShard::check_tokens() const {
  const auto fail = [&](std::uint64_t offset, const std::string& text) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: offset {}: {}", path_, offset, text));
  };
  std::array<std::int32_t, 4096> ids{};
  for (std::int64_t first = 0; first < tokens_; first += static_cast<std::int64_t>(ids.size())) {
    const std::int64_t count = std::min<std::int64_t>(ids.size(), tokens_ - first);
    copy(first, std::span(ids).first(static_cast<std::size_t>(count)));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t id = ids[static_cast<std::size_t>(i)];
      if (id < 0 || id >= vocabulary_) {
        fail(kShardHeader + static_cast<std::uint64_t>(first + i) * width_,
             fmt::format("expected a token below {}, found {}", vocabulary_, id));
      }
    }
  }
  std::uint64_t before = 0;
  for (std::size_t d = 0; d < ends_.size(); ++d) {
    if (ends_[d] <= before || ends_[d] > static_cast<std::uint64_t>(tokens_)) {
      fail(static_cast<std::uint64_t>(reinterpret_cast<const unsigned char*>(&ends_[d]) - bytes_),
           fmt::format("document {} ends at token {}, the one before it at {}", d, ends_[d],
                       before));
    }
    before = ends_[d];
  }
  if (before != static_cast<std::uint64_t>(tokens_)) {
    fail(32, fmt::format("the documents have {} of {} tokens", before, tokens_));
  }
}

std::int64_t TokenShard::document_begin(std::int64_t index) const {
  return index == 0 ? 0 : document_end(index - 1);
}

std::int64_t TokenShard::document_end(std::int64_t index) const {
  return static_cast<std::int64_t>(ends_[static_cast<std::size_t>(index)]);
}

std::int64_t TokenShard::document_of(std::int64_t token) const {
  return std::upper_bound(ends_.begin(), ends_.end(), static_cast<std::uint64_t>(token)) -
         ends_.begin();
}

void TokenShard::copy(std::int64_t first, std::span<std::int32_t> into) const {
  const unsigned char* from = bytes_ + kShardHeader + static_cast<std::uint64_t>(first) * width_;
  for (std::size_t i = 0; i < into.size(); ++i) {
    into[i] = width_ == 2 ? header_value<std::uint16_t>(from, 2 * i)
                          : static_cast<std::int32_t>(header_value<std::uint32_t>(from, 4 * i));
  }
}

void TokenShard::count(std::span<std::int64_t> counts) const {
  std::array<std::int32_t, 4096> ids{};
  for (std::int64_t first = 0; first < tokens_; first += static_cast<std::int64_t>(ids.size())) {
    const auto size = static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(ids.size()), tokens_ - first));
    copy(first, std::span(ids).first(size));
    for (std::size_t i = 0; i < size; ++i) ++counts[static_cast<std::size_t>(ids[i])];
  }
}

}  // namespace lln_torch
