// The progress line is drawn by a thread of its own, so that work of any shape shows at least the
// time that it has taken.
// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <utility>

namespace lln::cli {
namespace {

constexpr std::chrono::seconds kQuiet{2};
constexpr std::chrono::milliseconds kRedraw{200};

}  // namespace

Progress::Progress(std::string what) : what_(std::move(what)) {
  if (::isatty(STDERR_FILENO) != 0) {
    watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }
}

Progress::~Progress() {
  watcher_.request_stop();
  if (watcher_.joinable()) watcher_.join();
  clear_line();
}

void Progress::stage(std::string what) {
  const std::lock_guard guard(lock_);
  what_ = std::move(what);
  steps_ = 0;
  tasks_ = 0;
  done_ = 0;
}

void Progress::step(std::int64_t tasks) {
  const std::lock_guard guard(lock_);
  ++steps_;
  tasks_ = tasks;
  done_ = 0;
}

void Progress::print(std::FILE* stream, const std::string& text) {
  const std::lock_guard guard(lock_);
  clear_line();
  fmt::print(stream, "{}", text);
  std::fflush(stream);
}

void Progress::watch(const std::stop_token& stop) {
  std::unique_lock guard(lock_);
  while (!wake_.wait_for(guard, stop, kRedraw, [&] { return stop.stop_requested(); })) {
    if (stop.stop_requested()) return;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    if (elapsed < kQuiet) continue;
    const std::string step = steps_ > 1 ? fmt::format(", step {}", steps_) : std::string();
    const std::string share =
        tasks_ > 0 ? fmt::format(" {:3}%", 100 * done_.load() / tasks_) : std::string();
    fmt::print(stderr, "\r\033[K{}{}{}  {:.0f} s", what_, step, share, elapsed.count());
    std::fflush(stderr);
    shown_ = true;
  }
}

void Progress::clear_line() {
  if (std::exchange(shown_, false)) fmt::print(stderr, "\r\033[K");
}

void CountedTasks::run(std::int64_t tasks, Task task, void* context) {
  struct Counted {
    Task task;
    void* context;
    Progress& progress;
  } counted{task, context, progress_};
  progress_.step(tasks);
  threads_.run(
      tasks,
      [](void* c, std::int64_t t, int worker) {
        auto& self = *static_cast<Counted*>(c);
        self.task(self.context, t, worker);
        self.progress.advance();
      },
      &counted);
}

}  // namespace lln::cli
