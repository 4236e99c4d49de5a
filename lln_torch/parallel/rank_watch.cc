// One thread keeps the time, judges and never waits for the store: a request that is not answered
// is a fault like others.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/rank_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

namespace lln_torch {
namespace {

using std::chrono::milliseconds;

constexpr const char* kLeft = "left";
// Between signs of a rank that ends, and of one that looks for whom an exchange failed.
constexpr milliseconds kEndInterval{10};
constexpr milliseconds kSuspiciousInterval{100};
// How often a request is looked after.
constexpr milliseconds kTick{10};
// How long the process may take to end by itself.
constexpr milliseconds kGrace{2000};
// How long rank 0 keeps its store for others to read why the job ends.
constexpr milliseconds kLinger{5000};

double seconds_of(std::chrono::steady_clock::duration span) {
  return std::chrono::duration<double>(span).count();
}

}  // namespace

RankWatch::RankWatch(Store store, RankWatchOptions options)
    : store_(std::move(store)),
      options_(std::move(options)),
      interval_(std::clamp(options_.timeout / 20, milliseconds(50), milliseconds(1000))),
      peers_(static_cast<std::size_t>(options_.size)),
      thread_([this] { watch(); }) {}

RankWatch::~RankWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (answer_.valid()) answer_.wait_for(kGrace);  // then it is left behind
}

void RankWatch::set_waiting(bool waiting) noexcept {
  waiting_ = waiting;
  ++work_;
}

void RankWatch::add_backend(const Backend& backend) {
  const std::lock_guard lock(mutex_);
  backends_.push_back(backend);
}

void RankWatch::forget_backends() {
  const std::lock_guard lock(mutex_);
  backends_.clear();
}

std::string RankWatch::name(int rank) const {
  return fmt::format("rank {} ({})", rank, options_.names[static_cast<std::size_t>(rank)]);
}

std::optional<std::string> RankWatch::fault() const {
  const std::lock_guard lock(mutex_);
  return fault_;
}

// ---- the thread, which has the mutex -----------------------------------------------------------

void RankWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    advance_clock();
    look_at_backends();
    take_answer();
    if (!answer_.valid() && !store_gone_ && Clock::now() >= next_request_) ask();
    changed_.notify_all();
    if (has_to_end()) {
      noticed_ = true;
      const std::string text = *fault_;
      lock.unlock();
      options_.lost(text);
      lock.lock();
    }
    if (answer_.valid()) {
      lock.unlock();
      answer_.wait_for(kTick);
      lock.lock();
    } else {
      changed_.wait_until(lock, store_gone_ ? Clock::now() + interval_ : next_request_);
    }
  }
}

// After a pause that this thread did not choose the process was suspended, as the others may have
// been: it does not tell who lives.
void RankWatch::advance_clock() {
  const Clock::time_point now = Clock::now();
  awake_ += std::min<Clock::duration>(now - tick_, 4 * interval_);
  tick_ = now;
}

void RankWatch::look_at_backends() {
  for (const Backend& backend : backends_) {
    const c10d::ErrorType error = backend->getError();
    if (error == c10d::ErrorType::SUCCESS) continue;
    suspicious_ = true;
    if (error == c10d::ErrorType::TIMEOUT) overdue_ = true;
  }
}

// Signs are "COUNT WORK WAITING SUSPICIOUS", or "left".
void RankWatch::ask() {
  SignRequest request;
  request.rank = options_.rank;
  // Of a fault, too: rank 0 then knows that this rank has read it.
  asked_as_left_ = own_end_ || fault_;
  request.sign = asked_as_left_ ? kLeft
                                : fmt::format("{} {} {:d} {:d}", ++count_, work_.load(),
                                              waiting_ || overdue_, suspicious_);
  request.fault = own_end_ && !own_end_->empty() ? *own_end_ : suspect_.value_or("");
  asked_.clear();
  for (int rank = 0; rank < options_.size; ++rank) {
    const bool watched = options_.rank == 0 ? rank > 0 : rank == 0;
    if (watched && !peers_[static_cast<std::size_t>(rank)].left) asked_.push_back(rank);
  }
  request.asked = asked_;
  asked_time_ = awake_;
  if (!asked_as_left_) hear(peers_[static_cast<std::size_t>(options_.rank)], request.sign);
  answer_ = exchange_signs(store_, std::move(request));
}

void RankWatch::take_answer() {
  if (!answer_.valid()) return;
  if (answer_.wait_for(milliseconds(0)) != std::future_status::ready) {
    if (awake_ - asked_time_ > options_.timeout) {
      lose_store(fmt::format("{} did not answer for {:.1f} s",
                             options_.first_has_store ? name(0) + " is lost: the store that it has"
                                                      : "the store that all ranks share",
                             seconds_of(awake_ - asked_time_)));
    }
    return;
  }
  try {
    read(answer_.get());
  } catch (const std::exception& e) {
    lose_store((options_.first_has_store ? name(0) + " is gone, and the store that it had with it: "
                                         : "the store that all ranks share is gone: ") +
               text_of(e));
  }
}

