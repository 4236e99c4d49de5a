// Ranks as threads of one process: sums of gradients in buckets against one sum, what the watch
// says of ranks that are silent, stuck or ended, and shared states.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "lln_torch/parallel/gradient_exchange.h"
#include "lln_torch/train/optimizer.h"
#include "lln_torch/train/prefetch.h"
#include "lln_torch/train/rank_state.h"

namespace lln_torch {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

RankWatchOptions watch_options(int rank, int size, milliseconds timeout) {
  RankWatchOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  for (int i = 0; i < size; ++i) options.names.push_back("thread " + std::to_string(i));
  return options;
}

// `work` on each of `size` ranks, with a group over Gloo.
void on_ranks(int size, const std::function<void(const RankGroup&)>& work) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      RankWatch watch(c10::make_intrusive<c10d::PrefixStore>("watch", store),
                      watch_options(rank, size, milliseconds(60'000)));
      const RankGroup group(make_gloo(c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank,
                                      size, milliseconds(60'000)),
                            at::kCPU, &watch);
      work(group);
      watch.leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A weight that is used twice, one that is used once, and one that is not.
struct ThreeWeights : torch::nn::Module {
  explicit ThreeWeights(at::ScalarType type = at::kFloat) {
    const auto options = at::TensorOptions().dtype(type);
    twice = register_parameter("twice", at::arange(12, options).view({3, 4}) / 7);
    once = register_parameter("once", at::arange(5, options) / 3);
    never = register_parameter("never", at::ones({2}, options));
  }
  at::Tensor loss(double x) const {
    return (twice * twice * x).sum() * x + (once * x).pow(2).sum() + twice.select(0, 1).sum();
  }
  at::Tensor twice, once, never;
};

at::Tensor all_gradients(const ThreeWeights& model) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : model.parameters()) flat.push_back(parameter.grad().flatten());
  return at::cat(flat).clone();
}

TEST(GradientExchange, IsTheWeightedMeanOverRanks) {
  const std::vector<double> weights = {3, 0, 5};
  ThreeWeights single(at::kDouble);
  Optimizer alone(single, {});
  for (int rank = 0; rank < 3; ++rank) {
    (single.loss(1 + rank) * (weights[static_cast<std::size_t>(rank)] / 8)).backward();
  }
  const at::Tensor expected = all_gradients(single);
  const double expected_loss =
      (single.loss(1).item<double>() * 3 + single.loss(3).item<double>() * 5) / 8;
  for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{64}, std::int64_t{4096}}) {
    std::vector<at::Tensor> found(3);
    std::vector<double> losses(3), stops(3);
    std::atomic<std::int64_t> buckets = 0;
    on_ranks(3, [&](const RankGroup& group) {
      const auto rank = static_cast<std::size_t>(group.rank());
      ThreeWeights model(at::kDouble);
      Optimizer optimizer(model, {});
      GradientExchange exchange(group, optimizer.parameters(), bucket_bytes);
      buckets = exchange.buckets();
      for (int step = 0; step < 3; ++step) {  // the same memory at every step
        optimizer.zero_gradients();
        const at::Tensor loss = model.loss(1 + group.rank()) * weights[rank];
        const bool stop = step == 2 && rank == 1;
        if (weights[rank] == 0) {  // a rank without a row
          exchange.begin(at::zeros({}, at::kDouble), 0, stop);
        } else {
          // In two parts, of which the second is sent.
          (loss * 0.25).backward();
          exchange.begin(loss.detach(), weights[rank], stop);
          (model.loss(1 + group.rank()) * weights[rank] * 0.75).backward();
        }
        const auto totals = exchange.finish();
        losses[rank] = totals.loss.item<double>();
        stops[rank] = totals.stop.item<double>();
      }
      found[rank] = all_gradients(model);
    });
    EXPECT_EQ(buckets, bucket_bytes == 1 ? 3 : bucket_bytes == 64 ? 2 : 1);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(at::allclose(found[rank], expected, 1e-12, 1e-14)) << bucket_bytes;
      EXPECT_TRUE(found[rank].equal(found[0])) << "all ranks have the same bits";
      EXPECT_NEAR(losses[rank], expected_loss, 1e-12);
      EXPECT_EQ(stops[rank], 1);
    }
  }
}

TEST(GradientExchange, PassesAfterItsEndSendNothing) {
  on_ranks(1, [](const RankGroup& group) {
    ThreeWeights model;
    Optimizer optimizer(model, {});
    {
      GradientExchange exchange(group, optimizer.parameters());
      model.loss(2).backward();  // not begun
      const at::Tensor before = all_gradients(model);
      optimizer.zero_gradients();
      exchange.begin(at::zeros({}), 1, false);
      model.loss(2).backward();
      exchange.finish();
      EXPECT_TRUE(all_gradients(model).equal(before));
    }
    model.loss(2).backward();
  });
}

TEST(RankShare, EveryRowOnce) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    std::int64_t next = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const BatchShare share = rank_share(8, 2, rank, ranks);
      EXPECT_EQ(share.first, next);
      EXPECT_GE(share.rows, 8 / ranks);
      EXPECT_LE(share.rows, 8 / ranks + 1);
      next += share.rows;
    }
    EXPECT_EQ(next, 8);
  }
}

