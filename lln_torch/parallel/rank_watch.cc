// Signs of life through the store. One thread talks to the store, and may hang with it; another
// only looks at the clock.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/rank_watch.h"

#include <fmt/format.h>

#include <algorithm>

namespace lln_torch {
namespace {

using std::chrono::milliseconds;

constexpr const char* kFaultKey = "fault";
constexpr const char* kLeft = "left";
constexpr milliseconds kEndInterval{10};
// How long the process may take to end by itself.
constexpr milliseconds kGrace{2000};
// How long rank 0 keeps its store for others to read why the job ends.
constexpr milliseconds kLinger{5000};

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of_bytes(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}
std::string sign_key(int rank) { return fmt::format("sign/{}", rank); }
double seconds_of(std::chrono::steady_clock::duration span) {
  return std::chrono::duration<double>(span).count();
}

}  // namespace

RankWatch::RankWatch(Store store, RankWatchOptions options)
    : store_(std::move(store)),
      options_(std::move(options)),
      interval_(std::clamp(options_.timeout / 20, milliseconds(50), milliseconds(1000))),
      peers_(static_cast<std::size_t>(options_.size)) {
  store_->set(sign_key(options_.rank), bytes_of("0 0 0"));
  for (Peer& peer : peers_) peer.sign_time = peer.work_time = Clock::now();
  beating_ = std::thread([this] { beat(); });
  guarding_ = std::thread([this] { guard(); });
}

RankWatch::~RankWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  beating_.join();
  guarding_.join();
}

void RankWatch::set_waiting(bool waiting) noexcept {
  waiting_ = waiting;
  ++work_;
}

std::string RankWatch::name(int rank) const {
  return fmt::format("rank {} ({})", rank, options_.names[static_cast<std::size_t>(rank)]);
}

std::optional<std::string> RankWatch::fault() const {
  const std::lock_guard lock(mutex_);
  return fault_;
}

void RankWatch::set_fault(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (fault_) return;
    fault_ = text;
    fault_time_ = Clock::now();
  }
  changed_.notify_all();
}

void RankWatch::beat() {
  std::unique_lock lock(mutex_);
  for (std::int64_t count = 1; !stopping_; ++count) {
    lock.unlock();
    try {
      round(count);
    } catch (const std::exception& e) {
      const std::string who = options_.first_has_store
                                  ? name(0) + " is gone, and the store that it had with it: "
                                  : std::string("the store that all ranks share is gone: ");
      set_fault(who + text_of(e));
      lock.lock();
      store_gone_ = true;
      changed_.notify_all();
      return;
    }
    lock.lock();
    round_time_ = Clock::now();
    changed_.notify_all();
    // Who ends has nothing else to do than to see the others end.
    changed_.wait_for(lock, own_end_ ? kEndInterval : interval_,
                      [&] { return stopping_ || (own_end_ && !told_); });
  }
}

// Signs are "COUNT WORK WAITING", or "left".
void RankWatch::round(std::int64_t count) {
  std::optional<std::string> end;
  {
    const std::lock_guard lock(mutex_);
    end = own_end_;
  }
  if (!end && !fault()) {
    store_->set(sign_key(options_.rank),
                bytes_of(fmt::format("{} {} {}", count, work_.load(), waiting_ ? 1 : 0)));
  }
  read_peers();
  if (end && !end->empty()) store_->compareSet(kFaultKey, {}, bytes_of(*end));
  if (end) {
    store_->set(sign_key(options_.rank), bytes_of(kLeft));
    const std::lock_guard lock(mutex_);
    told_ = true;
  }
  if (store_->check({kFaultKey})) {
    set_fault(text_of_bytes(store_->get(kFaultKey)));
  } else if (const auto found = end ? std::nullopt : judge()) {
    set_fault(text_of_bytes(store_->compareSet(kFaultKey, {}, bytes_of(*found))));
  }
  // Rank 0 then knows that this one has read it.
  if (fault()) store_->set(sign_key(options_.rank), bytes_of(kLeft));
}

void RankWatch::read_peers() {
  for (int rank = 0; rank < options_.size; ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.left || !store_->check({sign_key(rank)})) continue;
    const std::string sign = text_of_bytes(store_->get(sign_key(rank)));
    const std::lock_guard lock(mutex_);  // others_left() reads them from other threads
    if (sign == kLeft) {
      peer.left = rank != options_.rank;
      continue;
    }
    if (sign == peer.sign) continue;
    peer.sign = sign;
    peer.sign_time = Clock::now();
    const std::string work = sign.substr(sign.find(' ') + 1);
    if (work == peer.work) continue;
    peer.work = work;
    peer.work_time = peer.sign_time;
    peer.waiting = work.ends_with('1');
  }
}

