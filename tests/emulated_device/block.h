// A block of a CUDA kernel on the host: its threads are fibers of one thread of the host, which run
// until they wait for each other, or for what the device does beside them (copies and products that
// were begun). Some warps are far ahead of others, and what was begun is done at a random time: a
// wait that is missing gives wrong results sooner or later, and one that never ends is reported
// with what every thread waits for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "fiber.h"
#include "races.h"

namespace emulated {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

}  // namespace emulated

// As kernels name them.
extern emulated::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

inline constexpr unsigned kLanes = 32;

// A warp's 16 rows of a product of its warpgroup, and what its threads bring to them.
struct Product {
  unsigned columns = 0;
  bool a_transposed = false, b_transposed = false, accumulate = false;
  bool a_in_registers = false;
  std::uint64_t a = 0, b = 0;  // descriptors
  unsigned threads = 0;        // that have begun it
  std::uint32_t meetings = 0;  // of the warp before it
  std::array<float*, kLanes> results{};
  std::array<std::array<std::uint32_t, 4>, kLanes> words{};
};

// Lanes of a warp that do one thing together: each brings an operand, and the last one does it.
struct Warp {
  Thread* threads = nullptr;
  unsigned lanes = 0, arrived = 0;
  unsigned rests = 0;  // turns of 16 that it does not take
  std::uint64_t meetings = 0;
  const char* instruction = nullptr;
  std::array<void*, kLanes> operands{};
  // Done in the order in which they were begun, when all threads have; the four warps of a group
  // need not do them at the same time.
  std::deque<Product> products;
  std::size_t products_done = 0;
};

// What a thread has begun, in groups that it waits for by number.
class Groups {
 public:
  void begin_one() { ++under_way(open_); }
  std::function<void()> end_one() {
    return [this, group = open_] { --under_way(group); };
  }
  void commit() { ++open_; }
  // The number of the group that is not committed yet, and of the last one but `pending` that is;
  // the first is 1.
  std::uint32_t open() const { return static_cast<std::uint32_t>(open_ + 1); }
  std::uint32_t before(std::size_t pending) const {
    return static_cast<std::uint32_t>(open_ - std::min(open_, pending));
  }
  // Whether at most the last `pending` groups that were committed are under way.
  bool ended_but(std::size_t pending) const {
    for (std::size_t group = 0; group + pending < open_ && group < under_way_.size(); ++group) {
      if (under_way_[group] != 0) return false;
    }
    return true;
  }
  bool ended() const { return ended_but(0) && (under_way_.size() <= open_ || !under_way_[open_]); }

 private:
  int& under_way(std::size_t group) {
    if (under_way_.size() <= group) under_way_.resize(group + 1);
    return under_way_[group];
  }
  std::size_t open_ = 0;
  std::vector<int> under_way_;
};

struct Votes {
  bool all = true, any = false;
};
struct Meeting {
  unsigned arrived = 0, threads = 0;  // of so many; 0: of all that have not ended
  std::uint64_t number = 0;
  Votes votes, last;
  std::vector<Thread*> waiting;
  Gathering known;
};

struct Thread {
  Fiber fiber;
  unsigned index = 0;
  Warp* warp = nullptr;
  unsigned lane = 0;
  bool ended = false;
  const char* waits_for = nullptr;
  Clock clock;
  Groups copies, stores;
  std::size_t products_awaited = 0;
  std::size_t products = 0;                 // that it has begun
  std::vector<std::size_t> product_groups;  // how many there were at each commit
};

extern Thread* current;  // that runs; one kernel runs at a time

// The shared memory that a launch asked for; addresses of 32 bits are counted from here.
unsigned char* dynamic_memory();
unsigned char* dynamic_memory_end();
inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(p) - dynamic_memory());
}
inline unsigned char* at_address(std::uint32_t address) {
  return dynamic_memory() + static_cast<std::int32_t>(address);
}

// Ends the program with a message.
[[noreturn]] void fault(const std::string& what);

void leave(const char* waits_for);  // to the other threads
void moved();                       // something happened that others may be waiting for
template <class Ready>
void wait_until(const char* what, const Ready& ready) {
  while (!ready()) leave(what);
  moved();
}

// All lanes of the warp meet, and `work` is given what each of them brought.
using Operands = std::array<void*, kLanes>;
void together(const char* instruction, void* operand, void (*work)(const Operands&));
void meet_warp();

// A barrier of the block: waits for `threads` threads, 0 for all that have not ended. Says whether
// `own` holds in all of them, and in any.
Votes meet(unsigned barrier, unsigned threads, bool own = true);
void arrive(unsigned barrier, unsigned threads);

// Something that the device does beside the threads: at any time from now on at which `ready`.
struct Task {
  std::function<bool()> ready;
  std::function<void()> run;
};
void begin(Task task);

// Copies into shared memory that threads begin themselves (cp.async); zeros where not `valid`.
void begin_copy(std::uint32_t to, const void* from, std::size_t bytes, bool valid);
void commit_copies();
void wait_copies(std::size_t pending_groups);

// `overlapping`: may start before the grid before it has ended.
void run_grid(unsigned blocks, unsigned threads, std::size_t shared, bool overlapping,
              const std::function<void()>& body);

}  // namespace emulated
