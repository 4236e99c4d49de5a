// Two walks over the text: the first counts documents and gathers what a model is trained on, the
// second encodes. Memory holds a sample of the lines and one shard, never the corpus.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/tokenize_corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <filesystem>
#include <mutex>
#include <unordered_set>

#include "io/output_file.h"
#include "lln/error.h"
#include "lln_torch/data/documents.h"
#include "lln_torch/data/random.h"
#include "lln_torch/data/word_memory.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBytesAtOnce = std::size_t{1} << 22;  // of text that is encoded in one go
constexpr const char* kTrainedModel = "tokenizer.model";
// Inside the folder, for what is not complete: the shards that are there stay until the new ones
// are.
constexpr const char* kIncoming = ".incoming";

void write_bytes(const std::string& path, const std::string& bytes,
                 const std::function<bool()>& interrupted) {
  lln::io::OutputFile file(path, interrupted);
  file.write(std::as_bytes(std::span(bytes)));
  file.rename_to_target();
}

// Lines for training, each kept by a number of its own that is compared with one limit. When too
// much is kept, the limit is halved: in the end it is as if the last limit had been there from the
// start, without knowing beforehand how much text there is.
class LineSample {
 public:
  LineSample(std::uint64_t seed, std::int64_t most_bytes) : seed_(seed), most_(most_bytes) {}

  void add(const std::string& line, std::int64_t document) {
    const std::int64_t place = seen_++;
    const std::uint64_t number =
        random_bits(seed_, Stream("training lines"), static_cast<std::uint64_t>(place));
    if (number > limit_) return;
    kept_.push_back({number, place, document, line});
    bytes_ += static_cast<std::int64_t>(line.size());
    while (bytes_ > most_ && kept_.size() > 1) {
      limit_ /= 2;
      remove_if([&](const Kept& k) { return k.number > limit_; });
    }
  }

  // Documents, and lines from `first_line` on, that are held out.
  void leave_out(const std::unordered_set<std::int64_t>& documents, std::int64_t first_line) {
    remove_if(
        [&](const Kept& k) { return k.place >= first_line || documents.contains(k.document); });
  }

  std::int64_t lines() const { return static_cast<std::int64_t>(kept_.size()); }
  std::int64_t bytes() const { return bytes_; }
  LineSource source() const {
    return [this, next = std::size_t{0}](std::string& line) mutable {
      if (next == kept_.size()) return false;
      line = kept_[next++].line;
      return true;
    };
  }

 private:
  struct Kept {
    std::uint64_t number;
    std::int64_t place;  // among all lines
    std::int64_t document;
    std::string line;
  };

  template <class Condition>
  void remove_if(const Condition& condition) {
    std::erase_if(kept_, condition);
    bytes_ = 0;
    for (const Kept& k : kept_) bytes_ += static_cast<std::int64_t>(k.line.size());
  }

  std::uint64_t seed_;
  std::int64_t most_;
  std::uint64_t limit_ = ~std::uint64_t{0};
  std::int64_t seen_ = 0;
  std::int64_t bytes_ = 0;
  std::vector<Kept> kept_;
};

// Encodes documents on all threads and writes them, in their order, as shards.
class ShardSet {
 public:
  ShardSet(fs::path folder, std::string name, std::int64_t shard_tokens, const Tokenizer& tokenizer,
           lln::Parallel& parallel, const TokenizeHooks& hooks)
      : folder_(std::move(folder)),
        name_(std::move(name)),
        shard_tokens_(shard_tokens),
        tokenizer_(tokenizer),
        parallel_(parallel),
        hooks_(hooks),
        memories_(static_cast<std::size_t>(parallel.workers())),
        writer_(tokenizer.vocabulary(), tokenizer.fingerprint()) {}

  void add(std::vector<std::string> lines) {
    if (lines.empty()) return;
    for (const std::string& line : lines) waiting_bytes_ += line.size();
    waiting_.push_back(std::move(lines));
    if (waiting_bytes_ >= kBytesAtOnce) encode();
  }

  void finish() {
    encode();
    if (writer_.tokens() > 0) write();
  }

