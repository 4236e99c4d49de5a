// lln tokenize: text files to token shards, with a SentencePiece model that is trained on them or
// given.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "interruption.h"
#include "lln_torch/cli/verbs.h"
#include "lln_torch/data/tokenize_corpus.h"
#include "progress.h"

namespace lln::cli {
namespace {

using lln_torch::ShardRecord;
using lln_torch::TokenizedPart;
using lln_torch::TokenizeRequest;
using lln_torch::TokenizeResult;

struct TokenizeOptions {
  TokenizeRequest work;
  int threads = 0;
  bool json = false;
};

// The bar counts thousandths: the share of the bytes that were read.
class StageProgress {
 public:
  void show(const std::string& stage, double share) {
    constexpr std::int64_t kParts = 1000;
    if (stage != stage_) {
      stage_ = stage;
      shown_ = 0;
      progress_.stage("lln tokenize: " + stage);
      if (share > 0) progress_.step(kParts);
    } else if (shown_ == 0 && share > 0) {
      progress_.step(kParts);
    }
    for (const auto now = std::llround(share * kParts); shown_ < now; ++shown_) {
      progress_.advance();
    }
  }

 private:
  Progress progress_{"lln tokenize"};
  std::string stage_;
  std::int64_t shown_ = 0;
};

TokenizeResult tokenize_with_progress(const TokenizeOptions& options) {
  ThreadPool threads(options.threads);
  StageProgress progress;
  lln_torch::TokenizeHooks hooks;
  hooks.progress = [&](const std::string& stage, double share) { progress.show(stage, share); };
  hooks.guarded = [](const std::function<void(const std::function<bool()>&)>& write) {
    const NotedSignals signals;
    const std::function<bool()> arrived = [&] { return signals.arrived(); };
    write(arrived);
  };
  return lln_torch::tokenize_corpus(options.work, threads, hooks);
}

Json part_json(const TokenizedPart& part, const std::vector<ShardRecord>& shards) {
  Json files = Json::array();
  for (const ShardRecord& shard : shards) files.push_back(shard.file);
  return {{"documents", part.documents}, {"lines", part.lines},     {"bytes", part.bytes},
          {"tokens", part.tokens},       {"unknown", part.unknown}, {"shards", files}};
}

Json result_json(const TokenizeOptions& options, const TokenizeResult& result) {
  Json value = {{"output", options.work.output},
                {"tokenizer", result.index.tokenizer},
                {"vocabulary", result.index.vocabulary},
                {"fingerprint", fmt::format("{:016x}", result.index.fingerprint)}};
  if (result.trained_lines > 0) {
    value["trained_on"] = {{"lines", result.trained_lines}, {"bytes", result.trained_bytes}};
  }
  value["train"] = part_json(result.train, result.index.train);
  value["validation"] = part_json(result.validation, result.index.validation);
  return value;
}

std::string part_text(const char* name, const TokenizedPart& part,
                      const std::vector<ShardRecord>& shards) {
  return fmt::format(
      "  {:<11} {:>9} documents {:>12} tokens {:>6.2f} bytes a token {:>7.4f}% unknown "
      "  {}{}\n",
      name, part.documents, part.tokens,
      static_cast<double>(part.bytes) / static_cast<double>(part.tokens),
      100 * static_cast<double>(part.unknown) / static_cast<double>(part.tokens),
      shards.front().file, shards.size() > 1 ? fmt::format(" and {} more", shards.size() - 1) : "");
}

std::string result_text(const TokenizeOptions& options, const TokenizeResult& result) {
  std::string text = fmt::format("{}: tokenizer {}, vocabulary {}", options.work.output,
                                 result.index.tokenizer, result.index.vocabulary);
  if (result.trained_lines > 0) {
    text += fmt::format(", trained on {} lines, {}", result.trained_lines,
                        size_text(static_cast<double>(result.trained_bytes)));
  }
  return text + "\n" + part_text("training", result.train, result.index.train) +
         part_text("validation", result.validation, result.index.validation);
}

int run_tokenize(const TokenizeOptions& options) {
  const TokenizeResult result = tokenize_with_progress(options);
  if (options.json) {
    print_json(result_json(options, result));
  } else {
    fmt::print("{}", result_text(options, result));
  }
  return kOk;
}

void add_model_options(CLI::App& command, TokenizeRequest& work) {
  CLI::Option* given =
      command.add_option("--tokenizer", work.tokenizer,
                         "A SentencePiece .model, a WordPiece vocabulary .txt, or bytes");
  command.add_option("--vocab", work.training.vocabulary, "Pieces of the model that is trained")
      ->check(CLI::Range(16, 1 << 20))
      ->capture_default_str()
      ->excludes(given);
  command.add_option("--kind", work.training.kind, "Of the model that is trained")
      ->check(CLI::IsMember({"bpe", "unigram"}))
      ->capture_default_str()
      ->excludes(given);
  command
      .add_option("--coverage", work.training.coverage,
                  "Share of the characters that get pieces; the rest are unknown")
      ->check(CLI::Range(0.9, 1.0))
      ->capture_default_str()
      ->excludes(given);
  command
      .add_flag("--byte-fallback", work.training.byte_fallback,
                "256 pieces for bytes, so that nothing is unknown")
      ->excludes(given);
  command
      .add_option("--train-bytes", work.training_bytes,
                  "Train on at most so much of the text, lines drawn at random")
      ->check(CLI::Range(std::int64_t{1000}, std::int64_t{1} << 36))
      ->capture_default_str()
      ->excludes(given);
}

}  // namespace

Verb add_tokenize(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "tokenize", "Train a tokenizer on text and write token shards for training");
  const auto options = std::make_shared<TokenizeOptions>();
  TokenizeRequest& work = options->work;
  command
      ->add_option("FILE", work.files,
                   "UTF-8 text, also .xz or .gz; blank lines or titles part documents")
      ->required();
  command->add_option("-o,--output", work.output, "Folder for the shards")->required();
  CLI::Option* validation =
      command->add_option("--validation", work.validation, "Text files for validation");
  command
      ->add_option("--hold-out", work.held_out,
                   "Share of the documents kept for validation where no files are given")
      ->check(CLI::Range(0.0001, 0.5))
      ->capture_default_str()
      ->excludes(validation);
  add_model_options(*command, work);
  command->add_option("--shard-tokens", work.shard_tokens, "Tokens after which a shard is full")
      ->check(CLI::Range(std::int64_t{1000}, std::int64_t{1} << 31))
      ->capture_default_str();
  command->add_option("--seed", work.seed, "Of what is held out and trained on")
      ->capture_default_str();
  command->add_flag("--replace", work.replace,
                    "Remove the shards that the folder has, once the new ones are complete");
  add_threads_option(*command, options->threads);
  add_json_option(*command, options->json);
  command->footer(
      help_footer("  lln tokenize my-text.txt -o tokens --vocab 8000\n"
                  "  lln tokenize wiki.*.txt.xz --validation valid.txt.xz -o tokens\n"
                  "  lln tokenize more.txt -o more --tokenizer tokens/tokenizer.model\n"));
  return {command, [options] { return run_tokenize(*options); }};
}

}  // namespace lln::cli
