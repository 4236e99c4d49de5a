// The only file that knows the SentencePiece library.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/sentencepiece.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <unordered_map>

#include "io/input_file.h"
#include "lln/error.h"
#include "lln_torch/data/tokenizer.h"

namespace lln_torch {
namespace {

constexpr const char* kSpacePiece = "\xE2\x96\x81";  // a space inside pieces
constexpr std::uint64_t kLargestModel = std::uint64_t{1} << 28;

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) {
    const lln::io::InputFile file(path);
    if (file.bytes() == 0 || file.bytes() > kLargestModel) {
      throw lln::Error(lln::ErrorCode::io,
                       fmt::format("{}: {} bytes are no SentencePiece model", path, file.bytes()));
    }
    const lln::io::Bytes bytes = file.read_at(0, file.bytes(), "the model");
    const std::string_view model(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const sentencepiece::util::Status status = pieces_.LoadFromSerializedProto(model);
    if (!status.ok()) {
      throw lln::Error(lln::ErrorCode::io,
                       fmt::format("{}: no SentencePiece model: {}", path, status.message()));
    }
    for (const char c : model) {
      fingerprint_ = (fingerprint_ ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
    }
    vocabulary_ = pieces_.GetPieceSize();
    for (int id = 0; id < pieces_.GetPieceSize(); ++id) {
      if (pieces_.IdToPiece(id).rfind(kSpacePiece) != pieces_.IdToPiece(id).find(kSpacePiece) ||
          pieces_.IdToPiece(id).find(kSpacePiece, 1) != std::string::npos) {
        word_by_word_ = false;
      }
    }
    special_.unknown = pieces_.unk_id();
    special_.pad = pieces_.pad_id() >= 0 ? pieces_.pad_id() : find({"[PAD]", "<pad>"});
    special_.start = pieces_.bos_id() >= 0 ? pieces_.bos_id() : find({"[CLS]", "<s>"});
    special_.separator = pieces_.eos_id() >= 0 ? pieces_.eos_id() : find({"[SEP]", "</s>"});
    special_.mask = find({"[MASK]", "<mask>"});
  }

  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    const sentencepiece::util::Status status = pieces_.Encode(text, &ids);
    if (!status.ok()) {
      throw lln::Error(lln::ErrorCode::internal,
                       fmt::format("SentencePiece cannot encode: {}", status.message()));
    }
    return ids;
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::vector<std::int32_t> known;
    for (const std::int32_t id : ids) {
      const bool text = id >= 0 && id < pieces_.GetPieceSize() &&
                        (id == special_.unknown || !special_.contains(id));
      if (text) known.push_back(id);
    }
    std::string text;
    const sentencepiece::util::Status status = pieces_.Decode(known, &text);
    if (!status.ok()) {
      throw lln::Error(lln::ErrorCode::internal,
                       fmt::format("SentencePiece cannot decode: {}", status.message()));
    }
    return text;
  }

  bool word_by_word() const override { return word_by_word_; }
  std::int64_t vocabulary() const override { return vocabulary_; }
  const SpecialTokens& special() const override { return special_; }
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  // The first of these pieces that the model has, or a new id behind its last.
  std::int32_t find(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      const int id = pieces_.PieceToId(name);
      if (id != pieces_.unk_id()) return id;
    }
    return static_cast<std::int32_t>(vocabulary_++);
  }

  sentencepiece::SentencePieceProcessor pieces_;
  std::int64_t vocabulary_ = 0;
  bool word_by_word_ = true;  // no piece goes on behind a space
  SpecialTokens special_;
  std::uint64_t fingerprint_ = 0xCBF29CE484222325u;
};

class TrainingLines final : public sentencepiece::SentenceIterator {
 public:
  explicit TrainingLines(const LineSource& source) : source_(source) { Next(); }
  bool done() const override { return done_; }
  void Next() override { done_ = !source_(line_); }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const LineSource& source_;
  std::string line_;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path) {
  return std::make_unique<SentencePieceTokenizer>(path);
}

std::string train_sentencepiece(const LineSource& lines, const SentencePieceOptions& options) {
  // The number of threads is fixed: the sums of the unigram model depend on it.
  const std::unordered_map<std::string, std::string> arguments = {
      {"model_type", options.kind},
      {"vocab_size", std::to_string(options.vocabulary)},
      {"character_coverage", fmt::format("{}", options.coverage)},
      {"byte_fallback", options.byte_fallback ? "true" : "false"},
      {"pad_id", "0"},
      {"unk_id", "1"},
      {"bos_id", "2"},
      {"eos_id", "3"},
      {"pad_piece", "[PAD]"},
      {"unk_piece", "[UNK]"},
      {"bos_piece", "[CLS]"},
      {"eos_piece", "[SEP]"},
      {"control_symbols", "[MASK]"},
      {"max_sentence_length", std::to_string(1 << 30)},
      {"num_threads", "4"},
      {"minloglevel", "3"}};
  TrainingLines sentences(lines);
  std::string model;
  const sentencepiece::util::Status status =
      sentencepiece::SentencePieceTrainer::Train(arguments, &sentences, &model);
  if (!status.ok()) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("training a {} vocabulary of {} pieces: {}", options.kind,
                                 options.vocabulary, status.message()));
  }
  return model;
}

}  // namespace lln_torch
