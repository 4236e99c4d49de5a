// The thread pool: fork and join with a shared task counter. Threads spin for a moment between two
// parallel regions of one call before they sleep, because a short call has several of them.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "lln/error.h"
#include "lln/exec.h"

namespace lln {
namespace {

// About 20 us on a 3 GHz core: longer than the gap between two regions of one call, too short to be
// seen as load.
constexpr int kSpins = 2000;

void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Returns when value differs from old.
void wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) noexcept {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

struct ThreadPool::Impl {
  std::mutex one_run_at_a_time;
  std::vector<std::thread> threads;

  // The region under way; written before `generation` changes, read after.
  Task task = nullptr;
  void* context = nullptr;
  std::int64_t tasks = 0;
  std::atomic<std::int64_t> next{0};

  std::atomic<std::uint32_t> generation{0};
  std::atomic<std::uint32_t> busy{0};  // threads that have not finished the region
  std::atomic<bool> stop{false};

  void drain(int worker) {
    for (std::int64_t t = next.fetch_add(1, std::memory_order_relaxed); t < tasks;
         t = next.fetch_add(1, std::memory_order_relaxed)) {
      task(context, t, worker);
    }
  }

  void join() {
    stop.store(true, std::memory_order_relaxed);
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void loop(int worker) {
    std::uint32_t seen = 0;
    for (;;) {
      wait_for_change(generation, seen);
      seen = generation.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      drain(worker);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) busy.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>()) {
  const int count =
      threads > 0 ? threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  try {
    impl_->threads.reserve(static_cast<std::size_t>(count - 1));
    for (int worker = 1; worker < count; ++worker) {
      impl_->threads.emplace_back([impl = impl_.get(), worker] { impl->loop(worker); });
    }
  } catch (const std::exception& error) {
    const std::size_t started = impl_->threads.size() + 1;
    impl_->join();
    throw Error(ErrorCode::out_of_memory,
                fmt::format("thread pool: thread {} of {} could not be started: {}", started + 1,
                            count, error.what()));
  }
}

ThreadPool::~ThreadPool() { impl_->join(); }

int ThreadPool::workers() const noexcept { return static_cast<int>(impl_->threads.size()) + 1; }

void ThreadPool::run(std::int64_t tasks, Task task, void* context) {
  const std::scoped_lock lock(impl_->one_run_at_a_time);
  impl_->task = task;
  impl_->context = context;
  impl_->tasks = tasks;
  impl_->next.store(0, std::memory_order_relaxed);
  impl_->busy.store(static_cast<std::uint32_t>(impl_->threads.size()), std::memory_order_relaxed);
  impl_->generation.fetch_add(1, std::memory_order_release);
  impl_->generation.notify_all();
  impl_->drain(0);
  for (std::uint32_t busy = impl_->busy.load(std::memory_order_acquire); busy != 0;
       busy = impl_->busy.load(std::memory_order_acquire)) {
    wait_for_change(impl_->busy, busy);
  }
}

}  // namespace lln
