// Ranks as threads of one process, with Gloo between them: with a watch, or with a backend that
// counts what it is given.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lln_torch/parallel/rank_group.h"

namespace lln_torch::test {

// Longer than anything takes on a busy machine.
constexpr std::chrono::milliseconds kLong{60'000};

// What one rank gave to exchanges, in bytes and messages.
struct Traffic {
  std::int64_t reduced = 0, sent = 0, gathered = 0;  // bytes
  std::int64_t reductions = 0, sends = 0;
};

// Every call goes to another backend.
class CountingBackend : public c10d::Backend {
 public:
  CountingBackend(lln_torch::Backend engine, Traffic& traffic)
      : c10d::Backend(engine->getRank(), engine->getSize()),
        engine_(std::move(engine)),
        traffic_(traffic) {}
  const std::string getBackendName() const override { return "counting"; }
  RankGroup::Work allreduce(std::vector<at::Tensor>& tensors,
                            const c10d::AllreduceOptions& options) override {
    traffic_.reduced += bytes(tensors);
    ++traffic_.reductions;
    return engine_->allreduce(tensors, options);
  }
  RankGroup::Work allgather(std::vector<std::vector<at::Tensor>>& outputs,
                            std::vector<at::Tensor>& inputs,
                            const c10d::AllgatherOptions& options) override {
    traffic_.gathered += bytes(inputs);
    return engine_->allgather(outputs, inputs, options);
  }
  RankGroup::Work send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    traffic_.sent += bytes(tensors);
    ++traffic_.sends;
    return engine_->send(tensors, to, tag);
  }
  RankGroup::Work recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return engine_->recv(tensors, from, tag);
  }

 private:
  static std::int64_t bytes(const std::vector<at::Tensor>& tensors) {
    std::int64_t sum = 0;
    for (const at::Tensor& x : tensors) sum += static_cast<std::int64_t>(x.nbytes());
    return sum;
  }
  lln_torch::Backend engine_;
  Traffic& traffic_;
};

// `work` of each rank, on a thread of its own. What one throws is thrown here once all have ended;
// others must end, too.
inline void on_each_thread(int size, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  std::exception_ptr failed;
  std::mutex mutex;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failed) failed = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failed) std::rethrow_exception(failed);
}

// The same with Gloo, counted.
inline std::vector<Traffic> on_threads(int size,
                                       const std::function<void(const RankGroup&)>& work) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Traffic> traffic(static_cast<std::size_t>(size));
  on_each_thread(size, [&](int rank) {
    const RankGroup group(
        c10::make_intrusive<CountingBackend>(make_gloo(store, rank, size, kLong),
                                             traffic[static_cast<std::size_t>(rank)]),
        at::kCPU);
    work(group);
  });
  return traffic;
}

inline RankWatchOptions watch_options(int rank, int size, std::chrono::milliseconds timeout) {
  RankWatchOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  for (int i = 0; i < size; ++i) options.names.push_back("thread " + std::to_string(i));
  return options;
}

// `work` on each rank, with a watch.
inline void on_watched_threads(int size, const std::function<void(const RankGroup&)>& work) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      RankWatch watch(c10::make_intrusive<c10d::PrefixStore>("watch", store),
                      watch_options(rank, size, kLong));
      const RankGroup group(
          make_gloo(c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, kLong),
          at::kCPU, &watch);
      work(group);
      watch.leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lln_torch::test
