// From text files to batches: what `lln tokenize` does, and the tasks mlm and lm on it. The same
// folder whatever the threads; a batch the same whatever was asked before.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "data_files.h"
#include "lln_torch/data/random.h"
#include "lln_torch/data/tokenize_corpus.h"
#include "small_sources.h"

namespace lln_torch {
namespace {

using testing::HasSubstr;

// Articles of words of which some are frequent.
std::string corpus_text(int articles, std::uint64_t seed) {
  std::string text;
  for (int a = 0; a < articles; ++a) {
    Random random(seed, Stream("corpus text"), static_cast<std::uint64_t>(a));
    text += "= Article " + std::to_string(a) + " =\n";
    for (int line = 0; line < 4; ++line) {
      for (int w = 0; w < 30; ++w) {
        const double u = random.uniform();
        text += "w" + std::to_string(static_cast<int>(200 * u * u * u)) + " ";
      }
      text += "\n";
    }
    text += "\n";
  }
  return text;
}

TokenizeResult tokenize(const TemporaryFolder& folder, TokenizeRequest request, int threads = 2) {
  if (request.files.empty()) request.files = {folder.write("text.txt", corpus_text(60, 1))};
  if (request.output.empty()) request.output = folder.path("tokens");
  if (request.tokenizer.empty()) request.training.vocabulary = 120;
  lln::ThreadPool pool(threads);
  return tokenize_corpus(request, pool, {});
}

bool same_batch(const Batch& a, const Batch& b) {
  return a.rows == b.rows && a.text.ids == b.text.ids && a.text.mask == b.text.mask &&
         a.labels == b.labels;
}

TEST(Tokenize, DoesNotDependOnThreads) {
  const TemporaryFolder folder;
  const TokenizeResult one =
      tokenize(folder, {.output = folder.path("one"), .shard_tokens = 3000}, 1);
  const TokenizeResult four =
      tokenize(folder, {.output = folder.path("four"), .shard_tokens = 3000}, 4);
  EXPECT_GT(one.index.train.size(), 1u);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path("one"))) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(read_bytes(folder.path("one/" + name)), read_bytes(folder.path("four/" + name)))
        << name;
  }
  EXPECT_EQ(one.train.documents, 59);
  EXPECT_EQ(one.validation.documents, 1);  // 1% of 60 documents, at least one
  const TokenCorpus corpus(folder.path("one"));
  EXPECT_EQ(corpus.train.tokens(), one.train.tokens);
  EXPECT_EQ(corpus.train.documents(), 59);
  // Documents end with a separator, and nothing else is one.
  std::vector<std::int32_t> ids(static_cast<std::size_t>(corpus.train.tokens()));
  corpus.train.copy(0, ids);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 3), 59);
  const auto [begin, end] = corpus.train.document_around(corpus.train.tokens() - 1);
  EXPECT_EQ(end, corpus.train.tokens());
  EXPECT_EQ(ids[static_cast<std::size_t>(begin - 1)], 3);
  EXPECT_THAT(corpus.tokenizer->decode(std::span(ids).subspan(static_cast<std::size_t>(begin), 20)),
              HasSubstr("Article "));
}

TEST(Tokenize, WordsEncodeAsTheirLinesDo) {
  const TemporaryFolder folder;
  const std::string line =
      "caf\xC3\xA9 w12  w3,w4 \xEF\xAC\x81ne \xC2\xA8 w1\xC2\xA0w2 \xE4\xB8\xAD w199.";
  const std::string text = folder.write("text.txt", corpus_text(60, 1));
  const std::string valid = folder.write("valid.txt", line + "\n");
  for (const char* kind : {"bpe", "unigram"}) {
    TokenizeRequest request{.files = {text}, .validation = {valid}, .output = folder.path(kind)};
    request.training.kind = kind;
    request.training.vocabulary = 100;
    lln::ThreadPool pool(1);
    tokenize_corpus(request, pool, {});
    const TokenCorpus corpus(folder.path(kind));
    EXPECT_TRUE(corpus.tokenizer->word_by_word());
    std::vector<std::int32_t> ids(static_cast<std::size_t>(corpus.validation.tokens()));
    corpus.validation.copy(0, ids);
    ids.pop_back();  // the separator
    EXPECT_EQ(ids, corpus.tokenizer->encode(line)) << kind;
  }
}

TEST(Tokenize, KeepsTrainingAndValidationApart) {
  const TemporaryFolder folder;
  const TokenizeResult result =
      tokenize(folder, {.files = {}, .held_out = 0.2, .tokenizer = "bytes"});
  EXPECT_EQ(result.train.documents, 48);
  EXPECT_EQ(result.validation.documents, 12);
  const TokenCorpus corpus(folder.path("tokens"));
  std::set<std::string> articles;
  for (const TokenSequence* part : {&corpus.train, &corpus.validation}) {
    for (std::int64_t token = 0; token < part->tokens();) {
      const auto [begin, end] = part->document_around(token);
      std::vector<std::int32_t> ids(static_cast<std::size_t>(end - begin));
      part->copy(begin, ids);
      EXPECT_TRUE(articles.insert(corpus.tokenizer->decode(ids)).second);
      token = end;
    }
  }
  EXPECT_EQ(articles.size(), 60u);
}