std::optional<std::string> RankWatch::judge() const {
  const Clock::time_point now = Clock::now();
  if (auto silent = silent_rank(now)) return silent;
  return stuck_rank(now);
}

// Once an exchange has failed, whoever is dead need not be waited for long.
std::optional<std::string> RankWatch::silent_rank(Clock::time_point now) const {
  const milliseconds soon = std::max(4 * interval_, milliseconds(1500));
  const milliseconds limit = suspicious_ ? std::min(soon, options_.timeout) : options_.timeout;
  int silent = -1;
  for (int rank = 0; rank < options_.size; ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank == options_.rank || peer.left || now - peer.sign_time < limit) continue;
    if (silent < 0 || peer.sign_time < peers_[static_cast<std::size_t>(silent)].sign_time) {
      silent = rank;
    }
  }
  if (silent < 0) return std::nullopt;
  const auto since = now - peers_[static_cast<std::size_t>(silent)].sign_time;
  return fmt::format("{} is lost: no sign of life for {:.1f} s", name(silent), seconds_of(since));
}

std::optional<std::string> RankWatch::stuck_rank(Clock::time_point now) const {
  int stuck = -1, waiting = 0;
  for (int rank = 0; rank < options_.size; ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.left || now - peer.work_time < options_.timeout) continue;
    if (peer.waiting) {
      ++waiting;
    } else {
      stuck = rank;
    }
  }
  if (waiting == 0) return std::nullopt;
  const double seconds = seconds_of(options_.timeout);
  if (stuck >= 0) {
    return fmt::format("{} lives, but others have waited {:.1f} s for it", name(stuck), seconds);
  }
  if (waiting < options_.size) return std::nullopt;
  return fmt::format("all {} ranks have waited {:.1f} s for each other: is their network broken?",
                     options_.size, seconds);
}

std::string RankWatch::find_fault(const std::string& symptom) {
  suspicious_ = true;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, options_.timeout, [&] { return fault_.has_value(); });
  if (!fault_) return "an exchange between ranks failed: " + symptom;
  noticed_ = true;
  if (options_.rank == 0 && options_.first_has_store) {
    changed_.wait_for(lock, kLinger, [&] { return others_left(); });
  }
  return *fault_;
}

void RankWatch::fail(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (!own_end_) own_end_ = fmt::format("{} ended: {}", name(options_.rank), text);
    noticed_ = true;
  }
  changed_.notify_all();
  wait_for_others(kLinger);
  // From now on the guard ends the process, should it not end by itself.
  const std::lock_guard lock(mutex_);
  fault_time_ = Clock::now();
  noticed_ = false;
}

void RankWatch::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (!own_end_) own_end_ = "";
    noticed_ = true;
  }
  changed_.notify_all();
  wait_for_others(options_.timeout);
}

bool RankWatch::others_left() const {
  return store_gone_ || std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           const bool self = &peer == &peers_[static_cast<std::size_t>(options_.rank)];
           return self || peer.left ||
                  Clock::now() - peer.sign_time > std::max(kGrace, 4 * interval_);
         });
}

void RankWatch::wait_for_others(milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return told_ || store_gone_; });
  if (options_.rank == 0 && options_.first_has_store) {
    changed_.wait_for(lock, limit, [&] { return others_left(); });
  }
}

void RankWatch::guard() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, interval_, [&] { return stopping_; });
    if (stopping_) return;
    const Clock::time_point now = Clock::now();
    if (!fault_ && !store_gone_ && now - round_time_ > options_.timeout) {
      fault_ = fmt::format("{} is lost: the store {}did not answer for {:.1f} s", name(0),
                           options_.first_has_store ? "that it has " : "",
                           seconds_of(now - round_time_));
      fault_time_ = now;
      changed_.notify_all();
    }
    if (fault_ && !noticed_ && now - fault_time_ > kGrace) {
      if (options_.rank == 0 && options_.first_has_store) {
        changed_.wait_for(lock, kLinger, [&] { return others_left() || stopping_; });
      }
      const std::string text = *fault_;
      noticed_ = true;
      lock.unlock();
      options_.lost(text);
      lock.lock();
    }
  }
}

}  // namespace lln_torch
