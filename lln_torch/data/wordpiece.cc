// ICU knows the characters (categories, decomposition, case); the rules are BERT's. Where the two
// implementations in use differ (a Greek sigma at the end of a word), the compiled one of
// transformers is followed: it looks at one character at a time.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/wordpiece.h"

#include <fmt/format.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "io/printable.h"
#include "lln/error.h"
#include "lln_torch/data/text_lines.h"

namespace lln_torch {
namespace {

constexpr std::size_t kLongestWord = 100;  // characters; longer words are unknown

bool is_chinese(UChar32 c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

// The category as Unicode 8 has it, the version of the tables in transformers' tokenizer: what is
// newer is unassigned there, and six characters were something else.
std::uint32_t category_mask(UChar32 c) {
  constexpr int kTablesVersion = 8;
  if (c == 0x166D || c == 0x111C9) return U_GC_PO_MASK;
  if (c == 0x1885 || c == 0x1886) return U_GC_LO_MASK;
  if (c == 0x1734) return U_GC_MN_MASK;
  if (c == 0xA9BD) return U_GC_MC_MASK;
  const std::uint32_t mask = U_GET_GC_MASK(c);
  const std::uint32_t matters = U_GC_P_MASK | U_GC_MN_MASK | U_GC_CF_MASK | U_GC_CO_MASK;
  if (c < 0x80 || (mask & matters) == 0) return mask;
  UVersionInfo version;
  u_charAge(c, version);
  return version[0] > kTablesVersion ? U_GC_CN_MASK : mask;
}

bool is_space(UChar32 c) { return u_isUWhiteSpace(c) != 0; }

bool is_removed(UChar32 c) {
  if (c == '\t' || c == '\n' || c == '\r') return false;
  const std::uint32_t control = U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK;  // unassigned ones stay
  return c == 0 || c == 0xFFFD || (category_mask(c) & control) != 0;
}

bool is_punctuation(UChar32 c) {
  const bool ascii = (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
                     (c >= 123 && c <= 126);
  return ascii || (category_mask(c) & U_GC_P_MASK) != 0;
}

icu::UnicodeString without_accents(const icu::UnicodeString& text) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* decompose = icu::Normalizer2::getNFDInstance(status);
  const icu::UnicodeString parts =
      U_FAILURE(status) != 0 ? text : decompose->normalize(text, status);
  if (U_FAILURE(status) != 0) {
    throw lln::Error(lln::ErrorCode::internal,
                     fmt::format("ICU cannot decompose text: {}", u_errorName(status)));
  }
  icu::UnicodeString kept;
  for (std::int32_t i = 0; i < parts.length(); i = parts.moveIndex32(i, 1)) {
    const UChar32 c = parts.char32At(i);
    if ((category_mask(c) & U_GC_MN_MASK) == 0) kept.append(c);
  }
  return kept;
}

icu::UnicodeString lower_case(const icu::UnicodeString& text) {
  icu::UnicodeString lower;
  for (std::int32_t i = 0; i < text.length(); i = text.moveIndex32(i, 1)) {
    const UChar32 c = text.char32At(i);
    lower.append(u_tolower(c));
    if (c == 0x130) lower.append(UChar32{0x307});  // the only letter that becomes two
  }
  return lower;
}

icu::UnicodeString normalized(std::string_view text, const WordPieceOptions& options) {
  const icu::UnicodeString raw = icu::UnicodeString::fromUTF8(
      icu::StringPiece(text.data(), static_cast<std::int32_t>(text.size())));
  icu::UnicodeString clean;
  for (std::int32_t i = 0; i < raw.length(); i = raw.moveIndex32(i, 1)) {
    const UChar32 c = raw.char32At(i);
    if (is_removed(c)) continue;
    if (options.space_chinese && is_chinese(c)) {
      clean.append(UChar32{' '}).append(c).append(UChar32{' '});
    } else {
      clean.append(is_space(c) ? UChar32{' '} : c);
    }
  }
  if (options.strip_accents) clean = without_accents(clean);
  return options.lowercase ? lower_case(clean) : clean;
}

class WordPieceTokenizer final : public Tokenizer {
 public:
  WordPieceTokenizer(std::vector<std::string> pieces, const WordPieceOptions& options)
      : pieces_(std::move(pieces)), options_(options) {
    vocabulary_ = static_cast<std::int64_t>(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      ids_.emplace(pieces_[i], static_cast<std::int32_t>(i));
      longest_piece_ = std::max(longest_piece_, pieces_[i].size());
      for (const char c : pieces_[i]) {
        fingerprint_ = (fingerprint_ ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
      }
      fingerprint_ = (fingerprint_ ^ '\n') * 0x100000001B3u;
    }
    const std::array<std::pair<const char*, std::int32_t*>, 5> specials = {
        {{"[PAD]", &special_.pad},
         {"[UNK]", &special_.unknown},
         {"[CLS]", &special_.start},
         {"[SEP]", &special_.separator},
         {"[MASK]", &special_.mask}}};
    for (const auto& [name, id] : specials) {
      const auto found = ids_.find(name);
      *id = found != ids_.end() ? found->second : static_cast<std::int32_t>(vocabulary_++);
      special_names_.emplace_back(name, *id);
    }
  }

  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    // As in transformers, "[MASK]" inside a text is the token, not five pieces.
    while (!text.empty()) {
      std::size_t place = text.size();
      std::size_t size = 0;
      std::int32_t id = 0;
      for (const auto& [name, token] : special_names_) {
        const std::size_t found = text.substr(0, place).find(name);
        if (found == std::string_view::npos) continue;
        place = found;
        size = name.size();
        id = token;
      }
      encode_plain(text.substr(0, place), ids);
      if (size > 0) ids.push_back(id);
      text.remove_prefix(place + size);
    }
    return ids;
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id < 0 || static_cast<std::size_t>(id) >= pieces_.size() || special_.contains(id)) {
        continue;
      }
      const std::string& piece = pieces_[static_cast<std::size_t>(id)];
      if (piece.starts_with("##")) {
        text += piece.substr(2);
      } else {
        text += (text.empty() ? "" : " ") + piece;
      }
    }
    return text;
  }

