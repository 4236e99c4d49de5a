// What the watch says of ranks that are silent, stuck or ended, of a store that does not answer,
// and how ranks leave.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "thread_ranks.h"

namespace lln_torch {
namespace {

using std::chrono::milliseconds;
using test::kLong;
using test::watch_options;
using testing::HasSubstr;

// Waits for what the watch says, some seconds at most.
std::string fault_of(const RankWatch& watch) {
  for (int i = 0; i < 1000; ++i) {
    if (const auto fault = watch.fault()) return *fault;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return "none";
}

double seconds_of_call(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
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
  store->set("sign/2", "1 1 0 0");  // and never again
  EXPECT_THAT(fault_of(first), HasSubstr("rank 2 (thread 2) is lost: no sign of life for"));
  EXPECT_EQ(fault_of(second), fault_of(first));
  // Nobody looks after it here, so the watch ends the process.
  for (int i = 0; i < 1000 && ended == 0; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(ended, 1);
}

TEST(RankWatch, ARankWithoutAFirstSignIsSilentToo) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(800)));
  EXPECT_THAT(fault_of(first), HasSubstr("rank 1 (thread 1) is lost"));
}

TEST(RankWatch, TheFirstIsWatchedByAll) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch second(store, watch_options(1, 3, milliseconds(800)));
  store->set("sign/2", "1 1 0 0");  // is for rank 0 to watch
  EXPECT_THAT(fault_of(second), HasSubstr("rank 0 (thread 0) is lost"));
}

// Whoever sees an exchange fail is told of whom, long before the timeout.
TEST(RankWatch, AFailedExchangeIsSoonExplained) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  const RankWatch first(store, watch_options(0, 3, kLong));
  RankWatch second(store, watch_options(1, 3, kLong));
  store->set("sign/2", "1 1 0 0");
  std::string fault;
  EXPECT_LT(seconds_of_call([&] { fault = second.find_fault("connection closed"); }), 30);
  EXPECT_THAT(fault, HasSubstr("rank 2 (thread 2) is lost"));
  EXPECT_EQ(fault_of(first), fault);
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

TEST(RankWatch, TellsWhyARankEnded) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(5000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(5000)));
  second.fail("no space on the disk");
  EXPECT_EQ(first.find_fault("connection closed"), "rank 1 (thread 1) ended: no space on the disk");
}

// As NCCL's, which finds errors in a thread of its own.
class FailedBackend : public c10d::Backend {
 public:
  explicit FailedBackend(c10d::ErrorType error) : c10d::Backend(0, 1), error_(error) {}
  const std::string getBackendName() const override { return "failed"; }
  c10d::ErrorType getError() override { return error_; }

 private:
  c10d::ErrorType error_;
};

TEST(RankWatch, AnErrorOfABackendIsAFailedExchange) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, kLong));
  store->set("sign/1", "1 1 0 0");
  first.add_backend(c10::make_intrusive<FailedBackend>(c10d::ErrorType::COMM_ERROR));
  EXPECT_THAT(fault_of(first), HasSubstr("rank 1 (thread 1) is lost"));
}

TEST(RankWatch, AnExchangeThatABackendGaveUpIsAWait) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  const RankWatch first(store, watch_options(0, 2, milliseconds(1000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(1000)));
  second.add_backend(c10::make_intrusive<FailedBackend>(c10d::ErrorType::TIMEOUT));
  EXPECT_THAT(fault_of(second), HasSubstr("rank 0 (thread 0) lives, but others have waited"));
}

// ---- leaving -----------------------------------------------------------------------------------

TEST(RankWatch, AllLeaveOnceTheFirstDoes) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 3, milliseconds(2000)));
  RankWatch second(store, watch_options(1, 3, milliseconds(2000)));
  RankWatch third(store, watch_options(2, 3, milliseconds(2000)));
  auto second_left = std::async(std::launch::async, [&] { return second.leave(); });
  auto third_left = std::async(std::launch::async, [&] { return third.leave(); });
  for (int i = 0; i < 25; ++i) {  // it saves, in pieces, for longer than the timeout
    first.work_done();
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_EQ(second_left.wait_for(milliseconds(0)), std::future_status::timeout);
  EXPECT_EQ(third_left.wait_for(milliseconds(0)), std::future_status::timeout);
  EXPECT_EQ(first.leave(), std::nullopt);
  EXPECT_EQ(second_left.get(), std::nullopt);
  EXPECT_EQ(third_left.get(), std::nullopt);
}

