// Text files to a folder of token shards: the work of `lln tokenize`. A function of the files and
// the request alone, however many threads encode.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lln/exec.h"
#include "lln_torch/data/sentencepiece.h"
#include "lln_torch/data/token_corpus.h"

namespace lln_torch {

struct TokenizeRequest {
  std::vector<std::string> files;       // text, also compressed; articles as in documents.h
  std::vector<std::string> validation;  // none: a share of the documents is held out
  double held_out = 0.01;               // of the documents; of the lines where there is only one
  std::string output;                   // a folder
  bool replace = false;                 // what is in it already
  std::string tokenizer;                // "bytes" or a file; empty: a model is trained
  SentencePieceOptions training;
  std::int64_t training_bytes = 50'000'000;  // of the text that the model is trained on, at most
  std::int64_t shard_tokens = std::int64_t{1} << 25;
  std::uint64_t seed = 0;  // of what is held out and trained on
};

struct TokenizedPart {
  std::int64_t documents = 0;
  std::int64_t lines = 0;
  std::int64_t bytes = 0;  // of text
  std::int64_t tokens = 0;
  std::int64_t unknown = 0;  // tokens
};

struct TokenizeResult {
  CorpusIndex index;
  std::int64_t trained_lines = 0;  // 0 where the tokenizer was given
  std::int64_t trained_bytes = 0;
  TokenizedPart train;
  TokenizedPart validation;
};

// How the work speaks to who waits for it, and how files are written. All may be empty.
struct TokenizeHooks {
  // A stage, and how much of it is done.
  std::function<void(const std::string& stage, double share)> progress;
  // Calls `write` with what says that writing should stop; for programs that catch signals.
  std::function<void(const std::function<void(const std::function<bool()>& interrupted)>& write)>
      guarded;
};

// Throws lln::Error; the folder is then as it was before, or, where the very last step failed (new
// files take the place of old ones), without an index and not read by anything.
TokenizeResult tokenize_corpus(const TokenizeRequest& request, lln::Parallel& parallel,
                               const TokenizeHooks& hooks);

}  // namespace lln_torch
