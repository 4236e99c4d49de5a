// The thread pool keeps the contract of lln::Parallel, on which every kernel rests.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "lln/exec.h"

namespace lln {
namespace {

struct Record {
  explicit Record(std::int64_t tasks, int workers)
      : calls(static_cast<std::size_t>(tasks)), busy(static_cast<std::size_t>(workers)) {}

  std::vector<std::atomic<int>> calls;  // of each task
  std::vector<std::atomic<int>> busy;   // of each worker, at this moment
  std::atomic<bool> worker_out_of_range{false};
  std::atomic<bool> worker_shared{false};

  static void task(void* context, std::int64_t task, int worker) {
    auto& record = *static_cast<Record*>(context);
    if (worker < 0 || worker >= static_cast<int>(record.busy.size())) {
      record.worker_out_of_range = true;
      return;
    }
    auto& busy = record.busy[static_cast<std::size_t>(worker)];
    if (busy.fetch_add(1) != 0) record.worker_shared = true;
    ++record.calls[static_cast<std::size_t>(task)];
    busy.fetch_sub(1);
  }
};

void expect_contract(ThreadPool& pool, std::int64_t tasks) {
  Record record(tasks, pool.workers());
  pool.run(tasks, Record::task, &record);
  for (std::size_t t = 0; t < record.calls.size(); ++t) {
    ASSERT_EQ(record.calls[t], 1) << "task " << t << " of " << tasks;
  }
  EXPECT_FALSE(record.worker_out_of_range);
  EXPECT_FALSE(record.worker_shared);
}

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.workers(), threads);
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) expect_contract(pool, tasks);
  }
}

TEST(ThreadPool, ManyShortRegions) {
  ThreadPool pool(3);
  for (int i = 0; i < 2000; ++i) expect_contract(pool, i % 5);
}

TEST(ThreadPool, ZeroThreadsMeansOnePerHardwareThread) {
  const ThreadPool pool;
  const auto hardware = std::thread::hardware_concurrency();
  EXPECT_EQ(pool.workers(), hardware == 0 ? 1 : static_cast<int>(hardware));
}

TEST(ThreadPool, CallersTakeTurns) {
  ThreadPool pool(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool] {
      for (int i = 0; i < 200; ++i) expect_contract(pool, 16);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace lln
