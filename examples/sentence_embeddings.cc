// A pretrained encoder in C++, without Python: how alike are sentences, by its own attention and
// with LLN+Diag in its place? The folder is a BERT-type model of HuggingFace, such as
// all-MiniLM-L6-v2: config.json, model.safetensors, vocab.txt. Built with the library itself, since
// models are not part of what is installed.
//
//   sentence_embeddings FOLDER ["A sentence." ...]
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "lln_torch/models/bert.h"

namespace {

void show(const char* title, const std::vector<std::string>& sentences, const at::Tensor& vectors) {
  const at::Tensor alike = lln_torch::cosines(vectors);
  std::printf("%s\n", title);
  for (std::size_t row = 0; row < sentences.size(); ++row) {
    for (std::size_t column = 0; column < sentences.size(); ++column) {
      const auto r = static_cast<std::int64_t>(row), c = static_cast<std::int64_t>(column);
      std::printf("%6.3f", alike[r][c].item<float>());
    }
    std::printf("   %s\n", sentences[row].c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [SENTENCE ...]\n", argv[0]);
    return 2;
  }
  try {
    std::vector<std::string> sentences(argv + 2, argv + argc);
    if (sentences.empty()) {
      sentences = {"A man is eating food.", "Someone has a meal.", "The cheetah chases its prey."};
    }
    lln_torch::SentenceEncoder softmax(argv[1], lln_torch::Settings());
    show("softmax, as trained", sentences, softmax.embed(sentences));

    // The same weights with another attention; its settings are those of [attention] in a config.
    lln_torch::SentenceEncoder lln(
        argv[1], lln_torch::Settings::from_toml("name = 'lln+diag'\ndiag_block = 16", "example"));
    show("LLN+Diag", sentences, lln.embed(sentences));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