  bool word_by_word() const override { return true; }
  std::int64_t vocabulary() const override { return vocabulary_; }
  const SpecialTokens& special() const override { return special_; }
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  void encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const {
    const icu::UnicodeString clean = normalized(text, options_);
    icu::UnicodeString word;
    for (std::int32_t i = 0; i < clean.length(); i = clean.moveIndex32(i, 1)) {
      const UChar32 c = clean.char32At(i);
      const bool alone = is_punctuation(c);
      if (!alone && !is_space(c)) {
        word.append(c);
        continue;
      }
      encode_word(word, ids);
      word.remove();
      if (alone) encode_word(icu::UnicodeString(c), ids);
    }
    encode_word(word, ids);
  }

  void encode_word(const icu::UnicodeString& word, std::vector<std::int32_t>& ids) const {
    if (word.isEmpty()) return;
    const std::size_t before = ids.size();
    std::string text;
    word.toUTF8String(text);
    const bool too_long = static_cast<std::size_t>(word.countChar32()) > kLongestWord;
    std::string piece;
    for (std::size_t begin = 0; begin < text.size() && !too_long;) {
      const std::string prefix = begin == 0 ? "" : "##";
      std::size_t end = std::min(text.size(), begin + longest_piece_);
      auto found = ids_.end();
      for (; end > begin; --end) {
        piece.assign(prefix).append(text, begin, end - begin);
        found = ids_.find(piece);
        if (found != ids_.end()) break;
      }
      if (found == ids_.end()) {
        ids.resize(before);
        ids.push_back(special_.unknown);
        return;
      }
      ids.push_back(found->second);
      begin = end;
    }
    if (too_long) ids.push_back(special_.unknown);
  }

  std::vector<std::string> pieces_;
  WordPieceOptions options_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::vector<std::pair<std::string, std::int32_t>> special_names_;
  std::size_t longest_piece_ = 0;
  std::int64_t vocabulary_ = 0;
  SpecialTokens special_;
  std::uint64_t fingerprint_ = 0xCBF29CE484222325u;
};

WordPieceOptions options_beside(const std::string& path) {
  WordPieceOptions options;
  const std::filesystem::path config =
      std::filesystem::path(path).parent_path() / "tokenizer_config.json";
  std::ifstream file(config);
  if (!file) return options;
  const nlohmann::json values = nlohmann::json::parse(file, nullptr, false);
  if (!values.is_object()) {
    throw lln::Error(lln::ErrorCode::io, config.string() + ": expected a JSON object");
  }
  const auto flag = [&](const char* key, bool otherwise) {
    const auto found = values.find(key);
    return found != values.end() && found->is_boolean() ? found->get<bool>() : otherwise;
  };
  options.lowercase = flag("do_lower_case", true);
  options.strip_accents = flag("strip_accents", options.lowercase);
  options.space_chinese = flag("tokenize_chinese_chars", true);
  return options;
}

}  // namespace

std::unique_ptr<Tokenizer> load_wordpiece(const std::string& path) {
  return load_wordpiece(path, options_beside(path));
}

std::unique_ptr<Tokenizer> load_wordpiece(const std::string& path,
                                          const WordPieceOptions& options) {
  TextLines lines(path);
  std::vector<std::string> pieces;
  std::unordered_map<std::string, std::int64_t> seen;
  std::string_view line;
  while (lines.next(line)) {
    if (line.empty()) lines.fail("expected a piece of a vocabulary, found an empty line");
    if (!is_utf8(line)) lines.fail("a piece that is not UTF-8");
    const auto [first, added] = seen.emplace(line, lines.number());
    if (!added) {
      lines.fail(fmt::format("the piece {} is there already, in line {}", lln::io::printable(line),
                             first->second));
    }
    pieces.emplace_back(line);
  }
  if (!seen.contains("[UNK]")) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: expected a BERT vocabulary, found {} pieces without [UNK]",
                                 path, pieces.size()));
  }
  return std::make_unique<WordPieceTokenizer>(std::move(pieces), options);
}

}  // namespace lln_torch
