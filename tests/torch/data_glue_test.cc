// GLUE's tasks from small samples in the official layouts and in the others that are read, from
// folders and an archive; quotes, labels, segments, and corrupt records with file and line.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/glue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "data_files.h"
#include "small_sources.h"

namespace lln_torch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::unique_ptr<Source> glue_source(const std::string& toml, const std::string& folder) {
  return source_of("tokenizer = 'bytes'\n" + toml, folder);
}

const char* const kSst2 = "sentence\tlabel\nit 's \"charming \t1\nbleak\t0\nso bad\t0\n";

struct LayoutCase {
  const char* task;
  const char* train_file;
  const char* train;
  const char* validation_file;
  const char* validation;
  const char* row;  // the first of the validation
  float label;      // or score
};

// Official headers and columns, one record each for training and validation.
const LayoutCase kLayouts[] = {
    {"sst2", "SST-2/train.tsv", kSst2, "SST-2/dev.tsv", kSst2, "<it 's \"charming >", 1},
    {"cola", "CoLA/train.tsv", "gj04\t1\t\tA b.\n", "CoLA/dev.tsv", "gj04\t0\t*\tThe \"x.\n",
     "<The \"x.>", 0},
    {"rte", "RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n",
     "RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tc\td\tnot_entailment\n", "<c>d>", 1},
    {"mrpc", "MRPC/train.tsv",
     "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n", "MRPC/dev.tsv",
     "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tc \"\td\n", "<c \">d>", 0},
    {"mrpc", "MRPC/msr_paraphrase_train.txt",
     "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n", "MRPC/msr_paraphrase_test.txt",
     "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tc\td\r\n", "<c>d>", 1},
    {"stsb", "STS-B/train.tsv",
     "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
     "0\tg\tf\ty\t1\tn\tn\ta\tb\t5.000\n",
     "STS-B/dev.tsv",
     "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
     "0\tg\tf\ty\t1\tn\tn\tc\td\t2.75\n",
     "<c>d>", 2.75f},
    {"stsb", "STS-B/sts-train.csv", "g\tf\ty\t1\t5.000\ta\tb\n", "STS-B/sts-dev.csv",
     "g\tf\ty\t1\t0.5\tc\td\tlicence\tmore\n", "<c>d>", 0.5f},
    {"mnli", "MNLI/train.tsv",
     "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
     "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
     "0\t1\t2\tg\t(\t(\t(\t(\ta\tb\tneutral\tneutral\n",
     "MNLI/dev_matched.tsv",
     "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
     "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\t"
     "label5\tgold_label\n"
     "0\t1\t2\tg\t(\t(\t(\t(\tc\td\tneutral\tx\tx\tx\tx\tcontradiction\n",
     "<c>d>", 2},
    {"qnli", "QNLI/train.tsv", "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n",
     "QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n0\tc\td\tentailment\n", "<c>d>", 0},
    {"qqp", "QQP/train.tsv",
     "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\ta\tb\t1\n", "QQP/dev.tsv",
     "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tc\t\t1\n", "<c>>", 1},
};

TEST(Glue, ReadsEveryLayout) {
  for (const LayoutCase& layout : kLayouts) {
    for (const bool archive : {false, true}) {
      const TemporaryFolder folder;
      if (archive) {
        write_compressed(folder.path("glue.tar.xz"), {{layout.train_file, layout.train},
                                                      {layout.validation_file, layout.validation}});
      } else {
        folder.write(std::string("glue_data/") + layout.train_file, layout.train);
        folder.write(std::string("glue_data/") + layout.validation_file, layout.validation);
      }
      const auto glue = glue_source(std::string("task = '") + layout.task + "'", folder.path());
      EXPECT_EQ(glue->task().name.substr(0, glue->task().name.find(' ')), layout.task);
      const Batch batch = glue->validation_batch(0, 1);
      EXPECT_EQ(row_text(batch.text, 0), layout.row) << layout.validation_file;
      if (glue->task().kind == TaskKind::score) {
        EXPECT_THAT(batch.scores, ElementsAre(layout.label));
        EXPECT_TRUE(batch.labels.empty());
      } else {
        EXPECT_THAT(batch.labels, ElementsAre(static_cast<std::int32_t>(layout.label)));
      }
    }
  }
}

TEST(Glue, CallsASubsetASubset) {
  const TemporaryFolder folder;
  folder.write("MNLI/train_subset.tsv", "premise\thypothesis\tlabel\na\tb\tneutral\n");
  folder.write("MNLI/dev_matched.tsv", "premise\thypothesis\tlabel\na\tb\tneutral\n");
  EXPECT_EQ(glue_source("task = 'mnli'", folder.path())->task().name, "mnli (subset)");
  folder.write("QNLI/train_reconstructed.tsv",
               "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n");
  folder.write("QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n");
  EXPECT_EQ(glue_source("task = 'qnli'", folder.path())->task().name, "qnli (reconstructed)");
}

