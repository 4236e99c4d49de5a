// The progress line as a terminal shows it: standard error of this process becomes one.
// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <regex>
#include <string>
#include <thread>

namespace lln::cli {
namespace {

const std::string kClear = "\r\033\\[K";  // as a regular expression

// While it lives, what is written to stderr can be read here.
class Terminal {
 public:
  Terminal() {
    int theirs = -1;
    if (openpty(&ours_, &theirs, nullptr, nullptr, nullptr) != 0) return;
    fcntl(ours_, F_SETFL, O_NONBLOCK);
    before_ = dup(STDERR_FILENO);
    dup2(theirs, STDERR_FILENO);
    close(theirs);
  }
  ~Terminal() {
    if (!opened()) return;
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(ours_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool opened() const { return before_ >= 0; }

  // Whether a match of `pattern` comes, after what was read before, within ten seconds.
  testing::AssertionResult shows(const std::string& pattern) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    std::string seen;
    while (std::chrono::steady_clock::now() < end) {
      std::array<char, 1024> part{};
      const ssize_t count = read(ours_, part.data(), part.size());
      if (count > 0) seen.append(part.data(), static_cast<std::size_t>(count));
      if (std::regex_search(seen, std::regex(pattern))) return testing::AssertionSuccess();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return testing::AssertionFailure()
           << "no " << pattern << " in " << testing::PrintToString(seen);
  }

 private:
  int ours_ = -1;
  int before_ = -1;
};

TEST(Progress, AStageStartsWithoutAShare) {
  const Terminal terminal;
  if (!terminal.opened()) GTEST_SKIP() << "no pseudo-terminal here";
  {
    Progress progress("one");
    progress.step(4);
    progress.advance();
    EXPECT_TRUE(terminal.shows(kClear + "one  25%  \\d+ s"));
    progress.stage("two");
    EXPECT_TRUE(terminal.shows(kClear + "two  \\d+ s"));
    progress.step(2);
    EXPECT_TRUE(terminal.shows(kClear + "two   0%  \\d+ s"));
    progress.print(stderr, "a warning\n");
    EXPECT_TRUE(terminal.shows(kClear + "a warning"));
    EXPECT_TRUE(terminal.shows(kClear + "two"));
  }
  EXPECT_TRUE(terminal.shows(kClear + "$"));
}

}  // namespace
}  // namespace lln::cli
