// lln generate: text that a trained decoder continues, token after token. With LLN attentions the
// memory does not grow with the text.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "lln/error.h"
#include "lln_torch/cli/run_arguments.h"
#include "lln_torch/data/text_stream.h"
#include "lln_torch/models/generation.h"
#include "progress.h"

namespace lln::cli {
namespace {

struct GenerateRequest {
  RunArguments run;
  std::string prompt;
  std::int64_t tokens = 100;
  lln_torch::SamplingOptions sampling;
  std::uint64_t seed = 0;
};

// How far the text had come: tokens that were added, and what the layers kept of all before them.
struct Mark {
  std::int64_t tokens = 0;
  double seconds = 0;  // since the first of them
  std::int64_t memory_bytes = 0;
};

struct GeneratedText {
  std::vector<std::int32_t> prompt, ids;
  double prompt_seconds = 0, seconds = 0;
  std::vector<Mark> marks;  // at powers of two, and at the end
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Who waits sees the text as it is written, or with --json how far it is.
class Shown {
 public:
  Shown(const lln_torch::Tokenizer& tokenizer, const GenerateRequest& request) : text_(tokenizer) {
    if (!request.run.json) return;
    progress_.emplace("lln generate");
    progress_->step(request.tokens);
  }

  void prompt(std::span<const std::int32_t> ids) {
    if (!progress_) print(text_.add(ids));
  }
  void token(std::int32_t id) {
    if (progress_) {
      progress_->advance();
    } else {
      print(text_.add({&id, 1}));
    }
  }
  void end() {
    if (!progress_) print(text_.end() + "\n");
    progress_.reset();  // its line goes before the result comes
  }

 private:
  static void print(const std::string& text) {
    if (text.empty()) return;
    fmt::print("{}", text);
    std::fflush(stdout);
  }

  lln_torch::TextStream text_;
  std::optional<Progress> progress_;
};

GeneratedText generate_text(lln_torch::Generation& generation, const GenerateRequest& request,
                            std::vector<std::int32_t> prompt, const torch::Device& device,
                            Shown& shown) {
  GeneratedText text;
  text.prompt = std::move(prompt);
  std::mt19937_64 random(request.seed);
  const auto as_row = [&](const std::vector<std::int32_t>& ids) {
    return at::tensor(std::vector<std::int64_t>(ids.begin(), ids.end())).unsqueeze(0).to(device);
  };
  shown.prompt(text.prompt);
  auto start = std::chrono::steady_clock::now();
  at::Tensor scores = generation.append(as_row(text.prompt));
  // Taking a token waits for the device, so that the clock tells the truth.
  const auto take = [&] {
    text.ids.push_back(
        static_cast<std::int32_t>(lln_torch::sample_token(scores[0], request.sampling, random)));
    shown.token(text.ids.back());
  };
  if (request.tokens > 0) take();
  text.prompt_seconds = seconds_since(start);
  start = std::chrono::steady_clock::now();
  while (static_cast<std::int64_t>(text.ids.size()) < request.tokens) {
    scores = generation.append(as_row({text.ids.back()}));
    take();
    const auto tokens = static_cast<std::int64_t>(text.ids.size());
    if (std::has_single_bit(text.ids.size()) || tokens == request.tokens) {
      text.marks.push_back({tokens, seconds_since(start), generation.bytes()});
    }
  }
  text.seconds = seconds_since(start);
  return text;
}

// Before the work, not after most of it. The last token is not read any more.
void check_length(const lln_torch::Generation& generation, std::int64_t prompt,
                  std::int64_t tokens) {
  const std::int64_t most = generation.most_tokens();
  const std::int64_t read = prompt + std::max<std::int64_t>(tokens - 1, 0);
  if (most == 0 || read <= most) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--tokens {}: after a prompt of {} tokens expected at most {}, because "
                          "the model takes rows of {} (model.max_tokens; positions = \"rotary\" "
                          "with lln or softmax has no such limit)",
                          tokens, prompt, std::max<std::int64_t>(most - prompt + 1, 0), most));
}

int run_generate(const GenerateRequest& request) {
  const LoadedRun loaded = load_run(request.run);
  const lln_torch::Tokenizer* tokenizer = loaded.made.source->tokenizer();
  lln_torch::Generation generation(*loaded.made.model, 1);
  if (tokenizer == nullptr) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: the task {} has no text to continue", request.run.run,
                            loaded.made.source->task().name));
  }
  std::vector<std::int32_t> prompt = tokenizer->encode(request.prompt);
  // Nothing: the beginning of a document.
  if (prompt.empty()) prompt = {tokenizer->special().separator};
  check_length(generation, static_cast<std::int64_t>(prompt.size()), request.tokens);
  Shown shown(*tokenizer, request);
  const GeneratedText text =
      generate_text(generation, request, std::move(prompt), loaded.device, shown);
  shown.end();
  const double after_first = static_cast<double>(text.ids.size()) - 1;
  const double rate = text.seconds > 0 && after_first > 0 ? after_first / text.seconds : 0;
  if (request.run.json) {
    std::vector<std::int32_t> all = text.prompt;
    all.insert(all.end(), text.ids.begin(), text.ids.end());
    nlohmann::ordered_json marks = nlohmann::ordered_json::array();
    for (const Mark& mark : text.marks) {
      marks.push_back({{"tokens", mark.tokens},
                       {"seconds", mark.seconds},
                       {"memory_bytes", mark.memory_bytes}});
    }
    print_json({{"run", request.run.run},
                {"step", loaded.step},
                {"attention", loaded.made.attention},
                {"text", tokenizer->decode(all)},
                {"continuation", tokenizer->decode(text.ids)},
                {"prompt_ids", text.prompt},
                {"ids", text.ids},
                {"prompt_seconds", text.prompt_seconds},
                {"tokens_per_second", rate},
                {"memory", generation.memory_kind()},
                {"memory_bytes", generation.bytes()},
                {"marks", marks}});
    return kOk;
  }
  fmt::print(stderr, "{} tokens, {:.0f} tokens/s, {} of memory ({})\n", text.ids.size(), rate,
             size_text(static_cast<double>(generation.bytes())), generation.memory_kind());
  return kOk;
}

}  // namespace

Verb add_generate(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "generate", "Continue a text by a trained decoder, in constant memory");
  auto request = std::make_shared<GenerateRequest>();
  add_run_arguments(*command, request->run);
  command->add_option("-p,--prompt", request->prompt, "Text to continue; empty: a new document");
  command->add_option("-n,--tokens", request->tokens, "Tokens to add")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  command
      ->add_option("--temperature", request->sampling.temperature,
                   "Scores are divided by it; 0: always the most likely token")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", request->sampling.top_k, "Only the k most likely tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--seed", request->seed, "Of the choice of tokens")->capture_default_str();
  command->footer(help_footer(
      "  lln generate runs/lm --prompt \"The river\" --tokens 200\n"
      "  lln generate runs/lm -p \"The river\" --temperature 0.8 --top-k 40 --seed 3\n"));
  return {command, [request] { return run_generate(*request); }};
}

}  // namespace lln::cli
