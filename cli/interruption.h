// Signals that ask the program to end, while a temporary file exists. Elsewhere they act as always
// and end the program at once: nothing is on disk then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <csignal>

namespace lln::cli {

// While it lives, SIGINT, SIGTERM and SIGHUP are only noted; afterwards one that came has its
// ordinary effect. One at a time.
class NotedSignals {
 public:
  NotedSignals();
  ~NotedSignals();
  NotedSignals(const NotedSignals&) = delete;
  NotedSignals& operator=(const NotedSignals&) = delete;
  bool arrived() const noexcept;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace lln::cli