TEST(Tokenize, TakesFilesForValidationAndATokenizer) {
  const TemporaryFolder folder;
  tokenize(folder, {.output = folder.path("first")});
  const std::string valid = folder.write("valid.txt", corpus_text(3, 2));
  const TokenizeResult again =
      tokenize(folder, {.validation = {valid},
                        .output = folder.path("second"),
                        .tokenizer = folder.path("first/tokenizer.model")});
  EXPECT_EQ(again.train.documents, 60);
  EXPECT_EQ(again.validation.documents, 3);
  EXPECT_EQ(again.trained_lines, 0);
  EXPECT_EQ(read_bytes(folder.path("first/tokenizer.model")),
            read_bytes(folder.path("second/tokenizer.model")));
}

TEST(Tokenize, HoldsOutTheEndOfASingleDocument) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 50; ++i) text += "line " + std::to_string(i) + "\n";
  const TokenizeResult result = tokenize(
      folder, {.files = {folder.write("one.txt", text)}, .held_out = 0.1, .tokenizer = "bytes"});
  EXPECT_EQ(result.train.lines, 45);
  EXPECT_EQ(result.validation.lines, 5);
}

TEST(Tokenize, TrainsOnASampleOfTheLines) {
  const TemporaryFolder folder;
  const TokenizeResult all = tokenize(folder, {.output = folder.path("all")});
  const TokenizeResult some =
      tokenize(folder, {.output = folder.path("some"), .training_bytes = 10000});
  EXPECT_EQ(all.trained_lines, all.train.lines);
  EXPECT_EQ(all.train.lines + all.validation.lines, 300);
  EXPECT_LE(some.trained_bytes, 10000);
  EXPECT_GT(some.trained_bytes, 2500);
}

// Every article has a letter of its own: those that are held out are unknown to the model.
TEST(Tokenize, TheModelDoesNotSeeWhatIsHeldOut) {
  const TemporaryFolder folder;
  std::string text;
  for (int article = 0; article < 40; ++article) {
    const std::string own = {'\xE4', '\xB8', static_cast<char>(0x80 + article)};
    text += corpus_text(1, static_cast<std::uint64_t>(article));
    for (int word = 0; word < 50; ++word) text += own + " ";
    text += "\n\n";
  }
  const TokenizeResult result =
      tokenize(folder, {.files = {folder.write("own.txt", text)}, .held_out = 0.1});
  EXPECT_EQ(result.validation.documents, 4);
  EXPECT_EQ(result.train.unknown, 0);
  EXPECT_EQ(result.validation.unknown, 4 * 50);
}

TEST(Tokenize, KeepsWhatIsThereUntilTheNewIsComplete) {
  const TemporaryFolder folder;
  const auto files = [&] {
    std::map<std::string, std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path("tokens"))) {
      found[entry.path().filename().string()] = read_bytes(entry.path().string());
    }
    return found;
  };
  tokenize(folder, {.tokenizer = "bytes", .shard_tokens = 5000});
  const auto before = files();
  ASSERT_GT(before.size(), 4u);
  const std::string bad = folder.write("bad.txt", corpus_text(30, 2) + "caf\xE9\n");
  const std::string good = folder.write("good.txt", corpus_text(10, 3));
  EXPECT_THAT(error_of([&] {
                tokenize(folder, {.files = {bad},
                                  .validation = {good},
                                  .replace = true,
                                  .tokenizer = "bytes",
                                  .shard_tokens = 1000});
              }),
              HasSubstr("not UTF-8"));
  EXPECT_EQ(files(), before);
  tokenize(folder, {.files = {good}, .replace = true, .tokenizer = "bytes"});
  const auto after = files();
  EXPECT_EQ(after.size(), 3u);
  EXPECT_NE(after.at("train.00000.tokens"), before.at("train.00000.tokens"));
}

TEST(Tokenize, RefusesWhatWouldLoseOrMixData) {
  const TemporaryFolder folder;
  tokenize(folder, {.tokenizer = "bytes"});
  EXPECT_THAT(error_of([&] { tokenize(folder, {.tokenizer = "bytes"}); }),
              HasSubstr("tokens.json: is there already"));
  tokenize(folder, {.replace = true, .tokenizer = "bytes"});
  EXPECT_THAT(error_of([&] { tokenize(folder, {.files = {folder.path("none.txt")}}); }),
              HasSubstr("none.txt: expected a text file"));
  EXPECT_THAT(error_of([&] {
                tokenize(folder, {.files = {folder.write("blank.txt", "\n\n")},
                                  .output = folder.path("blank"),
                                  .tokenizer = "bytes"});
              }),
              HasSubstr("no text"));
  // Half a folder has no index.
  std::filesystem::remove(folder.path("tokens/tokens.json"));
  EXPECT_THAT(error_of([&] { TokenCorpus(folder.path("tokens")); }),
              HasSubstr("expected a folder that `lln tokenize` wrote"));
}