  const TokenizedPart& part() const { return part_; }
  const std::vector<ShardRecord>& records() const { return records_; }

 private:
  void encode() {
    std::vector<std::vector<std::int32_t>> encoded(waiting_.size());
    std::exception_ptr fault;
    std::mutex lock;  // of the fault
    const auto work = [&](std::int64_t d, int worker) {
      try {
        std::vector<std::int32_t>& ids = encoded[static_cast<std::size_t>(d)];
        WordMemory& memory = memories_[static_cast<std::size_t>(worker)];
        for (const std::string& line : waiting_[static_cast<std::size_t>(d)]) {
          memory.encode(tokenizer_, line, ids);
        }
        if (!ids.empty()) ids.push_back(tokenizer_.special().separator);
      } catch (...) {
        const std::lock_guard guard(lock);
        fault = std::current_exception();
      }
    };
    parallel_.run(
        static_cast<std::int64_t>(waiting_.size()),
        [](void* context, std::int64_t d, int worker) {
          (*static_cast<decltype(work)*>(context))(d, worker);
        },
        const_cast<void*>(static_cast<const void*>(&work)));
    if (fault) std::rethrow_exception(fault);
    for (std::size_t d = 0; d < encoded.size(); ++d) {
      if (encoded[d].empty()) continue;
      ++part_.documents;
      part_.lines += static_cast<std::int64_t>(waiting_[d].size());
      part_.tokens += static_cast<std::int64_t>(encoded[d].size());
      part_.unknown +=
          std::count(encoded[d].begin(), encoded[d].end(), tokenizer_.special().unknown);
      writer_.add(encoded[d]);
      if (writer_.tokens() >= shard_tokens_) write();
    }
    part_.bytes += static_cast<std::int64_t>(waiting_bytes_);
    waiting_.clear();
    waiting_bytes_ = 0;
  }

  void write() {
    const std::string file = fmt::format("{}.{:05}.tokens", name_, records_.size());
    records_.push_back({file, writer_.tokens(), writer_.documents()});
    hooks_.guarded([&](const std::function<bool()>& interrupted) {
      writer_.write((folder_ / file).string(), interrupted);
    });
  }

  fs::path folder_;
  std::string name_;
  std::int64_t shard_tokens_;
  const Tokenizer& tokenizer_;
  lln::Parallel& parallel_;
  const TokenizeHooks& hooks_;
  std::vector<WordMemory> memories_;  // of every worker
  TokenShardWriter writer_;
  std::vector<std::vector<std::string>> waiting_;
  std::size_t waiting_bytes_ = 0;
  TokenizedPart part_;
  std::vector<ShardRecord> records_;
};

class CorpusTokenizer {
 public:
  CorpusTokenizer(const TokenizeRequest& request, lln::Parallel& parallel, TokenizeHooks hooks)
      : request_(request), parallel_(parallel), hooks_(std::move(hooks)) {
    if (!hooks_.progress) hooks_.progress = [](const std::string&, double) {};
    if (!hooks_.guarded) {
      hooks_.guarded = [](const std::function<void(const std::function<bool()>&)>& write) {
        const std::function<bool()> never = [] { return false; };
        write(never);
      };
    }
  }

  ~CorpusTokenizer() {
    std::error_code ignored;
    fs::remove_all(in_output(kIncoming), ignored);
  }
  CorpusTokenizer(const CorpusTokenizer&) = delete;
  CorpusTokenizer& operator=(const CorpusTokenizer&) = delete;

  TokenizeResult run() {
    for (const auto* files : {&request_.files, &request_.validation}) {
      for (const std::string& path : *files) {
        if (!fs::is_regular_file(path)) {
          throw lln::Error(lln::ErrorCode::io, path + ": expected a text file");
        }
      }
    }
    prepare_folder();
    first_walk();
    const std::unique_ptr<Tokenizer> tokenizer = obtain_tokenizer();
    encode(*tokenizer);
    publish();
    return std::move(result_);
  }

 private:
  std::string in_output(const std::string& name) const {
    return (fs::path(request_.output) / name).string();
  }
  std::string in_incoming(const std::string& name) const {
    return (fs::path(request_.output) / kIncoming / name).string();
  }

