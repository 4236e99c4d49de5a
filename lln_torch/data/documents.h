// Articles of a text corpus, streamed: a line "= Title =" starts one; in files without such titles
// (and before the first) a blank line ends one. One paragraph a line, as in Wikipedia's extracts
// and WikiText, whose deeper titles ("= = Section = =") stay paragraphs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lln_torch {

struct Document {
  std::string title;               // "" where it has none
  std::vector<std::string> lines;  // paragraphs, none of them blank, without the title
};

// "Title" of "= Title =", empty where the line is no title of the first level.
std::string_view article_title(std::string_view line);

// Calls `each` with every document of the file that has a line or a title. `compressed` is told how
// many bytes of the file were read, from time to time. A line that is not UTF-8 is an lln::Error
// (io) with file and line.
void read_documents(const std::string& path, const std::function<void(Document&&)>& each,
                    const std::function<void(std::int64_t bytes)>& compressed = {});

// Files that a name in `folder` with * in it stands for, sorted; a name without * stands for
// itself. Throws lln::Error (io) where there is none.
std::vector<std::string> matching_files(const std::string& folder, const std::string& pattern);

}  // namespace lln_torch
