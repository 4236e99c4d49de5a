// A folder that `lln tokenize` wrote: tokenizer, shards of training and validation, and
// tokens.json, which lists them and is written last, so that half a folder is never read as a whole
// one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lln_torch/data/token_shard.h"
#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

constexpr const char* kCorpusIndex = "tokens.json";

// What the index says of a shard.
struct ShardRecord {
  std::string file;
  std::int64_t tokens = 0;
  std::int64_t documents = 0;
};

struct CorpusIndex {
  std::string tokenizer;  // "bytes", or a file in the folder
  std::uint64_t fingerprint = 0;
  std::int64_t vocabulary = 0;
  std::vector<ShardRecord> train;
  std::vector<ShardRecord> validation;
};

std::string corpus_index_text(const CorpusIndex& index);
// Throws lln::Error (io) where the folder has none, or it does not make sense.
CorpusIndex read_corpus_index(const std::string& folder);

// Shards one after the other, as one sequence of tokens.
class TokenSequence {
 public:
  TokenSequence(const std::string& folder, const std::vector<ShardRecord>& records,
                const CorpusIndex& index);
  std::int64_t tokens() const { return starts_.back(); }
  std::int64_t documents() const;
  void copy(std::int64_t first, std::span<std::int32_t> into) const;
  // Where the document of this token begins and ends.
  std::pair<std::int64_t, std::int64_t> document_around(std::int64_t token) const;
  std::vector<std::int64_t> counts(std::int64_t vocabulary) const;  // of every id

 private:
  std::size_t shard_of(std::int64_t token) const;

  std::vector<std::unique_ptr<TokenShard>> shards_;
  std::vector<std::int64_t> starts_ = {0};  // and the end
};

struct TokenCorpus {
  explicit TokenCorpus(const std::string& folder);

  CorpusIndex index;
  std::shared_ptr<const Tokenizer> tokenizer;
  TokenSequence train;
  TokenSequence validation;
};

// The mean loss, in nats, of predicting every token of `validation` by how often its id occurs in
// `train` (once more than counted, so that no id is impossible). Ids that `left_out` has do not
// count.
double unigram_loss(const std::vector<std::int64_t>& train,
                    const std::vector<std::int64_t>& validation,
                    const std::vector<std::int32_t>& left_out);

}  // namespace lln_torch
