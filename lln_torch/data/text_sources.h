// The sources of text tasks; make_source (batch.h) chooses among them by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "lln_torch/data/batch.h"
#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

std::unique_ptr<Source> make_mlm_source(const Settings& data, const std::string& folder);
std::unique_ptr<Source> make_lm_source(const Settings& data, const std::string& folder);
// Any of GLUE's tasks (glue.h): the key `task` says which.
std::unique_ptr<Source> make_glue_source(const Settings& data, const std::string& folder);
std::unique_ptr<Source> make_imdb_source(const Settings& data, const std::string& folder);
std::unique_ptr<Source> make_wiki_pairs_source(const Settings& data, const std::string& folder);
std::unique_ptr<Source> make_random_tokens_source(const Settings& data, const std::string& folder);

// The key `seed` of [data]: every random choice of a source follows from it.
std::uint64_t data_seed(const Settings& data);
// The tokenizer that the key `tokenizer` names: "bytes", or a file, as it is or in `folder`.
std::unique_ptr<Tokenizer> data_tokenizer(const Settings& data, const std::string& folder);

}  // namespace lln_torch
