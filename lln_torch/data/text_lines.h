// Lines of text files, plain or compressed (.xz, .gz, .bz2, .zst), and of files inside archives
// (.tar.xz and others), one by one: corpora are larger than memory. Faults name file and line.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lln_torch {

// A line longer than this is no text.
constexpr std::size_t kLongestLine = std::size_t{1} << 26;

class TextLines {
 public:
  // A text file; compression is recognised by content. Throws lln::Error (io).
  explicit TextLines(const std::string& path);
  // A file inside an archive.
  TextLines(const std::string& archive, const std::string& member);
  ~TextLines();
  TextLines(const TextLines&) = delete;
  TextLines& operator=(const TextLines&) = delete;

  // The next line without its end, \n or \r\n; false after the last. The view lives until the next
  // call.
  bool next(std::string_view& line);
  std::int64_t number() const noexcept { return number_; }  // of the line given last, from 1
  std::int64_t compressed_bytes() const;                    // read so far, for progress
  const std::string& name() const noexcept { return name_; }
  // An Error about the line given last: "NAME:LINE: text".
  [[noreturn]] void fail(const std::string& text) const;

 private:
  struct Archive;
  bool fill();

  std::string name_;
  std::unique_ptr<Archive> archive_;
  std::string buffer_;
  std::size_t begin_ = 0;
  bool ended_ = false;
  std::int64_t number_ = 0;
};

// The names of the regular files in an archive.
std::vector<std::string> archive_members(const std::string& archive);
// Calls `each` with every regular file of an archive whose name `wanted` accepts.
void read_archive(const std::string& archive,
                  const std::function<bool(const std::string& name)>& wanted,
                  const std::function<void(const std::string& name, std::string&& content)>& each);

// `text` is UTF-8. SentencePiece and ICU would replace what is not, without a word.
bool is_utf8(std::string_view text);

// The fields of a line between tabs. No quotes: in the sets read here a quote is a character.
std::vector<std::string_view> split_tabs(std::string_view line);

}  // namespace lln_torch
