// libarchive reads: its raw format is one compressed file, and the other formats are archives.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/text_lines.h"

#include <fmt/format.h>

#include <cstring>

#include "io/printable.h"
#include "lln/error.h"
#include "lln_torch/data/archive_reader.h"

namespace lln_torch {
namespace {

// "./SST-2/train.tsv" and "SST-2/train.tsv" are one name.
std::string member_name(archive_entry* entry) {
  const char* name = archive_entry_pathname(entry);
  std::string text = name == nullptr ? "" : name;
  while (text.starts_with("./")) text.erase(0, 2);
  return text;
}

}  // namespace

struct TextLines::Archive {
  ArchiveReader reader;
  bool empty = false;
};

TextLines::TextLines(const std::string& path)
    : name_(path),
      archive_(std::make_unique<Archive>(Archive{open_archive(path, ArchiveFormat::raw)})) {
  ended_ = next_archive_entry(archive_->reader.get(), name_) == nullptr;
}

TextLines::TextLines(const std::string& archive, const std::string& member)
    : name_(archive + "/" + member),
      archive_(std::make_unique<Archive>(Archive{open_archive(archive, ArchiveFormat::any)})) {
  while (archive_entry* entry = next_archive_entry(archive_->reader.get(), archive)) {
    if (member_name(entry) == member) return;
  }
  throw lln::Error(lln::ErrorCode::io,
                   fmt::format("{}: has no file {}", archive, lln::io::printable(member)));
}

TextLines::~TextLines() = default;

std::int64_t TextLines::compressed_bytes() const {
  return archive_filter_bytes(archive_->reader.get(), -1);
}

void TextLines::fail(const std::string& text) const {
  throw lln::Error(lln::ErrorCode::io, fmt::format("{}:{}: {}", name_, number_, text));
}

// Reads one more block behind what is left; false at the end.
bool TextLines::fill() {
  if (ended_) return false;
  buffer_.erase(0, begin_);
  begin_ = 0;
  const std::size_t before = buffer_.size();
  buffer_.resize(before + kArchiveBlock);
  const la_ssize_t got =
      archive_read_data(archive_->reader.get(), buffer_.data() + before, kArchiveBlock);
  if (got < 0) {
    ++number_;
    fail("damaged here: " + archive_reason(archive_->reader.get()));
  }
  buffer_.resize(before + static_cast<std::size_t>(got));
  ended_ = got == 0;
  return !ended_;
}

bool TextLines::next(std::string_view& line) {
  std::size_t searched = begin_;
  std::size_t end = buffer_.find('\n', searched);
  while (end == std::string::npos) {
    searched = buffer_.size() - begin_;
    if (searched > kLongestLine) {
      ++number_;
      fail(fmt::format("a line of more than {} bytes is no text", kLongestLine));
    }
    if (!fill()) break;
    end = buffer_.find('\n', searched);
  }
  const bool last = end == std::string::npos;
  if (last && begin_ == buffer_.size()) return false;
  line = std::string_view(buffer_).substr(begin_, last ? std::string::npos : end - begin_);
  begin_ = last ? buffer_.size() : end + 1;
  if (line.ends_with('\r')) line.remove_suffix(1);
  ++number_;
  return true;
}

std::vector<std::string> archive_members(const std::string& archive) {
  const ArchiveReader reader = open_archive(archive, ArchiveFormat::any);
  std::vector<std::string> names;
  while (archive_entry* entry = next_archive_entry(reader.get(), archive)) {
    if (archive_entry_filetype(entry) == AE_IFREG) names.push_back(member_name(entry));
  }
  return names;
}

void read_archive(const std::string& archive,
                  const std::function<bool(const std::string& name)>& wanted,
                  const std::function<void(const std::string& name, std::string&& content)>& each) {
  const ArchiveReader reader = open_archive(archive, ArchiveFormat::any);
  std::string block(kArchiveBlock, '\0');
  while (archive_entry* entry = next_archive_entry(reader.get(), archive)) {
    const std::string name = member_name(entry);
    if (archive_entry_filetype(entry) != AE_IFREG || !wanted(name)) continue;
    std::string content;
    while (true) {
      const la_ssize_t got = archive_read_data(reader.get(), block.data(), block.size());
      if (got < 0) {
        throw lln::Error(lln::ErrorCode::io,
                         fmt::format("{}/{}: {}", archive, name, archive_reason(reader.get())));
      }
      if (got == 0) break;
      content.append(block, 0, static_cast<std::size_t>(got));
      if (content.size() > kLargestMember) {
        throw lln::Error(lln::ErrorCode::io,
                         fmt::format("{}/{}: more than {} bytes", archive, name, kLargestMember));
      }
    }
    each(name, std::move(content));
  }
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t size = lead < 0x80   ? 1
                             : lead < 0xC2 ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
    if (size == 0 || i + size > text.size()) return false;
    for (std::size_t j = 1; j < size; ++j) {
      if ((static_cast<unsigned char>(text[i + j]) & 0xC0) != 0x80) return false;
    }
    const auto second = size > 2 ? static_cast<unsigned char>(text[i + 1]) : 0x80;
    // Overlong forms, surrogates and what is above U+10FFFF.
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
        (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) {
      return false;
    }
    i += size;
  }
  return true;
}

std::vector<std::string_view> split_tabs(std::string_view line) {
  std::vector<std::string_view> fields;
  while (true) {
    const std::size_t tab = line.find('\t');
    fields.push_back(line.substr(0, tab));
    if (tab == std::string_view::npos) return fields;
    line.remove_prefix(tab + 1);
  }
}

}  // namespace lln_torch
