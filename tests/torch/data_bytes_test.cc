// The tasks on bytes: IMDb from a table, a folder and an archive, and pairs of passages from
// articles.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "data_files.h"
#include "small_sources.h"

namespace lln_torch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const char* const kReviews =
    "label\trating\tid\ttext\n0\t1\t0\tAwful <br />\"really\"\n1\t9\t1\tCaf\xC3\xA9 fun\n";

TEST(Imdb, ReadsTheTable) {
  const TemporaryFolder folder;
  folder.write("imdb.train.tsv", kReviews);
  write_compressed(folder.path("imdb.test.tsv.xz"), {{"", kReviews}});
  const auto imdb = source_of("task = 'imdb'\ntokens = 20", folder.path());
  const Batch batch = imdb->validation_batch(0, 2);
  EXPECT_EQ(row_text(batch.text, 0), "Awful <br />\"really\"");
  EXPECT_EQ(row_text(batch.text, 1), "Caf\xC3\xA9 fun");
  EXPECT_THAT(batch.labels, ElementsAre(0, 1));
  EXPECT_EQ(imdb->task().vocabulary, 261);
  EXPECT_DOUBLE_EQ(imdb->task().chance, 0.5);
  const auto cut = source_of("task = 'imdb'\ntokens = 16\nstart_token = true", folder.path());
  EXPECT_EQ(row_text(cut->validation_batch(0, 1).text, 0), "<Awful <br />\"re");
  EXPECT_EQ(cut->validation_batch(0, 1).text.ids[0], 2);
}

TEST(Imdb, ReadsTheOfficialFolderAndArchive) {
  const std::vector<std::pair<std::string, std::string>> files = {
      {"aclImdb/train/pos/0_9.txt", "good"},
      {"aclImdb/train/neg/0_2.txt", "bad"},
      {"aclImdb/train/unsup/0_0.txt", "not a review of the task"},
      {"aclImdb/test/pos/1_8.txt", "fine"},
      {"aclImdb/test/neg/1_1.txt", "dull"}};
  const TemporaryFolder folder, packed;
  for (const auto& [name, content] : files) folder.write(name, content);
  write_compressed(packed.path("aclImdb.tar.xz"), files);
  for (const TemporaryFolder* from : {&folder, &packed}) {
    const auto imdb = source_of("task = 'imdb'", from->path());
    EXPECT_EQ(imdb->steps_per_epoch(1), 2);
    std::map<std::string, std::int32_t> found;
    const Batch batch = imdb->validation_batch(0, 2);
    for (std::int64_t r = 0; r < 2; ++r) {
      found[row_text(batch.text, r)] = batch.labels[static_cast<std::size_t>(r)];
    }
    EXPECT_EQ(found, (std::map<std::string, std::int32_t>{{"dull", 0}, {"fine", 1}}));
  }
}

TEST(Imdb, ReportsCorruptRecords) {
  const TemporaryFolder folder;
  folder.write("imdb.test.tsv", kReviews);
  const auto fault = [&](const std::string& train) {
    folder.write("imdb.train.tsv", train);
    return error_of([&] { source_of("task = 'imdb'", folder.path()); });
  };
  EXPECT_THAT(fault("label\ttext\n"), HasSubstr("imdb.train.tsv:1: expected the header"));
  EXPECT_THAT(fault("label\trating\tid\ttext\n0\t1\t0\n"),
              HasSubstr("imdb.train.tsv:2: expected 4 columns, found 3"));
  EXPECT_THAT(fault("label\trating\tid\ttext\n7\t1\t0\tx\n"),
              HasSubstr("imdb.train.tsv:2: expected the label 0 or 1, found '7'"));
  const TemporaryFolder empty;
  EXPECT_THAT(error_of([&] { source_of("task = 'imdb'", empty.path()); }),
              HasSubstr("expected imdb.train.tsv.xz"));
}

// Articles of 4 passages of 16 bytes that name article and passage: "a007 p2 ........".
std::string article_text(int articles) {
  std::string text;
  for (int a = 0; a < articles; ++a) {
    char name[24];
    text += "= Title =\n";
    for (int p = 0; p < 4; ++p) {
      std::snprintf(name, sizeof name, "a%03d p%d .......", a, p);
      text += std::string(name) + "\n";
    }
    text += "tail\n\n";
  }
  return text + "= Short =\ntoo short for two\n";
}

