// Do all ranks of a job live and work? Each writes signs of life into the store that all share and
// reads those of the others. A rank that is silent, or at work on nothing while others wait for it,
// is named to all, and all end. c10d knows that an exchange failed, but not because of whom.
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

#include "lln_torch/parallel/backend.h"

namespace lln_torch {

struct RankWatchOptions {
  int rank = 0, size = 1;
  // What is known of each rank, for messages: "pid 17 on host".
  std::vector<std::string> names;
  // Silence, or waiting for one rank, that is too long.
  std::chrono::milliseconds timeout{600'000};
  bool first_has_store = true;  // rank 0 is gone when the store is
  // Called by a thread of the watch where the job has failed and this process does not end by
  // itself: its other threads may wait for ever. Expected to end the process.
  std::function<void(const std::string&)> lost = [](const std::string&) {};
};

class RankWatch {
 public:
  // The store is a connection that nobody else uses.
  RankWatch(Store store, RankWatchOptions options);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Something was done: a step, a part of an evaluation.
  void work_done() noexcept { ++work_; }
  // Whether this rank does nothing but wait for others.
  void set_waiting(bool waiting) noexcept;

  // Why the job has failed, if it has.
  std::optional<std::string> fault() const;
  // After an exchange failed here with the text `symptom`: why. Takes seconds, the timeout at most.
  std::string find_fault(const std::string& symptom);
  // This rank ends with an error: tells the others.
  void fail(const std::string& text);
  // This rank ends as it should. Rank 0 waits for the others first, where the store is its own.
  void leave();

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string sign, work;  // the last that was read
    Clock::time_point sign_time, work_time;
    bool waiting = false, left = false;
  };
  void beat();   // thread
  void guard();  // thread
  void round(std::int64_t count);
  void read_peers();
  std::optional<std::string> judge() const;
  std::optional<std::string> silent_rank(Clock::time_point now) const;
  std::optional<std::string> stuck_rank(Clock::time_point now) const;
  void set_fault(const std::string& text);
  bool others_left() const;
  void wait_for_others(std::chrono::milliseconds limit);
  std::string name(int rank) const;

  Store store_;
  RankWatchOptions options_;
  std::chrono::milliseconds interval_;
  std::atomic<std::int64_t> work_ = 0;
  std::atomic<bool> waiting_ = false, suspicious_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;  // written by the beating thread
  std::optional<std::string> fault_;
  std::optional<std::string> own_end_;  // to be told to the others
  Clock::time_point fault_time_, round_time_ = Clock::now();
  bool noticed_ = false, stopping_ = false, store_gone_ = false, told_ = false;
  std::thread beating_, guarding_;
};

}  // namespace lln_torch
