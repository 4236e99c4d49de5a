// Training of SentencePiece models on text files, with special tokens where every task of this
// project finds them: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace lln_torch {

struct SentencePieceOptions {
  std::int64_t vocabulary = 16000;
  std::string kind = "bpe";    // or "unigram"
  double coverage = 0.9995;    // of the characters; the rest are unknown, or bytes
  bool byte_fallback = false;  // 256 pieces for bytes, so that nothing is unknown
};

// Gives one line after the other, false after the last.
using LineSource = std::function<bool(std::string& line)>;

// The bytes of the model: a function of the lines and the options alone. Throws lln::Error with
// what SentencePiece says, which names the vocabulary sizes that the text allows.
std::string train_sentencepiece(const LineSource& lines, const SentencePieceOptions& options);

}  // namespace lln_torch