TEST(Glue, NeverValidatesMrpcOnItsTraining) {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, const char* text) {
    folder.write(
        std::string("MRPC/") + name,
        std::string("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t") + text + "\tx\n");
  };
  const auto found = [&](const std::string& more = "") {
    const auto mrpc = glue_source("task = 'mrpc'\n" + more, folder.path());
    return mrpc->task().name + " " + row_text(mrpc->train_batch(0, 1, 0, 1).text, 0) + " " +
           row_text(mrpc->validation_batch(0, 1).text, 0);
  };
  write("msr_paraphrase_train.txt", "whole");
  write("dev.tsv", "dev");
  EXPECT_THAT(error_of([&] { found(); }), HasSubstr("expected MRPC/msr_paraphrase_test.txt"));
  write("msr_paraphrase_test.txt", "test");
  EXPECT_EQ(found(), "mrpc (whole files) <whole>x> <test>x>");
  write("train.tsv", "train");
  EXPECT_EQ(found(), "mrpc <train>x> <dev>x>");
  EXPECT_EQ(found("validation_split = 'test'"), "mrpc <train>x> <test>x>");
}

TEST(Glue, HasItsTasksAndMetrics) {
  std::vector<std::string> found;
  for (const GlueTask& task : glue_tasks())
    found.push_back(task.name + std::string(" ") + task.metrics[0]);
  EXPECT_THAT(found, ElementsAre("sst2 accuracy", "cola matthews", "rte accuracy", "mrpc accuracy",
                                 "stsb pearson", "mnli accuracy", "qnli accuracy", "qqp accuracy"));
}

TEST(Glue, ReportsCorruptRecords) {
  const TemporaryFolder folder;
  folder.write("SST-2/dev.tsv", kSst2);
  const auto fault = [&](const std::string& train) {
    folder.write("SST-2/train.tsv", train);
    return error_of([&] { glue_source("task = 'sst2'", folder.path()); });
  };
  EXPECT_THAT(fault("sentence\tlabel\na\t1\nb\n"),
              HasSubstr("SST-2/train.tsv:3: expected 2 columns, found 1"));
  EXPECT_THAT(fault("sentence\tlabel\na\t1\tx\n"), HasSubstr("train.tsv:2: expected 2 columns"));
  EXPECT_THAT(fault("sentence\tlabel\na\t2\n"),
              HasSubstr("train.tsv:2: expected the label 0 or 1, found '2'"));
  EXPECT_THAT(fault("sentence\tlabel\n\xFF\t1\n"), HasSubstr("train.tsv:2: not UTF-8"));
  EXPECT_THAT(fault("sentence\tlabel\n\t1\n"), HasSubstr("train.tsv:2: no text"));
  EXPECT_THAT(
      fault("text\tlabel\na\t1\n"),
      HasSubstr("train.tsv:1: expected a header with the column sentence, found text, label"));
  EXPECT_THAT(fault("sentence\tlabel\n"), HasSubstr("train.tsv: has no examples"));
  fault("sentence\tlabel\nbroken\na\t1\n");
  const auto skipped = glue_source("task = 'sst2'\nskip_corrupt = true", folder.path());
  EXPECT_EQ(skipped->steps_per_epoch(1), 1);
  EXPECT_THAT(skipped->task().notes,
              ElementsAre(HasSubstr("SST-2/train.tsv: 1 corrupt records of 2 left out")));
  folder.write("STS-B/sts-train.csv", "g\tf\ty\t1\t5.5\ta\tb\n");
  folder.write("STS-B/sts-dev.csv", "g\tf\ty\t1\t5\ta\tb\n");
  EXPECT_THAT(error_of([&] { glue_source("task = 'stsb'", folder.path()); }),
              HasSubstr("sts-train.csv:1: expected a score of 0 to 5, found '5.5'"));
}

TEST(Glue, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { glue_source("task = 'sst2'", folder.path()); }),
              HasSubstr("expected SST-2/train.tsv there"));
  folder.write("SST-2/train.tsv", kSst2);
  folder.write("SST-2/dev.tsv", kSst2);
  EXPECT_THAT(
      error_of([&] { glue_source("task = 'sst2'\nvalidation_split = 'test'", folder.path()); }),
      HasSubstr("validation_split: expected validation"));
  EXPECT_THAT(error_of([&] { glue_source("task = 'sst3'", folder.path()); }),
              HasSubstr("did you mean sst2?"));
}

