// GLUE's tasks: which files they are in, how a line is read, which metrics are theirs. Reads the
// folders of the official download, one archive of them, and the subsets that are to be had
// without it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lln_torch/data/text_lines.h"

namespace lln_torch {

// A file of examples by its name in the task's folder.
struct GlueFile {
  const char* name;
  // Columns without a header: of the first text, the second (-1: none) and the label, and how many
  // there are at least. Otherwise the header names them.
  struct Columns {
    int first = -1;
    int second = -1;
    int label = -1;
    int least = 0;
  };
  Columns columns = {};
  const char* subset = nullptr;  // what to call a set other than the official one
  // Of a file for training: the only file of the validation that it goes with, where others share
  // examples with it.
  const char* partner = nullptr;
};

constexpr float kLargestGlueScore = 5;  // of STS-B, the one task with scores

struct GlueTask {
  const char* name;                 // "sst2"
  const char* folder;               // "SST-2"
  std::vector<const char*> first;   // names of the column in a header, any of them
  std::vector<const char*> second;  // empty: one text a row
  std::vector<const char*> label;
  std::vector<const char*> labels;  // of the classes in their order; empty: a score of 0 to 5
  std::vector<const char*> metrics;
  std::vector<GlueFile> train;  // the first that is there counts
  std::vector<GlueFile> validation;
  std::vector<GlueFile> test;  // those with labels
};

const std::vector<GlueTask>& glue_tasks();

struct GlueExample {
  std::string first;
  std::string second;
  std::int32_t label = 0;
  float score = 0;
};

// Calls `each` with every record. A corrupt one is an lln::Error (io) with file and line; with
// `skip_corrupt` it is left out, and the number of those returned.
std::int64_t read_glue(const GlueTask& task, const GlueFile& file, TextLines& lines,
                       bool skip_corrupt, const std::function<void(GlueExample&&)>& each);

}  // namespace lln_torch