TEST(Tokenize, CorpusNoticesAnotherTokenizerOrShard) {
  const TemporaryFolder folder;
  tokenize(folder, {.output = folder.path("a")});
  tokenize(folder,
           {.files = {folder.write("other.txt", corpus_text(40, 3))}, .output = folder.path("b")});
  const std::string model = read_bytes(folder.path("a/tokenizer.model"));
  folder.write("a/tokenizer.model", read_bytes(folder.path("b/tokenizer.model")));
  EXPECT_THAT(error_of([&] { TokenCorpus(folder.path("a")); }),
              HasSubstr("not the tokenizer that made the shards"));
  folder.write("a/tokenizer.model", model);
  folder.write("a/train.00000.tokens", read_bytes(folder.path("b/train.00000.tokens")));
  EXPECT_THAT(error_of([&] { TokenCorpus(folder.path("a")); }), HasSubstr("tokens.json expects"));
  folder.write("a/tokens.json", "{\"version\": 1}");
  EXPECT_THAT(error_of([&] { TokenCorpus(folder.path("a")); }), HasSubstr("tokens.json: "));
}

TEST(MaskedTokens, AreAFunctionOfSeedStepAndRow) {
  const TemporaryFolder folder;
  tokenize(folder, {});
  const auto a = source_of("task = 'mlm'\ntokens = 32\nseed = 3", folder.path("tokens"));
  const auto b = source_of("task = 'mlm'\ntokens = 32\nseed = 3", folder.path("tokens"));
  const auto other = source_of("task = 'mlm'\ntokens = 32\nseed = 4", folder.path("tokens"));
  for (int step = 0; step < 5; ++step) b->train_batch(step, 8, 0, 8);
  const Batch batch = a->train_batch(7, 8, 0, 8);
  EXPECT_TRUE(same_batch(batch, b->train_batch(7, 8, 0, 8)));
  EXPECT_FALSE(same_batch(batch, other->train_batch(7, 8, 0, 8)));
  EXPECT_FALSE(same_batch(batch, a->train_batch(8, 8, 0, 8)));
  // A rank reads its rows of the batch.
  const Batch part = a->train_batch(7, 8, 5, 2);
  EXPECT_TRUE(
      std::equal(part.text.ids.begin(), part.text.ids.end(), batch.text.ids.begin() + 5 * 32));
  EXPECT_TRUE(std::equal(part.labels.begin(), part.labels.end(), batch.labels.begin() + 5 * 32));
  // The validation does not know the seed.
  EXPECT_TRUE(same_batch(a->validation_batch(0, 4), other->validation_batch(0, 4)));
  EXPECT_GE(a->validation_rows(), 4);
  EXPECT_THAT(error_of([&] { a->validation_batch(a->validation_rows(), 1); }),
              HasSubstr("of a validation set of"));
  EXPECT_THAT(error_of([&] { a->train_batch(0, 8, 4, 5); }), HasSubstr("rows 4 to 9 of the 8"));
}

TEST(MaskedTokens, AreFifteenPercentInThreeWays) {
  const TemporaryFolder folder;
  tokenize(folder, {});
  const auto mlm = source_of("task = 'mlm'\ntokens = 128", folder.path("tokens"));
  const std::int64_t vocabulary = mlm->task().vocabulary;
  double text = 0, predicted = 0, hidden = 0, kept = 0, replaced = 0;
  for (int step = 0; step < 40; ++step) {
    const Batch batch = mlm->train_batch(step, 16, 0, 16);
    EXPECT_TRUE(batch.text.mask.empty());
    for (std::size_t i = 0; i < batch.text.ids.size(); ++i) {
      const std::int32_t id = batch.text.ids[i], label = batch.labels[i];
      ASSERT_TRUE(id >= 0 && id < vocabulary);
      ASSERT_TRUE(i % 128 != 0 || id == 2);
      ASSERT_TRUE(i % 128 != 127 || id == 3);
      if (id != 2 && id != 3) ++text;
      if (label == kIgnoredLabel) {
        ASSERT_NE(id, 4);
        continue;
      }
      ASSERT_GE(label, 5);  // no special token is predicted
      ++predicted;
      if (id == 4) ++hidden;
      if (id == label) ++kept;
      if (id != 4 && id != label) ++replaced;
    }
  }
  EXPECT_NEAR(predicted / text, 0.15, 0.006);
  EXPECT_NEAR(hidden / predicted, 0.8, 0.02);
  EXPECT_NEAR(kept / predicted, 0.1, 0.02);
  EXPECT_NEAR(replaced / predicted, 0.1, 0.02);
}