  void prepare_folder() {
    std::error_code code;
    fs::create_directories(request_.output, code);
    if (!code) fs::remove_all(in_output(kIncoming), code);  // of one that was interrupted
    if (!code) fs::create_directory(in_output(kIncoming), code);
    if (code) {
      throw lln::Error(lln::ErrorCode::io,
                       fmt::format("{}: cannot be made: {}", request_.output, code.message()));
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(request_.output, code)) {
      if (entry.path().extension() == ".tokens") old_.push_back(entry.path());
    }
    // The index first: without it the rest is not read.
    if (fs::exists(in_output(kCorpusIndex))) old_.insert(old_.begin(), in_output(kCorpusIndex));
    if (!old_.empty() && !request_.replace) {
      throw lln::Error(lln::ErrorCode::io,
                       fmt::format("{}: is there already: --replace removes it and what belongs to "
                                   "it",
                                   old_.front().string()));
    }
    if (const std::string obstacle = lln::io::write_obstacle(in_output(kCorpusIndex));
        !obstacle.empty()) {
      throw lln::Error(lln::ErrorCode::io, obstacle);
    }
  }

  // Everything is written: what was there goes, and the new files take its place.
  void publish() {
    std::error_code code;
    for (const fs::path& path : old_) fs::remove(path, code);
    for (const fs::directory_entry& entry : fs::directory_iterator(in_output(kIncoming))) {
      const std::string target = in_output(entry.path().filename().string());
      fs::rename(entry.path(), target, code);
      if (code) {
        throw lln::Error(lln::ErrorCode::io,
                         fmt::format("{}: cannot be written: {}", target, code.message()));
      }
    }
    hooks_.guarded([&](const std::function<bool()>& interrupted) {
      write_bytes(in_output(kCorpusIndex), corpus_index_text(result_.index), interrupted);
    });
  }

  // Every document of `files` with its number, and progress.
  void walk(const std::string& stage, const std::vector<std::string>& files,
            const std::function<void(std::int64_t, Document&&)>& each) const {
    std::int64_t number = 0;
    double all = 0;
    double done = 0;
    for (const std::string& path : files) all += static_cast<double>(fs::file_size(path));
    for (const std::string& path : files) {
      read_documents(
          path, [&](Document&& document) { each(number++, std::move(document)); },
          [&](std::int64_t bytes) {
            hooks_.progress(stage, (done + static_cast<double>(bytes)) / std::max(all, 1.0));
          });
      done += static_cast<double>(fs::file_size(path));
    }
  }

  // A title is the first line of its article.
  static std::vector<std::string> all_lines(Document&& document) {
    std::vector<std::string> lines = std::move(document.lines);
    if (!document.title.empty()) lines.insert(lines.begin(), std::move(document.title));
    return lines;
  }

