// A signal handler may do almost nothing, so this one stores a number; the second time it restores
// the default, which ends the program.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/stop_signal.h"

#include <atomic>

namespace lln_torch {
namespace {

// The handler may run in any thread.
std::atomic<int> noted_stop_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void note_stop_signal(int signal) {
  if (noted_stop_signal != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);  // delivered when this handler returns, which unblocks it
    return;
  }
  noted_stop_signal = signal;
}

}  // namespace

StopSignals::StopSignals() {
  noted_stop_signal = 0;
  struct sigaction note {};
  note.sa_handler = note_stop_signal;
  sigemptyset(&note.sa_mask);
  note.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &note, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &before_[i], nullptr);
  }
}

int StopSignals::arrived() const noexcept { return noted_stop_signal; }

}  // namespace lln_torch
