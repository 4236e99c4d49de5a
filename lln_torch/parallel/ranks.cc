// How ranks meet: through c10d's TCPStore.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/ranks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <array>
#include <thread>

#include "lln/error.h"

namespace lln_torch {
namespace {

constexpr std::chrono::milliseconds kStorePoll{5};

std::vector<std::uint8_t> stored_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string stored_text(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
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
    throw lln::Error(
        lln::ErrorCode::io,
        serve ? fmt::format("rank 0 cannot listen on {}:{}, where the ranks are to meet: {}",
                            place.host, place.port, text_of(e))
              : fmt::format("rank {} did not reach {} at {}:{} within {:.1f} s: {}", place.rank,
                            place.store_is_there ? "the store" : "rank 0", place.host, place.port,
                            std::chrono::duration<double>(timeout).count(), text_of(e)));
  }
}

std::string own_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("pid {} on {}", ::getpid(), host.data());
}

// What each rank is called; throws where one does not come in time.
std::vector<std::string> meet(const Store& store, const RankPlace& place,
                              std::chrono::milliseconds timeout) {
  const auto key = [](int rank) { return fmt::format("here/{}", rank); };
  store->set(key(place.rank), stored_bytes(own_name()));
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::vector<int> missing;
  do {
    missing.clear();
    for (int rank = 0; rank < place.size; ++rank) {
      if (!store->check({key(rank)})) missing.push_back(rank);
    }
    if (!missing.empty()) std::this_thread::sleep_for(kStorePoll);
  } while (!missing.empty() && std::chrono::steady_clock::now() < end);
  if (!missing.empty()) {
    throw lln::Error(
        lln::ErrorCode::io,
        fmt::format("of {} ranks these did not come to {}:{} within {:.1f} s: rank {}", place.size,
                    place.host, place.port, std::chrono::duration<double>(timeout).count(),
                    fmt::join(missing, ", rank ")));
  }
  std::vector<std::string> names;
  for (int rank = 0; rank < place.size; ++rank) names.push_back(stored_text(store->get(key(rank))));
  return names;
}

}  // namespace

Ranks::Ranks(const RankPlace& place, const RanksOptions& options)
    : place_(place), options_(options) {
  const bool serve = place.rank == 0 && !place.store_is_there;
  store_ = connect_store(place, serve, options.timeout);
  RankWatchOptions watch;
  watch.rank = place.rank;
  watch.size = place.size;
  watch.timeout = options.timeout;
  watch.first_has_store = !place.store_is_there;
  watch.lost = options.lost;
  try {
    watch.names = meet(store_, place, options.timeout);
    watch_ = std::make_unique<RankWatch>(connect_store(place, false, options.timeout), watch);
  } catch (const c10::Error& e) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{} at {}:{} is gone: {}",
                                 place.store_is_there ? "the store of the ranks"
                                                      : "rank 0, which has the store of the ranks,",
                                 place.host, place.port, text_of(e)));
  }
}

RankGroup Ranks::group(const std::string& name, const c10::Device& device, int size) {
  const int number = place_.rank / size, rank = place_.rank % size;
  const Store own =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("group/{}/{}", name, number), store_);
  // Those who come here first wait for the others, which may still read their data.
  gather("group/" + name, "");
  const auto make = device.is_cuda() ? make_nccl : make_gloo;
  try {
    backends_.push_back(make(own, rank, size, options_.timeout));
    return {backends_.back(), device, watch_.get()};
  } catch (const lln::Error&) {
    throw;
  } catch (const std::exception& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

std::string Ranks::wait_for(const std::string& key) {
  try {
    watch_->set_waiting(true);
    while (!store_->check({key})) {
      if (watch_->fault()) throw RankLost(watch_->find_fault(""));
      std::this_thread::sleep_for(kStorePoll);
    }
    watch_->set_waiting(false);
    return stored_text(store_->get(key));
  } catch (const c10::Error& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

void Ranks::put(const std::string& key, const std::string& text) {
  try {
    store_->set(key, stored_bytes(text));
  } catch (const c10::Error& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

std::vector<std::string> Ranks::gather(const std::string& name, const std::string& text) {
  put(fmt::format("text/{}/{}", name, place_.rank), text);
  std::vector<std::string> all;
  for (int rank = 0; rank < place_.size; ++rank) {
    all.push_back(wait_for(fmt::format("text/{}/{}", name, rank)));
  }
  return all;
}

std::string Ranks::from_first(const std::string& name, const std::string& text) {
  const std::string key = "first/" + name;
  if (first()) put(key, text);
  return first() ? text : wait_for(key);
}

}  // namespace lln_torch
