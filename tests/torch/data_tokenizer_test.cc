// Tokenizers: WordPiece against ids recorded from transformers, SentencePiece trained twice, bytes,
// and rows with special tokens.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "data_files.h"
#include "lln_torch/data/sentencepiece.h"
#include "lln_torch/data/text_stream.h"
#include "lln_torch/data/wordpiece.h"
#include "wordpiece_sample.h"

namespace lln_torch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Ids = std::vector<std::int32_t>;

std::string sample_vocabulary(const TemporaryFolder& folder) {
  std::string text;
  for (const char* piece : kWordPieces) text += std::string(piece) + "\n";
  return folder.write("vocab.txt", text);
}

TEST(WordPiece, EqualsTransformers) {
  const TemporaryFolder folder;
  const std::string path = sample_vocabulary(folder);
  for (const WordPieceSample& sample : kWordPieceSamples) {
    const auto tokenizer = load_wordpiece(
        path, {.lowercase = sample.lowercase, .strip_accents = sample.strip_accents});
    EXPECT_EQ(tokenizer->encode(sample.text), sample.ids)
        << sample.text << " lowercase " << sample.lowercase << " accents " << sample.strip_accents;
  }
}

TEST(WordPiece, ReadsTheConfigBesideIt) {
  const TemporaryFolder folder;
  const std::string path = sample_vocabulary(folder);
  EXPECT_NE(load_tokenizer(path)->encode("HELLO"), (Ids{1}));
  folder.write("tokenizer_config.json", R"({"do_lower_case": false})");
  EXPECT_EQ(load_tokenizer(path)->encode("HELLO"), (Ids{1}));
  folder.write("tokenizer_config.json", "no json");
  EXPECT_THAT(error_of([&] { load_tokenizer(path); }), HasSubstr("expected a JSON object"));
}

TEST(WordPiece, DecodesAndNamesSpecialTokens) {
  const TemporaryFolder folder;
  const auto tokenizer = load_tokenizer(sample_vocabulary(folder));
  const SpecialTokens& special = tokenizer->special();
  EXPECT_EQ(special.pad, 0);
  EXPECT_EQ(special.mask, 4);
  EXPECT_EQ(tokenizer->vocabulary(), static_cast<std::int64_t>(kWordPieces.size()));
  Ids ids = tokenizer->encode("unaffable world!");
  ids.insert(ids.begin(), special.start);
  EXPECT_EQ(tokenizer->decode(ids), "unaffable world !");
}

TEST(WordPiece, RefusesBrokenVocabularies) {
  const TemporaryFolder folder;
  const auto fault = [&](const std::string& text) {
    const std::string path = folder.write("v.txt", text);
    return error_of([&] { load_tokenizer(path); });
  };
  EXPECT_THAT(fault("[UNK]\na\na\n"), HasSubstr("v.txt:3: the piece 'a' is there already"));
  EXPECT_THAT(fault("[UNK]\n\na\n"), HasSubstr("v.txt:2: "));
  EXPECT_THAT(fault("a\nb\n"), HasSubstr("found 2 pieces without [UNK]"));
  EXPECT_THAT(fault("[UNK]\n\xFF\n"), HasSubstr("v.txt:2: a piece that is not UTF-8"));
  EXPECT_THAT(error_of([&] { load_tokenizer("x.bin"); }), HasSubstr("expected \"bytes\""));
  // What a vocabulary lacks comes behind it.
  const auto small = load_tokenizer(folder.write("small.txt", "[UNK]\na\n"));
  EXPECT_EQ(small->vocabulary(), 6);
  EXPECT_EQ(small->special().mask, 5);
}

LineSource sample_lines(int count) {
  return [count, i = 0](std::string& line) mutable {
    if (i == count) return false;
    constexpr const char* kWords[] = {"attention", "linear", "normal", "kernel", "token", "state"};
    line.clear();
    for (int w = 0; w < 8; ++w) line += std::string(kWords[(i * 7 + w * w) % 6]) + " ";
    line += std::to_string(i++);
    return true;
  };
}

TEST(SentencePiece, TrainsTheSameModelAgain) {
  const TemporaryFolder folder;
  for (const char* kind : {"bpe", "unigram"}) {
    const SentencePieceOptions options{.vocabulary = 55, .kind = kind};
    const std::string model = train_sentencepiece(sample_lines(300), options);
    EXPECT_EQ(model, train_sentencepiece(sample_lines(300), options)) << kind;
    const auto tokenizer = load_tokenizer(folder.write(std::string(kind) + ".model", model));
    EXPECT_EQ(tokenizer->vocabulary(), 55);
    const SpecialTokens& special = tokenizer->special();
    EXPECT_THAT((Ids{special.pad, special.unknown, special.start, special.separator, special.mask}),
                ElementsAre(0, 1, 2, 3, 4));
    const Ids ids = tokenizer->encode("linear attention state 12");
    EXPECT_LT(ids.size(), 22u);  // pieces, not letters
    EXPECT_TRUE(std::none_of(ids.begin(), ids.end(),
                             [&](std::int32_t id) { return special.contains(id); }));
    EXPECT_EQ(tokenizer->decode(ids), "linear attention state 12");
  }
}