TEST(Glue, PadsMasksAndMarksSegments) {
  const TemporaryFolder folder;
  const char* table =
      "index\tsentence1\tsentence2\tlabel\n0\tabc\tde\tentailment\n"
      "1\tlonger text\tx\tnot_entailment\n2\tq\tr\tentailment\n";
  folder.write("RTE/train.tsv", table);
  folder.write("RTE/dev.tsv", table);
  const auto rte = glue_source("task = 'rte'", folder.path());
  const Batch batch = rte->validation_batch(0, 2);
  ASSERT_EQ(batch.text.tokens, 16);  // 15 tokens, in units of 8
  EXPECT_EQ(row_text(batch.text, 0), "<abc>de>");
  std::string mask, segments;
  for (std::size_t i = 0; i < 16; ++i) {
    mask += static_cast<char>('0' + batch.text.mask[i]);
    segments += static_cast<char>('0' + batch.text.segments[i]);
  }
  EXPECT_EQ(mask, "1111111100000000");
  EXPECT_EQ(segments, "0000011100000000");
  EXPECT_DOUBLE_EQ(rte->task().chance, 2.0 / 3);
  const auto fixed = glue_source("task = 'rte'\ntokens = 40\nfixed_length = true", folder.path());
  EXPECT_EQ(fixed->validation_batch(2, 1).text.tokens, 40);
  const auto narrow = glue_source("task = 'rte'\ntokens = 9", folder.path());
  const Batch cut = narrow->validation_batch(1, 1);
  EXPECT_EQ(row_text(cut.text, 0), "<longe>x>");
  EXPECT_EQ(cut.text.tokens, 9);
  EXPECT_TRUE(cut.text.mask.empty());
}

TEST(Glue, PairsMayBeRowsOfTheirOwn) {
  const TemporaryFolder folder;
  const char* scored = "g\tf\ty\t1\t2.5\tabc\tde\ng\tf\ty\t1\t5\tx\ta longer text\n";
  folder.write("STS-B/sts-train.csv", scored);
  folder.write("STS-B/sts-dev.csv", scored);
  const auto stsb = glue_source("task = 'stsb'\napart = true", folder.path());
  EXPECT_EQ(stsb->task().kind, TaskKind::embedding);
  EXPECT_EQ(stsb->task().score_range, 5);
  const Batch batch = stsb->validation_batch(0, 2);
  EXPECT_EQ(row_text(batch.text, 0) + row_text(batch.second, 0), "<abc><de>");
  EXPECT_EQ(row_text(batch.text, 1) + row_text(batch.second, 1), "<x><a longer text>");
  EXPECT_EQ(batch.text.tokens, 8);
  EXPECT_EQ(batch.second.tokens, 16);
  EXPECT_TRUE(batch.text.segments.empty());
  EXPECT_THAT(batch.scores, ElementsAre(2.5F, 5.0F));
  EXPECT_TRUE(batch.labels.empty());

  const char* labelled = "index\tsentence1\tsentence2\tlabel\n0\tabc\tde\tentailment\n";
  folder.write("RTE/train.tsv", labelled);
  folder.write("RTE/dev.tsv", labelled);
  const auto rte = glue_source("task = 'rte'\napart = true", folder.path());
  EXPECT_EQ(rte->task().kind, TaskKind::matched_pair);
  EXPECT_THAT(rte->train_batch(0, 1, 0, 1).labels, ElementsAre(0));
  folder.write("SST-2/train.tsv", kSst2);
  folder.write("SST-2/dev.tsv", kSst2);
  const Settings single =
      Settings::from_toml("task = 'sst2'\ntokenizer = 'bytes'\napart = true", "test");
  make_source(single, folder.path());
  EXPECT_THAT(error_of([&] { single.finish(); }), HasSubstr("apart"));
}

TEST(Glue, AnEpochShowsEveryExampleOnce) {
  const TemporaryFolder folder;
  std::string table = "sentence\tlabel\n";
  for (int i = 0; i < 50; ++i)
    table += "text " + std::to_string(i) + "\t" + (i % 5 == 0 ? "1" : "0") + "\n";
  folder.write("SST-2/train.tsv", table);
  folder.write("SST-2/dev.tsv", table);
  const auto sst2 = glue_source("task = 'sst2'\nseed = 5", folder.path());
  std::vector<std::string> first, second;
  int positive = 0;
  for (int step = 0; step < 20; ++step) {
    const Batch batch = sst2->train_batch(step, 5, 0, 5);
    for (std::int64_t r = 0; r < 5; ++r) {
      (step < 10 ? first : second).push_back(row_text(batch.text, r));
      if (step < 10) positive += batch.labels[static_cast<std::size_t>(r)];
    }
  }
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 50u);
  EXPECT_EQ(std::set(second.begin(), second.end()).size(), 50u);
  EXPECT_NE(first, second);
  EXPECT_EQ(positive, 10);
  EXPECT_EQ(sst2->steps_per_epoch(5), 10);
  // The batch of a step does not know those before it.
  const auto again = glue_source("task = 'sst2'\nseed = 5", folder.path());
  EXPECT_EQ(row_text(again->train_batch(13, 5, 2, 1).text, 0), second[17]);
}

}  // namespace
}  // namespace lln_torch
