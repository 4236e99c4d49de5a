// The list of tasks: adding one is a file and an entry here.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/data/image_sources.h"
#include "lln_torch/data/listops.h"
#include "lln_torch/data/mqar.h"
#include "lln_torch/data/pathfinder.h"
#include "lln_torch/data/text_sources.h"

namespace lln_torch {
namespace {

struct SourceEntry {
  const char* name;
  std::unique_ptr<Source> (*make)(const Settings& data, const std::string& folder);
};

const std::vector<SourceEntry>& entries() {
  static const std::vector<SourceEntry> list = {
      {"cifar10-grey", make_cifar_source},
      {"images", make_images_source},
      {"listops", make_listops_source},
      {"mqar", make_mqar_source},
      {"pathfinder32", make_pathfinder_source},
      {"mlm", make_mlm_source},
      {"lm", make_lm_source},
      {"sst2", make_glue_source},
      {"cola", make_glue_source},
      {"rte", make_glue_source},
      {"mrpc", make_glue_source},
      {"stsb", make_glue_source},
      {"mnli", make_glue_source},
      {"qnli", make_glue_source},
      {"qqp", make_glue_source},
      {"imdb", make_imdb_source},
      {"wiki-pairs", make_wiki_pairs_source},
      {"random-tokens", make_random_tokens_source},
  };
  return list;
}

}  // namespace

std::unique_ptr<Source> make_source(const Settings& data, const std::string& folder) {
  std::vector<std::string> names;
  for (const SourceEntry& entry : entries()) names.emplace_back(entry.name);
  const std::string name = data.choice("task", "", names);
  for (const SourceEntry& entry : entries()) {
    if (entry.name == name) return entry.make(data, folder);
  }
  data.refuse("task", "a task");
}

}  // namespace lln_torch
