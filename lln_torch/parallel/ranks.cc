// How ranks meet: through c10d's TCPStore. Until there is a watch, every wait has a limit here.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/ranks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "lln/error.h"

namespace lln_torch {
namespace {

// How often a key is looked for: at first, and after a while.
constexpr std::chrono::milliseconds kFirstPoll{1}, kLastPoll{100};
// What a call of the store may take over its own limit, and the least that it is given.
constexpr std::chrono::milliseconds kStoreSlack{2000}, kLeastWait{100};

lln::Error meeting_error(const std::string& text) { return {lln::ErrorCode::io, text}; }

std::string who_has_store(const RankPlace& place) {
  return fmt::format("{} at {}:{}", place.store_is_there ? "the store of the ranks" : "rank 0",
                     place.host, place.port);
}

Store connect_store(const RankPlace& place, bool serve, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(place.port);
  options.isServer = serve;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    const Store whole = c10::make_intrusive<c10d::TCPStore>(place.host, options);
    return c10::make_intrusive<c10d::PrefixStore>(place.store_prefix, whole);
  } catch (const std::exception& e) {
    if (serve) {
      throw meeting_error(
          fmt::format("rank 0 cannot listen on {}:{}, where the ranks are to meet: {}", place.host,
                      place.port, text_of(e)));
    }
    throw meeting_error(fmt::format("rank {} did not reach {} within {:.1f} s: {}", place.rank,
                                    who_has_store(place),
                                    std::chrono::duration<double>(timeout).count(), text_of(e)));
  }
}

std::string own_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("pid {} on {}", ::getpid(), host.data());
}

std::vector<std::string> keys_of_ranks(const std::string& what, int size) {
  std::vector<std::string> keys(static_cast<std::size_t>(size));
  for (std::size_t rank = 0; rank < keys.size(); ++rank) {
    keys[rank] = fmt::format("{}/{}", what, rank);
  }
  return keys;
}

// What each rank is called; throws where one does not come in time, of which `left` is left.
std::vector<std::string> meet(c10d::Store& store, const RankPlace& place,
                              std::chrono::milliseconds timeout, std::chrono::milliseconds left) {
  const std::vector<std::string> keys = keys_of_ranks("here", place.size);
  store.set(keys[static_cast<std::size_t>(place.rank)], own_name());
  try {
    store.wait(keys, std::max(left, kLeastWait));
  } catch (const c10::Error&) {
    std::vector<int> missing;
    for (int rank = 0; rank < place.size; ++rank) {
      if (!store.check({keys[static_cast<std::size_t>(rank)]})) missing.push_back(rank);
    }
    if (!missing.empty()) {
      throw meeting_error(fmt::format(
          "of {} ranks these did not come to {}:{} within {:.1f} s: rank {}", place.size,
          place.host, place.port, std::chrono::duration<double>(timeout).count(),
          fmt::join(missing, ", rank ")));
    }
  }
  return stored_texts(store, keys);
}

struct Met {
  Store store, watched;  // two connections
  std::vector<std::string> names;
};

Met meet_all(const RankPlace& place, std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  Met met;
  met.store = connect_store(place, place.rank == 0 && !place.store_is_there, timeout);
  try {
    met.names = meet(*met.store, place, timeout,
                     std::chrono::duration_cast<std::chrono::milliseconds>(
                         end - std::chrono::steady_clock::now()));
    met.watched = connect_store(place, false, timeout);
  } catch (const c10::Error& e) {
    throw meeting_error(fmt::format("{} is gone: {}", who_has_store(place), text_of(e)));
  }
  return met;
}

}  // namespace

void end_process(const std::string& lost) {
  fmt::print(stderr, "{}\n", lost);
  std::fflush(nullptr);
  std::_Exit(1);
}

Ranks::Ranks(const RankPlace& place, const RanksOptions& options)
    : place_(place), options_(options) {
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("rank {} of {}: expected one from 0 to the number of ranks - 1",
                                 place.rank, place.size));
  }
  const std::chrono::milliseconds limit = options.timeout + kStoreSlack;
  auto meeting = run_apart([place, timeout = options.timeout] { return meet_all(place, timeout); });
  if (meeting.wait_for(limit) != std::future_status::ready) {
    throw meeting_error(fmt::format("{} did not answer within {:.1f} s", who_has_store(place),
                                    std::chrono::duration<double>(limit).count()));
  }
  Met met = meeting.get();
  store_ = met.store;
  RankWatchOptions watch;
  watch.rank = place.rank;
  watch.size = place.size;
  watch.names = met.names;
  watch.timeout = options.timeout;
  watch.first_has_store = !place.store_is_there;
  watch.lost = options.lost;
  watch_ = std::make_unique<RankWatch>(met.watched, watch);
}

Ranks::~Ranks() {
  // Their last owner is this object.
  watch_->forget_backends();
  backends_.clear();
}

RankGroup Ranks::group(const std::string& name, const c10::Device& device, int size) {
  if (size < 1 || place_.size % size != 0) {
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        fmt::format("groups of {} ranks: expected a divisor of {}", size, place_.size));
  }
  const int number = place_.rank / size, rank = place_.rank % size;
  const auto add = [&](const auto& make, const char* kind) {
    const Store own = c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("group/{}/{}/{}", name, number, kind), store_);
    backends_.push_back(make(own, rank, size, options_.timeout));
    return backends_.back();
  };
  // Those who come here first wait for the others, which may still read their data.
  gather("group/" + name, "");
  try {
    const Backend host = add(make_gloo, "host");
    if (!device.is_cuda()) return {host, device, watch_.get()};
    const Backend backend = add(make_nccl, "device");
    watch_->add_backend(backend);
    return {backend, device, watch_.get(), host};
  } catch (const lln::Error&) {
    throw;
  } catch (const std::exception& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

void Ranks::wait_for(const std::string& key) {
  watch_->set_waiting(true);
  for (auto pause = kFirstPoll; !store_->check({key}); pause = std::min(2 * pause, kLastPoll)) {
    if (watch_->fault()) throw RankLost(watch_->find_fault(""));
    std::this_thread::sleep_for(pause);
  }
  watch_->set_waiting(false);
}

std::vector<std::string> Ranks::gather(const std::string& name, const std::string& text) {
  const std::string all_there = "text/" + name;
  const std::vector<std::string> keys = keys_of_ranks(all_there, place_.size);
  try {
    store_->set(keys[static_cast<std::size_t>(place_.rank)], text);
    // One looks for all, and all others for one.
    if (first()) {
      for (const std::string& key : keys) wait_for(key);
      store_->set(all_there, "");
    } else {
      wait_for(all_there);
    }
    return stored_texts(*store_, keys);
  } catch (const c10::Error& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

std::string Ranks::from_first(const std::string& name, const std::string& text) {
  const std::string key = "first/" + name;
  try {
    if (first()) {
      store_->set(key, text);
      return text;
    }
    wait_for(key);
    return store_->get_to_str(key);
  } catch (const c10::Error& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

std::optional<std::string> Ranks::leave() {
  watch_->set_waiting(true);
  try {
    for (const Backend& backend : backends_) backend->shutdown();
  } catch (const std::exception& e) {
    return watch_->find_fault(text_of(e));
  }
  return watch_->leave();
}

}  // namespace lln_torch
