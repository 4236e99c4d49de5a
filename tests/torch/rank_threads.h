// Ranks as threads of one process, over a store in its memory: what tests of lln_torch/parallel
// share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lln_torch/parallel/rank_group.h"

namespace lln_torch {

inline RankWatchOptions watch_options(int rank, int size, std::chrono::milliseconds timeout) {
  RankWatchOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  for (int i = 0; i < size; ++i) options.names.push_back("thread " + std::to_string(i));
  return options;
}

// `work` on each of `size` ranks, with a group over Gloo.
inline void on_ranks(int size, const std::function<void(const RankGroup&)>& work) {
  constexpr std::chrono::milliseconds kTimeout{60'000};
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      RankWatch watch(c10::make_intrusive<c10d::PrefixStore>("watch", store),
                      watch_options(rank, size, kTimeout));
      const RankGroup group(
          make_gloo(c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, kTimeout),
          at::kCPU, &watch);
      work(group);
      watch.leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lln_torch
