// Token shards: what goes in comes out, the bytes never change, and every kind of damage is an
// error that names the file and the offset.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/token_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "data_files.h"

namespace lln_torch {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

const std::function<bool()> kNever = [] { return false; };

// Documents of 1, 2, ... tokens.
std::string write_shard(const TemporaryFolder& folder, std::int64_t vocabulary, int documents) {
  TokenShardWriter writer(vocabulary, 42);
  std::int32_t next = 0;
  for (int d = 1; d <= documents; ++d) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(d));
    for (std::int32_t& id : ids) {
      id = static_cast<std::int32_t>(next * std::int64_t{7919} % vocabulary);
      ++next;
    }
    writer.add(ids);
  }
  writer.add({});
  EXPECT_EQ(writer.documents(), documents);
  const std::string path = folder.path("a.tokens");
  writer.write(path, kNever);
  EXPECT_EQ(writer.tokens(), 0);
  return path;
}

TEST(TokenShard, GivesBackWhatWasWritten) {
  const TemporaryFolder folder;
  for (const std::int64_t vocabulary : {300, 65536, 100000}) {
    const TokenShard shard(write_shard(folder, vocabulary, 500));
    EXPECT_EQ(shard.vocabulary(), vocabulary);
    EXPECT_EQ(shard.tokenizer(), 42u);
    ASSERT_EQ(shard.tokens(), 500 * 501 / 2);
    ASSERT_EQ(shard.documents(), 500);
    std::vector<std::int32_t> ids(1000);
    shard.copy(100000, ids);
    for (std::int64_t i = 0; i < 1000; ++i) {
      ASSERT_EQ(ids[static_cast<std::size_t>(i)], (100000 + i) * 7919 % vocabulary);
    }
    EXPECT_EQ(shard.document_begin(3), 6);
    EXPECT_EQ(shard.document_end(3), 10);
    EXPECT_EQ(shard.document_of(0), 0);
    EXPECT_EQ(shard.document_of(9), 3);
    EXPECT_EQ(shard.document_of(10), 4);
    EXPECT_EQ(shard.document_of(shard.tokens() - 1), 499);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(vocabulary));
    shard.count(counts);
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), shard.tokens());
  }
}

TEST(TokenShard, BytesNeverChange) {
  const TemporaryFolder folder;
  TokenShardWriter writer(1000, 0x0102030405060708u);
  writer.add(std::vector<std::int32_t>{7, 999, 0});
  writer.add(std::vector<std::int32_t>{1});
  writer.write(folder.path("a.tokens"), kNever);
  const std::string bytes = read_bytes(folder.path("a.tokens"));
  ASSERT_EQ(bytes.size(), 96u + 8 + 16 + 8);
  EXPECT_EQ(bytes.substr(0, 16), std::string("LLNTOKEN\1\0\0\0\2\0\0\0", 16));
  EXPECT_EQ(bytes.substr(24, 8), "\x08\x07\x06\x05\x04\x03\x02\x01");
  EXPECT_EQ(bytes.substr(96, 8), std::string("\7\0\xE7\3\0\0\1\0", 8));
  EXPECT_EQ(bytes.substr(104, 16), std::string("\3\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0", 16));
  std::uint64_t block = 0;
  std::memcpy(&block, bytes.data() + 120, 8);
  EXPECT_EQ(block, 10556382874918619825u);
}

TEST(TokenShard, SeesEveryChangedByte) {
  const TemporaryFolder folder;
  const std::string path = write_shard(folder, 300, 20);
  const std::string good = read_bytes(path);
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << i % 8));
    folder.write("bad.tokens", bad);
    EXPECT_THAT(error_of([&] { TokenShard(folder.path("bad.tokens")); }),
                ContainsRegex("bad.tokens: offset [0-9]+: "))
        << "byte " << i;
  }
  for (std::size_t size = 0; size < good.size(); size += 5) {
    folder.write("short.tokens", good.substr(0, size));
    EXPECT_THAT(error_of([&] { TokenShard(folder.path("short.tokens")); }),
                ContainsRegex("expected|need 688 bytes, found"))
        << size << " bytes";
  }
  folder.write("long.tokens", good + "x");
  EXPECT_THAT(error_of([&] { TokenShard(folder.path("long.tokens")); }), HasSubstr("found"));
}

TEST(TokenShard, NamesTheDamagedBlock) {
  const TemporaryFolder folder;
  const std::string path = write_shard(folder, 300, 500);
  std::string bytes = read_bytes(path);
  bytes[96 + 65536 + 10] ^= 1;
  folder.write("bad.tokens", bytes);
  EXPECT_THAT(error_of([&] { TokenShard(folder.path("bad.tokens")); }),
              HasSubstr("offset 65632: damaged between here and offset 131168"));
}

TEST(TokenShard, RefusesIdsAboveTheVocabulary) {
  TokenShardWriter writer(10, 0);
  EXPECT_THAT(error_of([&] {
                writer.add(std::vector<std::int32_t>{3, 10});
              }),
              HasSubstr("expected ids below 10, found 10"));
  EXPECT_THAT(error_of([&] { writer.add(std::vector<std::int32_t>{-1}); }), HasSubstr("found -1"));
  EXPECT_THAT(error_of([&] { TokenShard("."); }), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of([&] { TokenShard("none.tokens"); }), HasSubstr("cannot be opened"));
}

}  // namespace
}  // namespace lln_torch
