// lln embed: sentence embeddings by a pretrained BERT-type encoder, with its own attention or with
// another in its place.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lln/error.h"
#include "lln_torch/cli/verbs.h"
#include "lln_torch/models/bert.h"
#include "lln_torch/models/weights.h"
#include "lln_torch/train/run_model.h"

namespace lln::cli {
namespace {

struct EmbedRequest {
  std::string folder;
  std::string attention;
  std::vector<std::string> options;  // of the attention, KEY=VALUE
  std::string input = "-";
  std::string output;
  std::string device = "cpu";
  std::int64_t batch = 32;
  std::int64_t max_tokens = 0;
  int threads = 0;
  bool json = false;
};

// Lines of a file, or of stdin; empty ones are texts too, so that rows keep their numbers.
std::vector<std::string> read_sentences(const std::string& path) {
  std::ifstream file;
  if (path != "-") {
    file.open(path);
    if (!file) throw Error(ErrorCode::io, path + ": cannot be read");
  }
  std::istream& lines = path == "-" ? std::cin : file;
  std::vector<std::string> sentences;
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    sentences.push_back(std::move(line));
  }
  if (sentences.empty()) {
    throw Error(ErrorCode::io, fmt::format("{}: expected a sentence a line, found none",
                                           path == "-" ? "stdin" : path));
  }
  return sentences;
}

// The beginning of a sentence, at most `columns` code points of it.
std::string sentence_start(const std::string& text, std::size_t columns) {
  std::size_t points = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool starts = (static_cast<unsigned char>(text[i]) & 0xC0U) != 0x80U;
    if (starts && ++points > columns) return text.substr(0, i) + "...";
  }
  return text;
}

constexpr std::int64_t kLargestMatrix = 10;

// All cosines of a few sentences; of many, for each the one that is most like it.
std::string similarity_text(const std::vector<std::string>& sentences, const at::Tensor& vectors) {
  std::string text;
  const std::int64_t count = vectors.size(0);
  const at::Tensor unit = lln_torch::unit_rows(vectors);
  if (count <= kLargestMatrix) {
    const at::Tensor all = at::mm(unit, unit.t());
    for (std::int64_t row = 0; row < count; ++row) {
      for (std::int64_t column = 0; column < count; ++column) {
        text += fmt::format("{:6.3f}", all[row][column].item<float>());
      }
      text += fmt::format("   {}\n", sentence_start(sentences[static_cast<std::size_t>(row)], 60));
    }
    return text;
  }
  for (std::int64_t row = 0; row < count; ++row) {
    at::Tensor to_others = at::mv(unit, unit[row]);
    to_others[row] = -2;
    const auto nearest = to_others.argmax().item<std::int64_t>();
    text += fmt::format("{:6.3f}   {}\n         {}\n", to_others[nearest].item<float>(),
                        sentence_start(sentences[static_cast<std::size_t>(row)], 80),
                        sentence_start(sentences[static_cast<std::size_t>(nearest)], 80));
  }
  return text;
}

Json vectors_json(const at::Tensor& vectors) {
  Json rows = Json::array();
  for (std::int64_t row = 0; row < vectors.size(0); ++row) {
    const at::Tensor values = vectors[row].contiguous();
    const float* first = values.const_data_ptr<float>();
    rows.push_back(std::vector<float>(first, first + values.numel()));
  }
  return rows;
}

int run_embed(const EmbedRequest& request) {
  if (!request.output.empty()) {
    check_output("--output", request.output, {request.input == "-" ? "" : request.input});
  }
  if (request.threads > 0) at::set_num_threads(request.threads);
  lln_torch::Settings attention;
  for (const std::string& option : request.options) attention.set(option);
  if (!request.attention.empty()) attention.set("name=\"" + request.attention + "\"");
  lln_torch::SentenceEncoder encoder(request.folder, attention,
                                     lln_torch::find_device(request.device));
  if (request.max_tokens > 0) encoder.set_max_tokens(request.max_tokens);
  const std::vector<std::string> sentences = read_sentences(request.input);
  const auto start = std::chrono::steady_clock::now();
  const at::Tensor vectors = encoder.embed(sentences, request.batch);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  if (!request.output.empty()) {
    lln_torch::write_tensors({{"embeddings", vectors}}, request.output,
                             {{"model", request.folder}, {"attention", encoder.attention_name()}});
  }
  if (request.json) {
    Json result = {{"model", request.folder},
                   {"attention", encoder.attention_name()},
                   {"sentences", sentences.size()},
                   {"dim", vectors.size(1)},
                   {"max_tokens", encoder.max_tokens()},
                   {"seconds", taken.count()}};
    if (request.output.empty()) {
      result["embeddings"] = vectors_json(vectors);
    } else {
      result["output"] = request.output;
    }
    print_json(result);
  } else if (request.output.empty()) {
    fmt::print("{}", similarity_text(sentences, vectors));
  } else {
    fmt::print("{}: {} embeddings of {} numbers, {} attention, {}\n", request.output,
               sentences.size(), vectors.size(1), encoder.attention_name(),
               time_text(taken.count()));
  }
  return kOk;
}

}  // namespace

Verb add_embed(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("embed", "Sentence embeddings by a pretrained encoder");
  auto request = std::make_shared<EmbedRequest>();
  command
      ->add_option("MODEL", request->folder,
                   "Folder of a BERT-type model: config.json, model.safetensors, vocab.txt")
      ->required();
  command->add_option("-i,--input", request->input, "Sentences, one a line; -: stdin")
      ->capture_default_str();
  command->add_option("-o,--output", request->output,
                      "Safetensors file to write; without it similarities are printed");
  command->add_option("--attention", request->attention,
                      "In place of the model's own: one of `lln zoo` over q, k and v");
  command->add_option("--set", request->options, "A setting of that attention, KEY=VALUE")
      ->type_size(1)
      ->allow_extra_args(false);
  command->add_option("--max-tokens", request->max_tokens, "Tokens of a sentence that count")
      ->check(CLI::PositiveNumber);
  command->add_option("--batch", request->batch, "Sentences computed together")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--device", request->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(
      help_footer("  lln embed all-MiniLM-L6-v2 --input sentences.txt\n"
                  "  lln embed all-MiniLM-L6-v2 --attention lln+diag --set diag_block=16 <s.txt\n"
                  "  lln embed all-MiniLM-L6-v2 -i s.txt -o embeddings.safetensors\n"));
  return {command, [request] { return run_embed(*request); }};
}

}  // namespace lln::cli
