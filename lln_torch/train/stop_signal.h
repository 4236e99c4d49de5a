// SIGINT and SIGTERM while a model trains: the first is noted, so that the loop can save and end;
// a second one ends the program at once. Apart from cli/interruption.h, where one signal is all.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <csignal>

namespace lln_torch {

// One at a time. Whoever started the program with a signal ignored (nohup) keeps it ignored.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();  // restores what was before; a signal that was noted is not raised again
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  int arrived() const noexcept;  // its number, or 0

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace lln_torch