TEST(RankState, IsThatOfTheFirst) {
  on_ranks(2, [](const RankGroup& group) {
    RunState state;
    state.seed = 7;
    if (group.first()) {
      state = {.step = 12,
               .seed = 7,
               .best = 0.25,
               .best_step = 8,
               .stale = 1,
               .evaluated_step = 12,
               .loss_sum = 1.5,
               .loss_count = 2,
               .seconds = 3};
    }
    EXPECT_TRUE(share_state(group, state, group.first()));
    EXPECT_EQ(state.step, 12);
    EXPECT_EQ(state.best, 0.25);
    EXPECT_EQ(state.best_step, 8);
    EXPECT_EQ(state.stale, 1);
    EXPECT_EQ(state.evaluated_step, 12);
    EXPECT_EQ(state.loss_sum, 1.5);
    EXPECT_EQ(state.loss_count, 2);
    const at::Tensor own = at::full({3}, group.rank(), at::kFloat);
    if (!group.first()) {
      lln::test::expect_error(
          [&] {
            expect_same(group, {{"w", own}}, "the weights");
          },
          {"the weights of rank 1 are not those of rank 0"}, lln::ErrorCode::invalid_argument);
    } else {
      expect_same(group, {{"w", own}}, "the weights");
    }
    share_tensors(group, {{"w", own}});
    EXPECT_TRUE(own.equal(at::zeros({3})));
    expect_same(group, {{"w", own}}, "the weights");
  });
}

TEST(RankState, RandomNumbersDifferByRankAndStep) {
  const auto drawn = [](std::int64_t step, int rank) {
    seed_step(3, step, rank);
    return at::rand({4});
  };
  EXPECT_TRUE(drawn(5, 1).equal(drawn(5, 1)));
  EXPECT_FALSE(drawn(5, 1).equal(drawn(5, 0)));
  EXPECT_FALSE(drawn(5, 1).equal(drawn(6, 1)));
}

// ---- the watch ---------------------------------------------------------------------------------

// Waits for what the watch says, some seconds at most.
std::string fault_of(const RankWatch& watch) {
  for (int i = 0; i < 1000; ++i) {
    if (const auto fault = watch.fault()) return *fault;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return "none";
}

TEST(RankWatch, NamesARankThatIsSilent) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> ended = 0;
  RankWatchOptions options = watch_options(0, 3, milliseconds(800));
  options.lost = [&](const std::string& text) {
    EXPECT_THAT(text, HasSubstr("rank 2"));
    ++ended;
  };
  RankWatch first(store, options);
  RankWatch second(store, watch_options(1, 3, milliseconds(800)));
  store->set("sign/2", "1 1 0");  // and never again
  EXPECT_THAT(fault_of(first), HasSubstr("rank 2 (thread 2) is lost: no sign of life for"));
  EXPECT_EQ(fault_of(second), fault_of(first));
  // Nobody looks after it here, so the watch ends the process.
  for (int i = 0; i < 1000 && ended == 0; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(ended, 1);
}

TEST(RankWatch, NamesARankThatOthersWaitFor) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(2000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(2000)));
  first.set_waiting(true);
  // Work is no reason, however long it takes.
  for (int i = 0; i < 25; ++i) {
    second.work_done();
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_EQ(first.fault(), std::nullopt);
  EXPECT_THAT(fault_of(first), HasSubstr("rank 1 (thread 1) lives, but others have waited"));
  EXPECT_EQ(fault_of(second), fault_of(first));
}

TEST(RankWatch, RanksThatAllWorkAreLeftAlone) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(2000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(2000)));
  std::this_thread::sleep_for(milliseconds(3000));  // at one long step, both
  EXPECT_EQ(first.fault(), std::nullopt);
  EXPECT_EQ(second.fault(), std::nullopt);
}

TEST(RankWatch, ARankThatLeftIsNotMissed) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(2000)));
  {
    RankWatch second(store, watch_options(1, 2, milliseconds(2000)));
    second.leave();
  }
  std::this_thread::sleep_for(milliseconds(3000));
  EXPECT_EQ(first.fault(), std::nullopt);
  first.leave();
}

TEST(RankWatch, TellsWhyARankEnded) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(5000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(5000)));
  second.fail("no space on the disk");
  EXPECT_EQ(first.find_fault("connection closed"), "rank 1 (thread 1) ended: no space on the disk");
}

}  // namespace
}  // namespace lln_torch
