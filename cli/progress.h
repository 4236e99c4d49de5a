// One line on stderr for work that takes longer than two seconds, shown on a terminal only, and the
// wrapper that lets it count the tasks of a call without the library knowing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

#include "lln/exec.h"

namespace lln::cli {

class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // What is being done from now on; no share is shown until the next step.
  void stage(std::string what);
  // The share shown is that of `tasks`, until the next step.
  void step(std::int64_t tasks);
  void advance() { done_ += 1; }
  // Text for stdout or stderr that stands above the line instead of running into it.
  void print(std::FILE* stream, const std::string& text);

 private:
  void watch(const std::stop_token& stop);
  void clear_line();  // with lock_ held

  std::atomic<std::int64_t> done_{0};
  std::mutex lock_;  // of all below
  std::condition_variable_any wake_;
  std::string what_;
  int steps_ = 0;
  std::int64_t tasks_ = 0;
  bool shown_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::jthread watcher_;  // last: it uses all of the above
};

class CountedTasks final : public Parallel {
 public:
  CountedTasks(Parallel& threads, Progress& progress) : threads_(threads), progress_(progress) {}
  int workers() const noexcept override { return threads_.workers(); }
  void run(std::int64_t tasks, Task task, void* context) override;

 private:
  Parallel& threads_;
  Progress& progress_;
};

}  // namespace lln::cli
