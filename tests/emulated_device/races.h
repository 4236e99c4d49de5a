// Which accesses to memory have an order. Everything that touches memory is an actor that counts:
// a thread counts the barriers that it has been at, its copies are counted in the groups that it
// waits for, products of a warp one by one, tiles of the copy engine by the phases of the barrier
// that they complete. What a thread knows of the others is how far each of them had come; it passes
// that on at barriers. An access to a byte that another actor has touched, one of the two a write,
// is a fault unless the thread knows that it is over, whatever the schedule made of it.
//
// What threads write is seen by the engines (the copy engine and the tensor cores that read shared
// memory themselves) behind a fence alone, which is counted apart.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulated {

struct Thread;
struct Warp;

// By actor: the count up to which its accesses are over, and its writes shown to the engines.
struct Order {
  std::vector<std::uint32_t> over, shown;
};
using Knowledge = std::shared_ptr<const Order>;

// What a thread knows of itself is not in what it shares with others.
struct Clock {
  Knowledge known;
  std::uint32_t now = 1;
  std::uint32_t copies = 0, stores = 0, products = 0;  // of its own that are over
  // What the warps of its group had read together before products that are over: these had it in
  // registers.
  std::array<std::uint32_t, 4> lanes = {};
  bool previous = false;  // the kernel before this one is over
};

// What several threads leave for those who wait.
class Gathering {
 public:
  void add(Thread& thread);  // and counts on
  Knowledge all() const { return sum_; }

 private:
  std::shared_ptr<Order> sum_;
  std::vector<Knowledge> added_;
};

// Of a barrier in shared memory.
struct PhaseOrder {
  unsigned actor = 0;
  std::uint32_t phase = 0;  // that has ended last
  Gathering arrived;
  Knowledge ended;
};
PhaseOrder& phases_of(const void* barrier);
void end_phase(PhaseOrder& order);

void learn(Thread& thread, const Knowledge& more);
void meet_lanes(Warp& warp);       // those of a warp that have met
void show_writes(Thread& thread);  // the fence
void wait_for_previous_kernel();   // of the current thread
void let_next_kernel_start();

// Accesses of the current thread, by itself or by what it begins.
// `lanes`: what a warp reads by one instruction, which is over when it has been executed.
enum class Actor { thread, lanes, product, store, copy, box };
struct Access {
  Actor actor = Actor::thread;
  bool writes = false;
  std::uint32_t count = 0;             // of actors that are not the thread itself
  const PhaseOrder* phases = nullptr;  // of boxes that are loaded
  const void* instruction = nullptr;
};
void touch(const void* memory, std::size_t bytes, const Access& access);
void touch_as(Thread& thread, const void* memory, std::size_t bytes, const Access& access);

// Other memory is that of the host.
void know_device_memory(const void* memory, std::size_t bytes);
void forget_device_memory(const void* memory);

// `overlapping`: it may start before the kernel before it has ended.
void begin_order_of_kernel(bool overlapping);
void begin_order_of_block(std::vector<Thread>& threads);
// What comes next starts when all before it has ended.
void end_order_of_kernels();

// Nothing is looked at before this. By programs whose kernels tell of their accesses
// (instrumented.cc).
void look_for_races();

}  // namespace emulated
