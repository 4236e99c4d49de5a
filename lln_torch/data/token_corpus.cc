// The index is JSON; fingerprints are text, because 64 bits do not fit into a JSON number.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/token_corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lln/error.h"

namespace lln_torch {
namespace {

using IndexJson = nlohmann::ordered_json;

constexpr int kIndexVersion = 1;

std::string in_folder(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / name).string();
}

IndexJson records_json(const std::vector<ShardRecord>& records) {
  IndexJson list = IndexJson::array();
  for (const ShardRecord& record : records) {
    list.push_back(
        {{"file", record.file}, {"tokens", record.tokens}, {"documents", record.documents}});
  }
  return list;
}

std::vector<ShardRecord> records_of(const IndexJson& list) {
  std::vector<ShardRecord> records;
  for (const IndexJson& entry : list) {
    records.push_back({entry.at("file").get<std::string>(), entry.at("tokens").get<std::int64_t>(),
                       entry.at("documents").get<std::int64_t>()});
  }
  return records;
}

std::unique_ptr<Tokenizer> corpus_tokenizer(const std::string& folder, const CorpusIndex& index) {
  const std::string path =
      index.tokenizer == "bytes" ? index.tokenizer : in_folder(folder, index.tokenizer);
  std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(path);
  if (tokenizer->fingerprint() != index.fingerprint) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: not the tokenizer that made the shards: expected {:016x}, "
                                 "found {:016x}",
                                 path, index.fingerprint, tokenizer->fingerprint()));
  }
  return tokenizer;
}

}  // namespace

std::string corpus_index_text(const CorpusIndex& index) {
  const IndexJson value = {{"version", kIndexVersion},
                           {"tokenizer", index.tokenizer},
                           {"fingerprint", fmt::format("{:016x}", index.fingerprint)},
                           {"vocabulary", index.vocabulary},
                           {"train", records_json(index.train)},
                           {"validation", records_json(index.validation)}};
  return value.dump(2) + "\n";
}

CorpusIndex read_corpus_index(const std::string& folder) {
  const std::string path = in_folder(folder, kCorpusIndex);
  std::ifstream file(path);
  if (!file) {
    throw lln::Error(
        lln::ErrorCode::io,
        fmt::format("{}: cannot be opened: expected a folder that `lln tokenize` wrote", path));
  }
  try {
    const IndexJson value = IndexJson::parse(file);
    if (value.at("version") != kIndexVersion) {
      throw lln::Error(lln::ErrorCode::io, fmt::format("{}: expected version {}, found {}", path,
                                                       kIndexVersion, value.at("version").dump()));
    }
    CorpusIndex index;
    index.tokenizer = value.at("tokenizer").get<std::string>();
    index.fingerprint = std::stoull(value.at("fingerprint").get<std::string>(), nullptr, 16);
    index.vocabulary = value.at("vocabulary").get<std::int64_t>();
    index.train = records_of(value.at("train"));
    index.validation = records_of(value.at("validation"));
    return index;
  } catch (const IndexJson::exception& error) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}", path, error.what()));
  } catch (const std::logic_error&) {
    throw lln::Error(lln::ErrorCode::io, path + ": the fingerprint is no number");
  }
}

TokenSequence::TokenSequence(const std::string& folder, const std::vector<ShardRecord>& records,
                             const CorpusIndex& index) {
  for (const ShardRecord& record : records) {
    auto shard = std::make_unique<TokenShard>(in_folder(folder, record.file));
    if (shard->tokens() != record.tokens || shard->documents() != record.documents ||
        shard->tokenizer() != index.fingerprint || shard->vocabulary() != index.vocabulary) {
      throw lln::Error(
          lln::ErrorCode::io,
          fmt::format("{}: {} expects {} tokens, {} documents, vocabulary {}, tokenizer {:016x}; "
                      "found {}, {}, {}, {:016x}",
                      shard->path(), kCorpusIndex, record.tokens, record.documents,
                      index.vocabulary, index.fingerprint, shard->tokens(), shard->documents(),
                      shard->vocabulary(), shard->tokenizer()));
    }
    starts_.push_back(starts_.back() + shard->tokens());
    shards_.push_back(std::move(shard));
  }
}

std::int64_t TokenSequence::documents() const {
  std::int64_t sum = 0;
  for (const auto& shard : shards_) sum += shard->documents();
  return sum;
}

std::size_t TokenSequence::shard_of(std::int64_t token) const {
  return static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), token) -
                                  starts_.begin() - 1);
}

void TokenSequence::copy(std::int64_t first, std::span<std::int32_t> into) const {
  while (!into.empty()) {
    const std::size_t shard = shard_of(first);
    const auto count = static_cast<std::size_t>(
        std::min<std::int64_t>(starts_[shard + 1] - first, static_cast<std::int64_t>(into.size())));
    shards_[shard]->copy(first - starts_[shard], into.first(count));
    into = into.subspan(count);
    first += static_cast<std::int64_t>(count);
  }
}

std::pair<std::int64_t, std::int64_t> TokenSequence::document_around(std::int64_t token) const {
  const std::size_t at = shard_of(token);
  const TokenShard& shard = *shards_[at];
  const std::int64_t document = shard.document_of(token - starts_[at]);
  return {starts_[at] + shard.document_begin(document), starts_[at] + shard.document_end(document)};
}

std::vector<std::int64_t> TokenSequence::counts(std::int64_t vocabulary) const {
  std::vector<std::int64_t> sums(static_cast<std::size_t>(vocabulary));
  for (const auto& shard : shards_) shard->count(sums);
  return sums;
}

TokenCorpus::TokenCorpus(const std::string& folder)
    : index(read_corpus_index(folder)),
      tokenizer(corpus_tokenizer(folder, index)),
      train(folder, index.train, index),
      validation(folder, index.validation, index) {}

double unigram_loss(const std::vector<std::int64_t>& train,
                    const std::vector<std::int64_t>& validation,
                    const std::vector<std::int32_t>& left_out) {
  std::vector<bool> counted(train.size(), true);
  for (const std::int32_t id : left_out) {
    if (static_cast<std::size_t>(id) < counted.size())
      counted[static_cast<std::size_t>(id)] = false;
  }
  double all = 0;
  double seen = 0;
  for (std::size_t id = 0; id < train.size(); ++id) {
    if (!counted[id]) continue;
    all += static_cast<double>(train[id] + 1);
    seen += static_cast<double>(validation[id]);
  }
  double loss = 0;
  for (std::size_t id = 0; id < train.size(); ++id) {
    if (!counted[id] || validation[id] == 0) continue;
    const double share = static_cast<double>(train[id] + 1) / all;
    loss -= static_cast<double>(validation[id]) / seen * std::log(share);
  }
  return loss;
}

}  // namespace lln_torch