TEST(RankWatch, WhoLeavesHearsThatTheFirstIsStuck) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  const RankWatch first(store, watch_options(0, 2, milliseconds(1000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(1000)));
  EXPECT_THAT(second.leave().value_or("nothing"),
              HasSubstr("rank 0 (thread 0) lives, but others have waited"));
}

TEST(RankWatch, TheFirstDoesNotWaitForTheDead) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  RankWatch first(store, watch_options(0, 2, kLong));
  EXPECT_LT(seconds_of_call([&] { EXPECT_EQ(first.leave(), std::nullopt); }), 30);
}

// ---- the store ---------------------------------------------------------------------------------

// As TCPStore whose server is stopped, from the time that it is told to be.
class HungStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    while (hung) std::this_thread::sleep_for(milliseconds(1));
    return c10d::HashStore::check(keys);
  }
  std::atomic<bool> hung = false;
};

TEST(RankWatch, AStoreThatHangsEndsTheJobAndNotItsEnd) {
  const auto store = c10::make_intrusive<HungStore>();
  std::promise<std::string> ended;
  auto told = ended.get_future();
  RankWatchOptions options = watch_options(1, 2, milliseconds(1000));
  options.lost = [&](const std::string& text) { ended.set_value(text); };
  auto watch = std::make_unique<RankWatch>(store, options);
  store->hung = true;
  ASSERT_EQ(told.wait_for(milliseconds(30'000)), std::future_status::ready);
  EXPECT_THAT(told.get(), HasSubstr("rank 0 (thread 0) is lost: the store that it has did not"));
  EXPECT_LT(seconds_of_call([&] { watch.reset(); }), 20);
  store->hung = false;
}

TEST(RankWatch, NoCallOutlastsAStoreThatHangs) {
  const auto store = c10::make_intrusive<HungStore>();
  RankWatch first(store, watch_options(0, 2, milliseconds(1000)));
  RankWatch second(store, watch_options(1, 2, milliseconds(1000)));
  store->hung = true;
  EXPECT_LT(seconds_of_call([&] { EXPECT_NE(second.leave(), std::nullopt); }), 20);
  EXPECT_LT(seconds_of_call([&] { EXPECT_EQ(first.leave(), std::nullopt); }), 20);
  EXPECT_LT(seconds_of_call([&] { first.fail("no space on the disk"); }), 20);
  store->hung = false;
}

// Counts what is asked of it.
class CountingStore : public c10d::HashStore {
 public:
  using Bytes = std::vector<std::uint8_t>;
  void set(const std::string& key, const Bytes& value) override {
    ++signs;
    c10d::HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++reads;
    return c10d::HashStore::check(keys);
  }
  Bytes get(const std::string& key) override {
    ++reads;
    return c10d::HashStore::get(key);
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    ++reads;
    return c10d::HashStore::multiGet(keys);
  }
  std::atomic<int> signs = 0, reads = 0;
};

TEST(RankWatch, RequestsOfARankDoNotGrowWithTheJob) {
  constexpr int kSize = 200;
  for (const int rank : {0, 1}) {
    const auto store = c10::make_intrusive<CountingStore>();
    for (int other = 0; other < kSize; ++other) {
      static_cast<c10d::Store&>(*store).set("sign/" + std::to_string(other), "1 1 0 0");
    }
    store->signs = 0;
    const RankWatch watch(store, watch_options(rank, kSize, milliseconds(2000)));
    while (store->signs < 6) std::this_thread::sleep_for(milliseconds(10));
    EXPECT_LE(store->reads, 4 * store->signs);
  }
}

}  // namespace
}  // namespace lln_torch
