// What `lln preview` shows: text of ids, labels by name, pictures as characters and as files.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/preview.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "lln_torch/config/settings.h"

namespace lln_torch {
namespace {

TEST(Preview, TextsLabelsAndPlaces) {
  Task task;
  task.kind = TaskKind::classes;
  task.vocabulary = 100;
  task.class_names = {"no", "yes"};
  Batch batch;
  batch.rows = 2;
  batch.text = {.tokens = 3, .ids = {4, 5, 6, 7, 0, 0}, .mask = {1, 1, 1, 1, 0, 0}};
  batch.labels = {1, 0};
  EXPECT_EQ(preview_row(task, batch, 0).text, "4 5 6");
  EXPECT_EQ(preview_row(task, batch, 0).label, "yes (1)");
  EXPECT_EQ(preview_row(task, batch, 1).text, "7");
  EXPECT_EQ(preview_row(task, batch, 1).tokens, 1);
  task.kind = TaskKind::next_token;
  batch.labels = {kIgnoredLabel, 9, kIgnoredLabel, 1, 2, kIgnoredLabel};
  EXPECT_EQ(preview_row(task, batch, 0).label, "1: 9");
  EXPECT_EQ(preview_row(task, batch, 1).label, "0: 1, 1: 2");
  task.kind = TaskKind::score;
  batch.scores = {2.5, 1};
  EXPECT_EQ(preview_row(task, batch, 0).label, "2.5");
}

TEST(Preview, SpecialTokensByName) {
  const auto bytes = byte_tokenizer();
  std::vector<std::int32_t> ids = {bytes->special().start};
  for (const std::int32_t id : bytes->encode("ab")) ids.push_back(id);
  ids.push_back(bytes->special().mask);
  for (const std::int32_t id : bytes->encode("c")) ids.push_back(id);
  ids.push_back(bytes->special().separator);
  ids.push_back(bytes->special().pad);
  EXPECT_EQ(readable_ids(*bytes, ids), "[CLS] ab [MASK] c [SEP]");
}

TEST(Preview, PicturesAsCharactersAndFiles) {
  const PreviewPicture picture{1, 2, 2, {0, 255, 128, 0}};
  EXPECT_EQ(picture_as_text(picture), "  @@\n++\n");
  EXPECT_EQ(picture_as_pnm(picture), std::string("P5\n2 2\n255\n\0\xFF\x80\0", 15));
  const PreviewPicture colour{3, 1, 1, {1, 2, 3}};
  EXPECT_EQ(picture_as_pnm(colour), "P6\n1 1\n255\n\x01\x02\x03");
  const PreviewPicture large{1, 100, 200, std::vector<std::uint8_t>(20000, 255)};
  EXPECT_EQ(picture_as_text(large, 40).find('\n'), 40u);
}

TEST(Preview, GeneratedTasksAreReadable) {
  const auto listops = make_source(
      Settings::from_toml("task = 'listops'\nlonger_than = 5\nshorter_than = 20\n", "test"), "");
  const PreviewRow expression = preview_row(listops->task(), listops->validation_batch(0, 1), 0);
  EXPECT_EQ(expression.text[0], '[');
  EXPECT_EQ(expression.text.back(), ']');
  for (const char* form : {"ids", "pixels"}) {
    const auto pathfinder = make_source(
        Settings::from_toml(std::string("task = 'pathfinder32'\nform = '") + form + "'", "test"),
        "");
    const PreviewRow row = preview_row(pathfinder->task(), pathfinder->validation_batch(0, 1), 0);
    EXPECT_EQ(row.picture.height, 32);
    EXPECT_TRUE(row.label == "apart (0)" || row.label == "connected (1)") << row.label;
    EXPECT_EQ(*std::max_element(row.picture.bytes.begin(), row.picture.bytes.end()), 255);
  }
}

}  // namespace
}  // namespace lln_torch
