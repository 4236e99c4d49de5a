// What `lln --help` says of the verbs of lln-torch, and the way there.
// SPDX-License-Identifier: Apache-2.0
#include "torch_verbs.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "lln/error.h"
#include "lln/version.h"
#include "verb.h"

namespace lln::cli {
namespace {

struct TorchVerb {
  const char* name;
  const char* description;
};

constexpr std::array kTorchVerbs = {
    TorchVerb{"zoo", "Every attention that can be trained, and what it costs"},
    TorchVerb{"tokenize", "Train a tokenizer on text and write token shards for training"},
    TorchVerb{"preview", "Show examples of a task as a model sees them"},
    TorchVerb{"train", "Train a model by a config file; resumes where it was stopped"},
    TorchVerb{"eval", "Evaluate a run on its validation set"},
    TorchVerb{"compare", "Compare runs: a table, and curves in an HTML report"},
    TorchVerb{"dump", "Write q and k of a run's layers, for lln analyze"},
    TorchVerb{"embed", "Sentence embeddings by a pretrained encoder"},
    TorchVerb{"generate", "Continue a text by a trained decoder, in constant memory"},
    TorchVerb{"cost", "Time and memory of a training step, for attentions and lengths"},
};

[[noreturn]] void become_lln_torch(char** argv) {
  const BuildInfo info = build_info();
  for (const BuildInfo::Part& part : info.parts) {
    if (part.name == "torch" && !part.built) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("lln {} is part of the LibTorch layer, which is not built in: {}",
                              argv[1], part.reason));
    }
  }
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorCode::io, "/proc/self/exe: " + error.message());
  const std::string other = (self.parent_path() / "lln-torch").string();
  execv(other.c_str(), argv);
  throw Error(ErrorCode::io, fmt::format("{}: {}", other, std::strerror(errno)));
}

}  // namespace

bool is_torch_verb(std::string_view name) {
  return std::any_of(kTorchVerbs.begin(), kTorchVerbs.end(),
                     [&](const TorchVerb& verb) { return verb.name == name; });
}

void list_torch_verbs(CLI::App& program) {
  for (const TorchVerb& verb : kTorchVerbs) {
    program.add_subcommand(verb.name, verb.description)->group("Training (LibTorch layer)");
  }
}

int run_torch_verb(int argc, char** argv) {
  const bool json =
      std::any_of(argv, argv + argc, [](const char* a) { return std::string_view(a) == "--json"; });
  return run_reporting_errors({nullptr, [&]() -> int { become_lln_torch(argv); }}, json);
}

}  // namespace lln::cli