TEST(SentencePiece, FallsBackToBytes) {
  const TemporaryFolder folder;
  const std::string model =
      train_sentencepiece(sample_lines(300), {.vocabulary = 320, .byte_fallback = true});
  const auto tokenizer = load_tokenizer(folder.write("b.model", model));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("state \xE4\xB8\xAD")), "state \xE4\xB8\xAD");
}

TEST(SentencePiece, RefusesWhatItCannotDo) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { train_sentencepiece(sample_lines(20), {.vocabulary = 5000}); }),
              HasSubstr("Vocabulary size too high"));
  folder.write("bad.model", "this is no model");
  EXPECT_THAT(error_of([&] { load_tokenizer(folder.path("bad.model")); }),
              HasSubstr("bad.model: no SentencePiece model"));
  EXPECT_THAT(error_of([&] { load_tokenizer(folder.path("none.model")); }),
              HasSubstr("cannot be opened"));
}

TEST(Bytes, AreTokens) {
  const auto bytes = load_tokenizer("bytes");
  EXPECT_EQ(bytes->vocabulary(), 261);
  const Ids ids = bytes->encode("A\xFF");
  EXPECT_THAT(ids, ElementsAre(5 + 65, 5 + 255));
  EXPECT_EQ(bytes->decode(ids), "A\xFF");
}

// Id by id.
std::vector<std::string> streamed(const Tokenizer& tokenizer, const Ids& ids) {
  TextStream stream(tokenizer);
  std::vector<std::string> parts;
  for (const std::int32_t id : ids) parts.push_back(stream.add({&id, 1}));
  parts.push_back(stream.end());
  return parts;
}

std::string joined(const std::vector<std::string>& parts) {
  return std::accumulate(parts.begin(), parts.end(), std::string());
}

TEST(TextStream, IsTheTextOfAllIds) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 40; ++i) text += "Zwölf Boxkämpfer jagen Viktor, 日本語 и ещё 𝄞. ";
  const std::string model =
      train_sentencepiece(sample_lines(300), {.vocabulary = 320, .byte_fallback = true});
  const auto pieces = load_tokenizer(folder.write("b.model", model));
  const auto bytes = byte_tokenizer();
  const auto words = load_tokenizer(sample_vocabulary(folder));
  std::mt19937 random(1);
  for (const Tokenizer* tokenizer : {pieces.get(), bytes.get(), words.get()}) {
    const Ids ids = tokenizer->encode(text);
    const std::vector<std::string> parts = streamed(*tokenizer, ids);
    EXPECT_EQ(joined(parts), tokenizer->decode(ids));
    for (const std::string& part : parts) {  // none begins inside of a character
      EXPECT_TRUE(part.empty() || (part[0] & 0xC0) != 0x80) << part;
    }
    EXPECT_GT(std::count_if(parts.begin(), parts.end(), [](auto& part) { return !part.empty(); }),
              static_cast<std::int64_t>(ids.size() / 4));
    Ids any(2000);
    for (std::int32_t& id : any) {
      id = static_cast<std::int32_t>(random() % static_cast<unsigned>(tokenizer->vocabulary()));
    }
    EXPECT_EQ(joined(streamed(*tokenizer, any)), tokenizer->decode(any));
    // A word, many ids that show nothing, and a word: the space before it is there.
    const Ids word = tokenizer->encode("state");
    for (std::int32_t id = 0; id < tokenizer->vocabulary(); ++id) {
      if (tokenizer->decode({&id, 1}).find_first_not_of(' ') != std::string::npos) continue;
      Ids gap(word);
      gap.insert(gap.end(), 200, id);
      gap.insert(gap.end(), word.begin(), word.end());
      EXPECT_EQ(joined(streamed(*tokenizer, gap)), tokenizer->decode(gap)) << id;
    }
    // Characters that never end: kept back, and no more than three of them.
    const Ids lead(300, tokenizer->encode("\xF0\x9D\x84\x9E").at(0));
    EXPECT_EQ(joined(streamed(*tokenizer, lead)), tokenizer->decode(lead));
  }
}

TEST(Rows, HaveSpecialTokensAndSegments) {
  const SpecialTokens special{.pad = 0, .unknown = 1, .start = 2, .separator = 3, .mask = 4};
  const EncodedRow one = make_row(special, {10, 11, 12}, {}, false, 4);
  EXPECT_THAT(one.ids, ElementsAre(2, 10, 11, 3));
  EXPECT_EQ(one.first_segment, 4);
  const EncodedRow two = make_row(special, {10, 11, 12, 13, 14, 15}, {20, 21}, true, 8);
  EXPECT_THAT(two.ids, ElementsAre(2, 10, 11, 12, 3, 20, 21, 3));  // the longer text is cut
  EXPECT_EQ(two.first_segment, 5);
  // Of two equally long texts the second loses first, as in BERT's own code.
  const EncodedRow even = make_row(special, {10, 11, 12}, {20, 21, 22}, true, 8);
  EXPECT_THAT(even.ids, ElementsAre(2, 10, 11, 12, 3, 20, 21, 3));
  const EncodedRow both = make_row(special, {10, 11, 12, 13, 14}, {20, 21, 22, 23}, true, 7);
  EXPECT_THAT(both.ids, ElementsAre(2, 10, 11, 3, 20, 21, 3));
}

}  // namespace
}  // namespace lln_torch
