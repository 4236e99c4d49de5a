// Reading of problem sets.
// SPDX-License-Identifier: Apache-2.0
#include "bench/problem_set.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>

#include "lln/error.h"

namespace lln::bench {
namespace {

std::string_view without_comment_and_space(std::string_view line) {
  constexpr std::string_view kSpace = " \t\r";
  line = line.substr(0, line.find('#'));
  const std::size_t begin = line.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return line.substr(begin, line.find_last_not_of(kSpace) - begin + 1);
}

}  // namespace

std::vector<Problem> read_problem_set(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::io, fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  }
  std::vector<Problem> problems;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const std::string_view text = without_comment_and_space(line);
    if (text.empty()) continue;
    try {
      problems.push_back(parse_problem(text));
    } catch (const Error& e) {
      throw Error(ErrorCode::invalid_argument, fmt::format("{}:{}: {}", path, number, e.what()));
    }
  }
  if (file.bad()) throw Error(ErrorCode::io, path + ": cannot be read");
  if (problems.empty()) {
    throw Error(ErrorCode::invalid_argument, path + ": holds no problem, one per line is expected");
  }
  return problems;
}

}  // namespace lln::bench
