// WordPiece for BERT-type vocabularies: BERT's basic tokenizer (cleaning, lower case without
// accents, spaces around Chinese characters, punctuation on its own), then the longest piece
// first. Ids equal those of transformers' BertTokenizer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

struct WordPieceOptions {
  bool lowercase = true;
  bool strip_accents = true;
  bool space_chinese = true;
};

// vocab.txt, one piece a line, the id its number from 0; options out of the tokenizer_config.json
// beside it, where there is one. Throws lln::Error (io) with the line.
std::unique_ptr<Tokenizer> load_wordpiece(const std::string& path);
std::unique_ptr<Tokenizer> load_wordpiece(const std::string& path, const WordPieceOptions& options);

}  // namespace lln_torch
