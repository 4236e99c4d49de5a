// Borders of articles, and names of files with a star.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/documents.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "lln/error.h"
#include "lln_torch/data/text_lines.h"

namespace lln_torch {
namespace {

std::string_view without_spaces_around(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\v\f\r";
  const std::size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

// Of a name with stars.
bool name_matches(std::string_view name, std::string_view pattern) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return name == pattern;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  name.remove_prefix(star);
  pattern.remove_prefix(star + 1);
  for (std::size_t skipped = 0; skipped <= name.size(); ++skipped) {
    if (name_matches(name.substr(skipped), pattern)) return true;
  }
  return false;
}

}  // namespace

std::string_view article_title(std::string_view line) {
  line = without_spaces_around(line);
  if (line.size() < 5 || !line.starts_with("= ") || !line.ends_with(" =")) return {};
  const std::string_view title = without_spaces_around(line.substr(2, line.size() - 4));
  return title.starts_with('=') || title.ends_with('=') ? std::string_view() : title;
}

void read_documents(const std::string& path, const std::function<void(Document&&)>& each,
                    const std::function<void(std::int64_t bytes)>& compressed) {
  TextLines lines(path);
  Document document;
  bool titles = false;
  const auto end_document = [&] {
    if (!document.lines.empty() || !document.title.empty()) each(std::move(document));
    document = {};
    if (compressed) compressed(lines.compressed_bytes());
  };
  std::string_view raw;
  while (lines.next(raw)) {
    if (!is_utf8(raw))
      lines.fail("not UTF-8: convert the file, or it would be read as something else");
    if (raw.find('\0') != std::string_view::npos) lines.fail("a zero byte: expected text");
    const std::string_view line = without_spaces_around(raw);
    if (line.empty()) {
      if (!titles) end_document();
      continue;
    }
    if (const std::string_view title = article_title(line); !title.empty()) {
      end_document();
      titles = true;
      document.title = title;
    } else {
      document.lines.emplace_back(line);
    }
  }
  end_document();
}

std::vector<std::string> matching_files(const std::string& folder, const std::string& pattern) {
  namespace fs = std::filesystem;
  const fs::path given(pattern);
  const fs::path full = given.is_absolute() || folder.empty() ? given : fs::path(folder) / given;
  if (pattern.find('*') == std::string::npos) {
    if (!fs::exists(full)) throw lln::Error(lln::ErrorCode::io, full.string() + ": no such file");
    return {full.string()};
  }
  const fs::path parent = full.has_parent_path() ? full.parent_path() : fs::path(".");
  std::vector<std::string> found;
  std::error_code code;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, code)) {
    if (name_matches(entry.path().filename().string(), full.filename().string())) {
      found.push_back(entry.path().string());
    }
  }
  if (code) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}", parent.string(), code.message()));
  }
  if (found.empty()) throw lln::Error(lln::ErrorCode::io, full.string() + ": no such files");
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace lln_torch
