// Lines of plain and compressed text and of archives, borders of documents, and what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data_files.h"
#include "lln_torch/data/documents.h"
#include "lln_torch/data/text_lines.h"

namespace lln_torch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> all_lines(TextLines& lines) {
  std::vector<std::string> result;
  std::string_view line;
  while (lines.next(line)) result.emplace_back(line);
  return result;
}

TEST(TextLines, ReadsPlainCompressedAndMembers) {
  const TemporaryFolder folder;
  const std::string text = "one\r\ntwo\n\nlast without an end";
  TextLines plain(folder.write("a.txt", text));
  EXPECT_THAT(all_lines(plain), ElementsAre("one", "two", "", "last without an end"));
  EXPECT_EQ(plain.number(), 4);
  TextLines packed(write_compressed(folder.path("a.txt.xz"), {{"", text}}));
  EXPECT_THAT(all_lines(packed), ElementsAre("one", "two", "", "last without an end"));
  const std::string archive =
      write_compressed(folder.path("a.tar.xz"), {{"./x/a.tsv", "no\n"}, {"x/b.tsv", "yes\n"}});
  TextLines member(archive, "x/b.tsv");
  EXPECT_THAT(all_lines(member), ElementsAre("yes"));
  EXPECT_THAT(archive_members(archive), ElementsAre("x/a.tsv", "x/b.tsv"));
  EXPECT_THAT(error_of([&] { TextLines(archive, "x/c.tsv"); }), HasSubstr("has no file 'x/c.tsv'"));
  TextLines empty(folder.write("empty.txt", ""));
  EXPECT_THAT(all_lines(empty), ElementsAre());
}

TEST(TextLines, LongLinesSpanBlocks) {
  const TemporaryFolder folder;
  std::string text;
  std::vector<std::size_t> sizes;
  for (std::size_t size : {1000000u, 0u, 262143u, 262144u, 5u}) {
    text += std::string(size, 'a') + "\n";
    sizes.push_back(size);
  }
  TextLines lines(folder.write("long.txt", text));
  std::vector<std::size_t> found;
  for (const std::string& line : all_lines(lines)) found.push_back(line.size());
  EXPECT_EQ(found, sizes);
}

TEST(TextLines, NamesWhereAFileIsDamaged) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 100000; ++i) text += "line " + std::to_string(i * 7919 % 100003) + "\n";
  const std::string path = write_compressed(folder.path("a.txt.xz"), {{"", text}});
  std::string bytes = read_bytes(path);
  folder.write("cut.txt.xz", bytes.substr(0, bytes.size() / 2));
  TextLines cut(folder.path("cut.txt.xz"));
  EXPECT_THAT(error_of([&] { all_lines(cut); }),
              testing::ContainsRegex("cut.txt.xz:[0-9]+: damaged here"));
  bytes[bytes.size() / 2] ^= 1;
  folder.write("flipped.txt.xz", bytes);
  TextLines flipped(folder.path("flipped.txt.xz"));
  EXPECT_THAT(error_of([&] { all_lines(flipped); }),
              testing::ContainsRegex("flipped.txt.xz:[0-9]+: damaged here"));
  EXPECT_THAT(error_of([&] { TextLines(folder.path("none.txt")); }), HasSubstr("no such file"));
  EXPECT_THAT(error_of([&] { TextLines(folder.path()); }), HasSubstr("not a regular file"));
}

TEST(TextLines, KnowsUtf8) {
  for (const char* text : {"", "plain", "caf\xC3\xA9", "\xE4\xB8\xAD", "\xF0\x9F\x98\x80"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  for (const char* text : {"\xFF", "\xC3", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80",
                           "\xF4\x90\x80\x80", "\x80", "a\xE4\xB8"}) {
    EXPECT_FALSE(is_utf8(text)) << text;
  }
}

std::vector<Document> documents_of(const std::string& path) {
  std::vector<Document> result;
  read_documents(path, [&](Document&& document) { result.push_back(std::move(document)); });
  return result;
}

TEST(Documents, TitlesStartArticles) {
  const TemporaryFolder folder;
  const std::vector<Document> found = documents_of(folder.write(
      "wiki.txt", " \n = First = \n \n one \n\n = = Section = = \n two\n= Second =\nthree\n"));
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].title, "First");
  EXPECT_THAT(found[0].lines, ElementsAre("one", "= = Section = =", "two"));
  EXPECT_EQ(found[1].title, "Second");
  EXPECT_THAT(found[1].lines, ElementsAre("three"));
  EXPECT_EQ(article_title("= a = b ="), "a = b");
  EXPECT_EQ(article_title("a = b"), "");
  EXPECT_EQ(article_title("= =="), "");
}

TEST(Documents, BlankLinesEndThemWhereThereAreNoTitles) {
  const TemporaryFolder folder;
  const std::vector<Document> found = documents_of(folder.write("plain.txt", "a\nb\n\n\n  \nc\n"));
  ASSERT_EQ(found.size(), 2u);
  EXPECT_THAT(found[0].lines, ElementsAre("a", "b"));
  EXPECT_THAT(found[1].lines, ElementsAre("c"));
}

TEST(Documents, RefusesWhatIsNoText) {
  const TemporaryFolder folder;
  folder.write("latin.txt", "good\ncaf\xE9\n");
  EXPECT_THAT(error_of([&] { documents_of(folder.path("latin.txt")); }),
              HasSubstr("latin.txt:2: not UTF-8"));
  folder.write("zero.txt", std::string("a\nb\0c\n", 6));
  EXPECT_THAT(error_of([&] { documents_of(folder.path("zero.txt")); }),
              HasSubstr("zero.txt:2: a zero byte"));
}

TEST(Documents, StarsStandForSortedNames) {
  const TemporaryFolder folder;
  for (const char* name : {"w.train.1.txt", "w.train.0.txt", "w.valid.txt"}) folder.write(name, "");
  EXPECT_THAT(matching_files(folder.path(), "w.train.*"),
              ElementsAre(folder.path("w.train.0.txt"), folder.path("w.train.1.txt")));
  EXPECT_THAT(matching_files(folder.path(), "w.valid.txt"),
              ElementsAre(folder.path("w.valid.txt")));
  EXPECT_THAT(error_of([&] { matching_files(folder.path(), "x*"); }), HasSubstr("no such files"));
  EXPECT_THAT(error_of([&] { matching_files(folder.path(), "x"); }), HasSubstr("no such file"));
}

}  // namespace
}  // namespace lln_torch
