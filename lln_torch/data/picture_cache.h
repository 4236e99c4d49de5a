// Decoded pictures that were used last, up to a number of bytes. What is in it changes how fast a
// batch comes and nothing else; calls may come from several threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lln_torch/data/jpeg.h"

namespace lln_torch {

class PictureCache {
 public:
  explicit PictureCache(std::uint64_t most_bytes) : most_bytes_(most_bytes) {}

  std::shared_ptr<const Picture> get(std::uint64_t key, const std::function<Picture()>& decode) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = entries_.find(key);
      if (found != entries_.end()) {
        used_.splice(used_.begin(), used_, found->second);
        return found->second->second;
      }
    }
    // Decoded outside the lock: two threads may decode the same picture, to the same bytes.
    auto picture = std::make_shared<const Picture>(decode());
    const std::lock_guard lock(mutex_);
    if (picture->bytes.size() > most_bytes_ || entries_.contains(key)) return picture;
    used_.emplace_front(key, picture);
    entries_[key] = used_.begin();
    bytes_ += picture->bytes.size();
    while (bytes_ > most_bytes_) {
      bytes_ -= used_.back().second->bytes.size();
      entries_.erase(used_.back().first);
      used_.pop_back();
    }
    return picture;
  }

  std::uint64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  using Used = std::list<std::pair<std::uint64_t, std::shared_ptr<const Picture>>>;

  std::uint64_t most_bytes_;
  mutable std::mutex mutex_;
  std::uint64_t bytes_ = 0;
  Used used_;  // the last used first
  std::unordered_map<std::uint64_t, Used::iterator> entries_;
};

}  // namespace lln_torch