TEST(MaskedTokens, CropsStayInDocumentsOnRequest) {
  const TemporaryFolder folder;
  tokenize(folder, {.tokenizer = "bytes"});
  const auto mlm =
      source_of("task = 'mlm'\ntokens = 1000\nacross_documents = false\nmask_share = 0.01",
                folder.path("tokens"));
  const Batch batch = mlm->train_batch(0, 16, 0, 16);
  ASSERT_EQ(batch.text.mask.size(), 16000u);
  for (std::int64_t r = 0; r < 16; ++r) {
    int separators = 0, counted = 0;
    for (std::int64_t i = 0; i < 1000; ++i) {
      const auto at = static_cast<std::size_t>(r * 1000 + i);
      separators += batch.text.ids[at] == 3 ? 1 : 0;
      counted += batch.text.mask[at];
      if (batch.text.mask[at] == 0) {
        EXPECT_EQ(batch.text.ids[at], 0);
        EXPECT_EQ(batch.labels[at], kIgnoredLabel);
      }
    }
    EXPECT_EQ(separators, 2);  // the end of the document and that of the row
    EXPECT_LT(counted, 1000);
  }
}

TEST(NextToken, LabelsAreTheTokensThatFollow) {
  const TemporaryFolder folder;
  tokenize(folder, {});
  const auto lm = source_of("task = 'lm'\ntokens = 16\nvalidation_rows = 5", folder.path("tokens"));
  const TokenCorpus corpus(folder.path("tokens"));
  std::vector<std::int32_t> all(16 * 5 + 1);
  corpus.validation.copy(0, all);
  const Batch batch = lm->validation_batch(0, 5);
  EXPECT_EQ(lm->validation_rows(), 5);
  EXPECT_TRUE(std::equal(batch.text.ids.begin(), batch.text.ids.end(), all.begin()));
  EXPECT_TRUE(std::equal(batch.labels.begin(), batch.labels.end(), all.begin() + 1));
  const Batch train = lm->train_batch(3, 4, 0, 4);
  for (std::size_t r = 0; r < 4; ++r) {
    for (std::size_t i = 0; i + 1 < 16; ++i) {
      EXPECT_EQ(train.labels[r * 16 + i], train.text.ids[r * 16 + i + 1]);
    }
  }
}

TEST(NextToken, CropsAreEven) {
  const TemporaryFolder folder;
  tokenize(folder, {.tokenizer = "bytes"});
  const auto lm = source_of("task = 'lm'\ntokens = 8", folder.path("tokens"));
  const TokenCorpus corpus(folder.path("tokens"));
  const std::vector<std::int64_t> counts = corpus.train.counts(261);
  std::vector<double> seen(261);
  double all = 0;
  for (int step = 0; step < 50; ++step) {
    for (const std::int32_t id : lm->train_batch(step, 256, 0, 256).text.ids) {
      ++seen[static_cast<std::size_t>(id)];
      ++all;
    }
  }
  for (std::size_t id = 0; id < 261; ++id) {
    const double share =
        static_cast<double>(counts[id]) / static_cast<double>(corpus.train.tokens());
    EXPECT_NEAR(seen[id] / all, share, 0.006) << id;
  }
}

TEST(Unigram, LossByHand) {
  // Shares (3+1)/8, (1+1)/8, (1+1)/8 of three ids; the last id is left out.
  EXPECT_NEAR(unigram_loss({3, 1, 1, 9}, {2, 1, 1, 7}, {3}),
              -(2 * std::log(0.5) + 2 * std::log(0.25)) / 4, 1e-12);
  const TemporaryFolder folder;
  tokenize(folder, {});
  const auto mlm = source_of("task = 'mlm'\ntokens = 32", folder.path("tokens"));
  EXPECT_GT(mlm->task().chance, 2);
  EXPECT_LT(mlm->task().chance, std::log(120.0));
  EXPECT_EQ(mlm->task().kind, TaskKind::masked_tokens);
}

TEST(TokenSources, RefuseTooLittleText) {
  const TemporaryFolder folder;
  tokenize(folder, {.tokenizer = "bytes"});
  EXPECT_THAT(error_of([&] { source_of("task = 'lm'\ntokens = 1000000", folder.path("tokens")); }),
              HasSubstr("expected at least 1000001 tokens"));
  EXPECT_THAT(error_of([&] { source_of("task = 'mlm'\nmask_shar = 0.2", folder.path("tokens")); }),
              HasSubstr("did you mean mask_share?"));
}

}  // namespace
}  // namespace lln_torch
