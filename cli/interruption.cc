// A signal handler may do almost nothing, so this one stores a number.
// SPDX-License-Identifier: Apache-2.0
#include "interruption.h"

namespace lln::cli {
namespace {

volatile std::sig_atomic_t arrived_signal = 0;

extern "C" void note_signal(int signal) { arrived_signal = signal; }

}  // namespace

NotedSignals::NotedSignals() {
  arrived_signal = 0;
  struct sigaction note {};
  note.sa_handler = note_signal;
  sigemptyset(&note.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    // Whoever started the program with the signal ignored (nohup) keeps it ignored.
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &note, nullptr);
  }
}

NotedSignals::~NotedSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &before_[i], nullptr);
  }
  if (arrived()) std::raise(arrived_signal);
}

bool NotedSignals::arrived() const noexcept { return arrived_signal != 0; }

}  // namespace lln::cli