void RankWatch::read(const SignAnswer& answer) {
  for (std::size_t i = 0; i < asked_.size(); ++i) {
    hear(peers_[static_cast<std::size_t>(asked_[i])], answer.signs[i]);
  }
  told_ = told_ || asked_as_left_;
  next_request_ = Clock::now() + pace();
  if (!answer.fault.empty()) {
    set_fault(answer.fault);
  } else if (!own_end_ && !fault_) {
    suspect_ = judge();
    if (suspect_) next_request_ = {};
  }
}

void RankWatch::hear(Peer& peer, const std::string& sign) {
  if (sign == kLeft) peer.left = true;
  if (sign.empty() || sign == kLeft) return;
  std::int64_t count = -1, work = -1;
  std::istringstream(sign) >> count >> work >> peer.waiting >> peer.suspicious;
  if (count != peer.count) peer.heard = awake_;
  if (work != peer.work) peer.worked = awake_;
  peer.count = count;
  peer.work = work;
}

std::optional<std::string> RankWatch::judge() const {
  if (auto silent = silent_rank()) return silent;
  // Rank 0 alone knows who works and who waits.
  return options_.rank == 0 ? stuck_rank() : std::nullopt;
}

// Once an exchange has failed, whoever is dead need not be waited for long.
std::optional<std::string> RankWatch::silent_rank() const {
  const bool suspicious =
      suspicious_ ||
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.suspicious; });
  const milliseconds soon = std::max(4 * interval_, milliseconds(1500));
  const milliseconds limit = suspicious ? std::min(soon, options_.timeout) : options_.timeout;
  std::optional<int> silent;
  const auto heard = [&](int rank) { return peers_[static_cast<std::size_t>(rank)].heard; };
  for (const int rank : asked_) {
    if (peers_[static_cast<std::size_t>(rank)].left || awake_ - heard(rank) < limit) continue;
    if (!silent || heard(rank) < heard(*silent)) silent = rank;
  }
  if (!silent) return std::nullopt;
  return fmt::format("{} is lost: no sign of life for {:.1f} s", name(*silent),
                     seconds_of(awake_ - heard(*silent)));
}

std::optional<std::string> RankWatch::stuck_rank() const {
  int stuck = -1, waiting = 0;
  for (int rank = 0; rank < options_.size; ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.left || awake_ - peer.worked < options_.timeout) continue;
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

void RankWatch::set_fault(const std::string& text) {
  if (fault_) return;
  fault_ = text;
  fault_time_ = awake_;
  next_request_ = {};
}

void RankWatch::lose_store(const std::string& why) {
  answer_ = {};
  store_gone_ = true;
  set_fault(why);
}

milliseconds RankWatch::pace() const {
  // Who ends has nothing else to do than to see the others end.
  if (own_end_ || fault_ || leaving_) return kEndInterval;
  return suspicious_ ? std::min(interval_, kSuspiciousInterval) : interval_;
}

bool RankWatch::has_to_end() const {
  if (!fault_ || noticed_ || awake_ - fault_time_ < kGrace) return false;
  return !keeps_store() || others_left(kGrace) || awake_ - fault_time_ > kGrace + kLinger;
}

bool RankWatch::others_left(milliseconds silence) const {
  const milliseconds limit = std::max(silence, 4 * interval_);
  return store_gone_ || std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
           const bool self = &peer == &peers_[static_cast<std::size_t>(options_.rank)];
           return self || peer.left || awake_ - peer.heard > limit;
         });
}

// ---- calls of other threads --------------------------------------------------------------------

void RankWatch::hurry() {
  next_request_ = {};
  changed_.notify_all();
}

template <typename Done>
void RankWatch::wait(std::unique_lock<std::mutex>& lock, Clock::duration limit, Done done) {
  const Clock::duration end = awake_ + limit;
  changed_.wait(lock, [&] { return done() || awake_ > end; });
}

std::string RankWatch::find_fault(const std::string& symptom) {
  std::unique_lock lock(mutex_);
  suspicious_ = true;
  hurry();
  wait(lock, options_.timeout + kGrace, [&] { return fault_.has_value(); });
  noticed_ = true;
  if (!fault_) return "an exchange between ranks failed: " + symptom;
  if (keeps_store()) wait(lock, kLinger, [&] { return others_left(kGrace); });
  return *fault_;
}

void RankWatch::fail(const std::string& text) {
  std::unique_lock lock(mutex_);
  if (!own_end_) own_end_ = fmt::format("{} ended: {}", name(options_.rank), text);
  noticed_ = true;
  hurry();
  wait(lock, kLinger, [&] { return told_ || store_gone_; });
  if (keeps_store()) wait(lock, kLinger, [&] { return others_left(kGrace); });
  // From now on the watch ends the process, should it not end by itself.
  set_fault(*own_end_);
  fault_time_ = awake_;
  noticed_ = false;
}

std::optional<std::string> RankWatch::leave() {
  std::unique_lock lock(mutex_);
  noticed_ = leaving_ = true;
  if (options_.rank != 0) {
    set_waiting(true);
    hurry();
    // No limit of its own: where rank 0 is silent, or does nothing, that is a fault.
    changed_.wait(lock, [&] { return peers_[0].left || fault_; });
    if (fault_) return fault_;
  }
  own_end_ = "";
  hurry();
  wait(lock, options_.timeout, [&] { return told_ || store_gone_; });
  if (options_.rank == 0) wait(lock, options_.timeout, [&] { return others_left(kLinger); });
  return std::nullopt;
}

}  // namespace lln_torch