  void first_walk() {
    const bool train = request_.tokenizer.empty();
    const bool hold_out = request_.validation.empty();
    sample_ = std::make_unique<LineSample>(request_.seed, request_.training_bytes);
    if (!train && !hold_out) return;
    walk("reading", request_.files, [&](std::int64_t number, Document&& document) {
      ++documents_;
      for (const std::string& line : all_lines(std::move(document))) {
        ++lines_;
        if (train) sample_->add(line, number);
      }
    });
    if (lines_ == 0) throw lln::Error(lln::ErrorCode::io, "the files have no text");
    if (!hold_out) return;
    if (documents_ == 1 && lines_ == 1) {
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       "the files have a single line: expected some text to hold out for "
                       "validation, or files for it");
    }
    const std::int64_t pieces = documents_ > 1 ? documents_ : lines_;
    held_out_ = std::clamp<std::int64_t>(
        std::llround(request_.held_out * static_cast<double>(pieces)), 1, pieces - 1);
    if (documents_ > 1) {
      const Permutation order(request_.seed, Stream("held out"), documents_);
      for (std::int64_t i = 0; i < held_out_; ++i) chosen_.insert(order[i]);
    }
    // The tokenizer has not seen the validation either.
    sample_->leave_out(chosen_, documents_ > 1 ? lines_ : lines_ - held_out_);
  }

  std::unique_ptr<Tokenizer> obtain_tokenizer() {
    CorpusIndex& index = result_.index;
    std::string model;
    if (request_.tokenizer.empty()) {
      hooks_.progress(fmt::format("training {} pieces", request_.training.vocabulary), 0);
      model = train_sentencepiece(sample_->source(), request_.training);
      result_.trained_lines = sample_->lines();
      result_.trained_bytes = sample_->bytes();
      index.tokenizer = kTrainedModel;
      hooks_.guarded([&](const std::function<bool()>& interrupted) {
        write_bytes(in_incoming(kTrainedModel), model, interrupted);
      });
    } else if (request_.tokenizer == "bytes") {
      index.tokenizer = "bytes";
    } else {
      copy_tokenizer();
    }
    sample_.reset();
    std::unique_ptr<Tokenizer> tokenizer =
        load_tokenizer(index.tokenizer == "bytes" ? "bytes" : in_incoming(index.tokenizer));
    index.fingerprint = tokenizer->fingerprint();
    index.vocabulary = tokenizer->vocabulary();
    return tokenizer;
  }

  // What made the shards belongs to them, with the config that says whether it is cased.
  void copy_tokenizer() {
    const fs::path given(request_.tokenizer);
    load_tokenizer(request_.tokenizer);
    result_.index.tokenizer = given.extension() == ".txt" ? "vocab.txt" : kTrainedModel;
    std::error_code code;
    const auto copy = [&](const fs::path& from, const std::string& to) {
      fs::copy_file(from, in_incoming(to), fs::copy_options::overwrite_existing, code);
      if (code) {
        throw lln::Error(lln::ErrorCode::io,
                         fmt::format("{}: cannot be copied to {}: {}", from.string(),
                                     request_.output, code.message()));
      }
    };
    copy(given, result_.index.tokenizer);
    const fs::path config = given.parent_path() / "tokenizer_config.json";
    if (given.extension() == ".txt" && fs::is_regular_file(config)) {
      copy(config, "tokenizer_config.json");
    }
  }

  void encode(const Tokenizer& tokenizer) {
    const fs::path folder = in_output(kIncoming);
    ShardSet train(folder, "train", request_.shard_tokens, tokenizer, parallel_, hooks_);
    ShardSet validation(folder, "validation", request_.shard_tokens, tokenizer, parallel_, hooks_);
    walk("encoding", request_.files, [&](std::int64_t number, Document&& document) {
      std::vector<std::string> lines = all_lines(std::move(document));
      if (held_out_ > 0 && documents_ == 1) {
        const auto border = lines.end() - held_out_;
        validation.add({std::make_move_iterator(border), std::make_move_iterator(lines.end())});
        lines.erase(border, lines.end());
      }
      (chosen_.contains(number) ? validation : train).add(std::move(lines));
    });
    walk("encoding validation", request_.validation, [&](std::int64_t, Document&& document) {
      validation.add(all_lines(std::move(document)));
    });
    train.finish();
    validation.finish();
    result_.train = train.part();
    result_.validation = validation.part();
    result_.index.train = train.records();
    result_.index.validation = validation.records();
    for (const auto& [name, part] :
         {std::pair("training", &result_.train), std::pair("validation", &result_.validation)}) {
      if (part->tokens > 0) continue;
      throw lln::Error(lln::ErrorCode::io, fmt::format("the files for {} have no text", name));
    }
  }

  const TokenizeRequest& request_;
  lln::Parallel& parallel_;
  TokenizeHooks hooks_;
  TokenizeResult result_;
  std::unique_ptr<LineSample> sample_;
  std::int64_t documents_ = 0;
  std::int64_t lines_ = 0;
  std::int64_t held_out_ = 0;                // documents, or lines of the only one
  std::unordered_set<std::int64_t> chosen_;  // documents that are held out
  std::vector<fs::path> old_;                // what the folder has already, to be replaced
};

}  // namespace

TokenizeResult tokenize_corpus(const TokenizeRequest& request, lln::Parallel& parallel,
                               const TokenizeHooks& hooks) {
  return CorpusTokenizer(request, parallel, hooks).run();
}

}  // namespace lln_torch
