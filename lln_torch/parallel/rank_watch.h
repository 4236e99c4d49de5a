// Do all ranks of a job live and work? Each writes signs of life into the store that all share;
// rank 0 reads those of all, the others that of rank 0. A rank that is silent, or at work on
// nothing while others wait for it, is named to all, and all end. c10d knows that an exchange
// failed, but not because of whom.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lln_torch/parallel/store_calls.h"

namespace lln_torch {

struct RankWatchOptions {
  int rank = 0, size = 1;
  // What is known of each rank, for messages: "pid 17 on host".
  std::vector<std::string> names;
  // Silence, or waiting for one rank, that is too long. Time that this process was suspended does
  // not count.
  std::chrono::milliseconds timeout{600'000};
  bool first_has_store = true;  // rank 0 is gone when the store is
  // Called by the thread of the watch where the job has failed and this process does not end by
  // itself: its other threads may wait for ever. Expected to end the process.
  std::function<void(const std::string&)> lost = [](const std::string&) {};
};

class RankWatch {
 public:
  // The store is a connection that nobody else uses.
  RankWatch(Store store, RankWatchOptions options);
  ~RankWatch();  // takes two seconds at most, whatever the store does
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Something was done: a step, a part of an evaluation.
  void work_done() noexcept { ++work_; }
  // Whether this rank does nothing but wait for others.
  void set_waiting(bool waiting) noexcept;
  // NCCL, which may know of a failed exchange while nobody waits for it.
  void add_backend(const Backend& backend);
  void forget_backends();

  // Why the job has failed, if it has.
  std::optional<std::string> fault() const;
  // After an exchange failed here with the text `symptom`: why. Takes seconds, hardly more than the
  // timeout at most.
  std::string find_fault(const std::string& symptom);
  // This rank ends with an error: tells the others.
  void fail(const std::string& text);
  // This rank ends as it should. All leave together: once rank 0 does, which then waits for the
  // others, for the timeout at most. Returns why the job has failed meanwhile, if it has.
  std::optional<std::string> leave();

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::int64_t count = -1, work = -1;  // of the last sign
    Clock::duration heard{}, worked{};   // when they changed
    bool waiting = false, suspicious = false, left = false;
  };
  void watch();  // thread
  void advance_clock();
  void look_at_backends();
  void ask();
  void take_answer();
  void read(const SignAnswer& answer);
  void hear(Peer& peer, const std::string& sign);
  std::optional<std::string> judge() const;
  std::optional<std::string> silent_rank() const;
  std::optional<std::string> stuck_rank() const;
  void set_fault(const std::string& text);
  void lose_store(const std::string& why);
  void hurry();
  bool has_to_end() const;
  // Those that were silent for so long have left, too.
  bool others_left(std::chrono::milliseconds silence) const;
  std::chrono::milliseconds pace() const;
  // Until `done()`, or for `limit`.
  template <typename Done>
  void wait(std::unique_lock<std::mutex>& lock, Clock::duration limit, Done done);
  std::string name(int rank) const;
  bool keeps_store() const { return options_.rank == 0 && options_.first_has_store; }

  const Store store_;
  const RankWatchOptions options_;
  const std::chrono::milliseconds interval_;
  std::atomic<std::int64_t> work_ = 0;
  std::atomic<bool> waiting_ = false;

  mutable std::mutex mutex_;  // of all that follows but the thread and its request
  std::condition_variable changed_;
  // Time that this process has run, as far as its thread saw it.
  Clock::duration awake_{};
  Clock::time_point tick_ = Clock::now();
  std::vector<Peer> peers_;  // also this rank
  std::vector<Backend> backends_;
  bool suspicious_ = false;             // an exchange failed here
  bool overdue_ = false;                // or is not done after the timeout
  std::optional<std::string> suspect_;  // a fault that this rank found, before all have agreed
  std::optional<std::string> fault_;
  Clock::duration fault_time_{};
  bool noticed_ = false;                // another thread looks after the fault
  std::optional<std::string> own_end_;  // to be told to the others; empty: all is well
  bool told_ = false;
  bool leaving_ = false, stopping_ = false, store_gone_ = false;
  Clock::time_point next_request_{};

  // Of the thread alone.
  std::future<SignAnswer> answer_;
  std::vector<int> asked_;
  Clock::duration asked_time_{};
  bool asked_as_left_ = false;
  std::int64_t count_ = 0;
  std::thread thread_;
};

}  // namespace lln_torch