std::unique_ptr<Source> pairs(const TemporaryFolder& folder, const std::string& more = "") {
  folder.write("wiki.txt", article_text(100));
  return source_of("task = 'wiki-pairs'\nfiles = 'wiki.txt'\ntokens = 16\nheld_out = 0.2\n" + more,
                   folder.path());
}

TEST(WikiPairs, MatchWhereTheArticleIsOne) {
  const TemporaryFolder folder;
  const auto wiki = pairs(folder);
  EXPECT_EQ(wiki->task().kind, TaskKind::matched_pair);
  std::map<std::string, int> anchors;
  double matching = 0, all = 0;
  const auto epoch = static_cast<std::int64_t>(wiki->steps_per_epoch(4));
  for (std::int64_t step = 0; step < 4 * epoch; ++step) {
    const Batch batch = wiki->train_batch(step, 4, 0, 4);
    EXPECT_EQ(batch.text.tokens, 16);
    for (std::int64_t r = 0; r < 4; ++r) {
      const std::string first = row_text(batch.text, r), second = row_text(batch.second, r);
      const std::int32_t label = batch.labels[static_cast<std::size_t>(r)];
      EXPECT_EQ(first.substr(0, 4) == second.substr(0, 4), label == 1) << first << "|" << second;
      EXPECT_NE(first, second);
      if (step < epoch) ++anchors[first];
      matching += label;
      ++all;
    }
  }
  for (const auto& [text, count] : anchors) EXPECT_EQ(count, 1) << text;
  EXPECT_EQ(static_cast<std::int64_t>(anchors.size()), epoch * 4);
  EXPECT_NEAR(matching / all, 0.5, 0.06);
}

TEST(WikiPairs, ValidationIsBalancedFixedAndOfOtherArticles) {
  const TemporaryFolder folder;
  const auto wiki = pairs(folder), other = pairs(folder, "seed = 9");
  const std::int64_t rows = wiki->validation_rows();
  ASSERT_GE(rows, 2 * 4 * 10);  // of 20 articles, more or less
  const Batch batch = wiki->validation_batch(0, rows);
  EXPECT_EQ(std::count(batch.labels.begin(), batch.labels.end(), 1), rows / 2);
  const Batch same = other->validation_batch(0, rows);
  EXPECT_EQ(batch.text.ids, same.text.ids);
  EXPECT_EQ(batch.second.ids, same.second.ids);
  std::map<std::string, bool> held_out;
  for (std::int64_t r = 0; r < rows; ++r) held_out[row_text(batch.text, r).substr(0, 4)] = true;
  EXPECT_EQ(static_cast<std::int64_t>(held_out.size()) * 8, rows);
  for (std::int64_t step = 0; step < 50; ++step) {
    const Batch train = wiki->train_batch(step, 4, 0, 4);
    for (std::int64_t r = 0; r < 4; ++r) {
      EXPECT_FALSE(held_out.contains(row_text(train.text, r).substr(0, 4)));
      EXPECT_FALSE(held_out.contains(row_text(train.second, r).substr(0, 4)));
    }
  }
  const Batch late = wiki->train_batch(123456789, 4, 1, 2);
  const Batch whole = wiki->train_batch(123456789, 4, 0, 4);
  EXPECT_EQ(row_text(late.second, 0), row_text(whole.second, 1));
  EXPECT_NE(wiki->train_batch(0, 4, 0, 4).text.ids, other->train_batch(0, 4, 0, 4).text.ids);
}

TEST(WikiPairs, NeedLongArticles) {
  const TemporaryFolder folder;
  folder.write("wiki.txt", article_text(100));
  EXPECT_THAT(error_of([&] {
                source_of("task = 'wiki-pairs'\nfiles = ['wiki.txt']\ntokens = 4000",
                          folder.path());
              }),
              HasSubstr("expected at least 2 articles of 8000 bytes for training, found 0"));
  EXPECT_THAT(error_of([&] { source_of("task = 'wiki-pairs'", folder.path()); }),
              HasSubstr("enwiki2015.train.*: no such files"));
}

}  // namespace
}  // namespace lln_torch
