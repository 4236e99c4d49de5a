// Clocks, and who has touched what.
// SPDX-License-Identifier: Apache-2.0
#include "races.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "block.h"

extern "C" {
extern const char __executable_start, __data_start, _end;  // of the linker
}

namespace emulated {
namespace {

bool looking = false;

// Blocks are counted over all kernels; 0 is none.
std::uint32_t block_number = 0;
std::uint32_t first_block = 1, first_block_before = 1;  // of this kernel, and of the one before
bool overlaps = false;

// Actors: threads; what the lanes of a warp read together; products of warps; what they send by the
// copy engine; copies of threads; the kernel before; barriers. Those that read come first.
constexpr unsigned kMostBarriers = 64;
unsigned warps() { return (blockDim.x + kLanes - 1) / kLanes; }
unsigned actor_of_lanes(unsigned warp) { return blockDim.x + warp; }
unsigned actor_of_products(unsigned warp) { return blockDim.x + warps() + warp; }
unsigned actor_of_stores(unsigned warp) { return blockDim.x + 2 * warps() + warp; }
unsigned readers() { return blockDim.x + 3 * warps(); }
unsigned actor_of_copies(unsigned thread) { return readers() + thread; }
unsigned actor_before() { return actor_of_copies(blockDim.x); }
unsigned actor_of_barrier(std::size_t i) { return actor_before() + 1 + static_cast<unsigned>(i); }
unsigned actors() { return actor_of_barrier(kMostBarriers); }

std::string name_of(unsigned actor) {
  const auto is = [&](const char* what, unsigned first) {
    return what + std::to_string(actor - first);
  };
  if (actor < actor_of_lanes(0)) return is("thread ", 0);
  if (actor < actor_of_products(0)) return is("warp ", actor_of_lanes(0));
  if (actor < actor_of_stores(0)) return is("a product of warp ", actor_of_products(0));
  if (actor < actor_of_copies(0)) return is("a box sent by warp ", actor_of_stores(0));
  if (actor < actor_before()) return is("a copy of thread ", actor_of_copies(0));
  return "a box that was loaded";
}

Order nothing_known() {
  return {std::vector<std::uint32_t>(actors()), std::vector<std::uint32_t>(actors())};
}
void raise(std::uint32_t& x, std::uint32_t to) { x = std::max(x, to); }
void join(Order& sum, const Order& more) {
  for (std::size_t i = 0; i < sum.over.size(); ++i) {
    raise(sum.over[i], more.over[i]);
    raise(sum.shown[i], more.shown[i]);
  }
}
// No lane is behind another in what a warp does together.
std::uint32_t meetings_of(const Thread& thread) {
  return static_cast<std::uint32_t>(thread.warp->meetings);
}
// What the thread knows of itself.
void add_own(Order& sum, const Thread& thread) {
  const Clock& clock = thread.clock;
  const unsigned own_warp = thread.index / kLanes;
  raise(sum.over[thread.index], clock.now);
  raise(sum.over[actor_of_lanes(own_warp)], meetings_of(thread));
  raise(sum.over[actor_of_copies(thread.index)], clock.copies);
  raise(sum.over[actor_of_stores(own_warp)], clock.stores);
  const unsigned first = thread.index / kLanes / 4 * 4;
  for (unsigned warp = first; warp < std::min(first + 4, warps()); ++warp) {
    raise(sum.over[actor_of_products(warp)], clock.products);
    raise(sum.over[actor_of_lanes(warp)], clock.lanes[warp - first]);
  }
  if (clock.previous) sum.over[actor_before()] = 1;
}

// Two bytes of memory: who wrote them last, and who has read them since.
struct Cell {
  std::uint32_t write_block = 0, write_count = 0;
  std::uint32_t read_block = 0, read_count = 0;
  std::uint32_t other_read_block = 0;  // another block that has read it
  std::uint32_t more_readers = 0;      // of read_block: a list, counted from 1
  std::uint16_t writer = 0, reader = 0;
};
constexpr std::size_t kCellBytes = 2;

constexpr std::uintptr_t kPageBytes = 4096;
struct Page {
  std::array<Cell, kPageBytes / kCellBytes> cells;
  std::uintptr_t end = 0;  // of the memory that is shared, or the device's
};
constexpr std::size_t kMostPages = 20000;  // a gigabyte of cells; older ones are forgotten

bool is_within(std::uintptr_t address, const void* first, const void* last) {
  return address >= reinterpret_cast<std::uintptr_t>(first) &&
         address < reinterpret_cast<std::uintptr_t>(last);
}
bool is_dynamic(std::uintptr_t address) {
  return is_within(address, dynamic_memory(), dynamic_memory_end());
}
// Shared memory is that of the block: its dynamic part, or a variable of the program.
bool is_shared(std::uintptr_t address) {
  return is_dynamic(address) || is_within(address, &__data_start, &_end);
}

// On the heap, as all that the emulated device keeps: variables of the program are shared memory.
struct Memory {
  std::map<std::uintptr_t, std::uintptr_t> allocations;  // of device memory: first byte, end
  std::unordered_map<std::uintptr_t, std::unique_ptr<Page>> pages;
  std::uintptr_t last_number = 0;
  Page* last = nullptr;
  std::vector<std::vector<std::uint32_t>> more_readers;  // counts by actor
  std::size_t lists = 0;                                 // of them that this block uses
  std::map<const void*, PhaseOrder> barriers;            // of the block

  // Null where the memory is the host's.
  Page* page_of(std::uintptr_t address) {
    const std::uintptr_t number = address / kPageBytes;
    if (last == nullptr || number != last_number) {
      const auto found = pages.find(number);
      Page* const page = found == pages.end() ? make_page(address) : found->second.get();
      if (page == nullptr) return nullptr;
      last_number = number;
      last = page;
    }
    // Memory may have come back, and have another size.
    if (address >= last->end) last->end = end_of(address);
    return address < last->end ? last : nullptr;
  }
  void forget_pages() {
    pages.clear();
    last = nullptr;
  }

 private:
  std::uintptr_t end_of(std::uintptr_t address) const {
    if (is_shared(address)) return reinterpret_cast<std::uintptr_t>(&_end);
    const auto next = allocations.upper_bound(address);
    return next == allocations.begin() ? 0 : std::prev(next)->second;
  }
  Page* make_page(std::uintptr_t address) {
    const std::uintptr_t end = end_of(address);
    if (address >= end) return nullptr;
    std::unique_ptr<Page>& page = pages[address / kPageBytes];
    page = std::make_unique<Page>();
    page->end = end;
    return page.get();
  }
};
Memory& memory = *new Memory;
bool busy = false;  // templates that the emulated device uses may be those of the kernels' files

struct Place {
  Thread* thread;
  const Access* access;
  unsigned actor;
  std::uint32_t count;
  std::uintptr_t address;
  bool shared;
};

[[noreturn]] void report(const Place& place, bool other_wrote, const std::string& other) {
  std::string text = place.access->actor == Actor::thread ? "" : name_of(place.actor) + " ";
  text += place.access->writes ? "writes " : "reads ";
  if (place.shared) {
    const auto first = reinterpret_cast<std::uintptr_t>(dynamic_memory());
    text += is_dynamic(place.address)
                ? "byte " + std::to_string(place.address - first) + " of shared memory"
                : "a shared variable";
  } else {
    text += "device memory";
  }
  text += std::string(" that ") + other + " has " + (other_wrote ? "written" : "read");
  if (place.access->instruction != nullptr) {
    const auto at = reinterpret_cast<std::uintptr_t>(place.access->instruction) -
                    reinterpret_cast<std::uintptr_t>(&__executable_start);
    char digits[32];
    std::snprintf(digits, sizeof digits, "%zx", static_cast<std::size_t>(at));
    text += std::string(" (addr2line -Cfie PROGRAM 0x") + digits + ")";
  }
  current = place.thread;
  fault("race: " + text);
}

// Whether the thread knows that what `actor` did at `count` is over.
bool is_over(const Place& place, bool was_write, unsigned actor, std::uint32_t count) {
  const Thread& thread = *place.thread;
  const Clock& clock = thread.clock;
  const bool by_engine = place.access->actor == Actor::store ||
                         place.access->actor == Actor::product || place.access->actor == Actor::box;
  if (by_engine && was_write) return count <= clock.known->shown[actor];
  const unsigned own_warp = thread.index / kLanes;
  if (actor == thread.index || actor == actor_of_lanes(own_warp)) return true;
  if (actor == actor_of_copies(thread.index) && count <= clock.copies) return true;
  if (actor == actor_of_stores(own_warp) && count <= clock.stores) return true;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned warp = own_warp / 4 * 4 + i;
    if (warp >= warps()) break;
    if (actor == actor_of_products(warp) && count <= clock.products) return true;
    if (actor == actor_of_lanes(warp) && count <= clock.lanes[i]) return true;
  }
  return count <= clock.known->over[actor];
}

void check(const Place& place, bool was_write, std::uint32_t block, unsigned actor,
           std::uint32_t count) {
  if (block == block_number) {
    if (!is_over(place, was_write, actor, count)) report(place, was_write, name_of(actor));
    return;
  }
  if (place.shared || block == 0) return;
  if (block >= first_block) {
    report(place, was_write, "block " + std::to_string(block - first_block) + " of those before");
  }
  const Clock& clock = place.thread->clock;
  if (overlaps && block >= first_block_before && !clock.previous &&
      clock.known->over[actor_before()] == 0) {
    report(place, was_write, "the kernel before, which may be under way,");
  }
}

void check_readers(const Place& place, const Cell& cell) {
  check(place, false, cell.read_block, cell.reader, cell.read_count);
  if (cell.other_read_block != block_number) {
    check(place, false, cell.other_read_block, 0, 0);
  }
  if (cell.more_readers == 0 || cell.read_block != block_number) return;
  const std::vector<std::uint32_t>& counts = memory.more_readers[cell.more_readers - 1];
  const std::vector<std::uint32_t>& over = place.thread->clock.known->over;
  const std::uint32_t* const count = counts.data();
  const std::uint32_t* const until = over.data();
  const auto size = static_cast<unsigned>(counts.size());
  // Nearly always all are over, and without a branch eight are compared at once.
  std::uint32_t later = 0;
  for (unsigned actor = 0; actor < size; ++actor) later |= count[actor] > until[actor] ? 1U : 0U;
  for (unsigned actor = 0; later != 0 && actor < size; ++actor) {
    if (count[actor] > until[actor]) check(place, false, block_number, actor, count[actor]);
  }
}

void add_reader(const Place& place, Cell& cell) {
  if (cell.read_block != block_number) {
    if (cell.read_block != 0) cell.other_read_block = cell.read_block;
    cell.more_readers = 0;
  } else if (cell.reader != place.actor &&
             (cell.more_readers != 0 || !is_over(place, false, cell.reader, cell.read_count))) {
    if (cell.more_readers == 0) {
      if (memory.lists == memory.more_readers.size()) memory.more_readers.emplace_back();
      memory.more_readers[memory.lists].assign(readers(), 0);
      cell.more_readers = static_cast<std::uint32_t>(++memory.lists);
    }
    memory.more_readers[cell.more_readers - 1][place.actor] = place.count;
    return;
  }
  cell.read_block = block_number;
  cell.reader = static_cast<std::uint16_t>(place.actor);
  cell.read_count = place.count;
}

void touch_cell(const Place& place, Cell& cell) {
  check(place, true, cell.write_block, cell.writer, cell.write_count);
  if (!place.access->writes) return add_reader(place, cell);
  check_readers(place, cell);
  cell = {block_number, place.count, 0, 0, 0, 0, static_cast<std::uint16_t>(place.actor), 0};
}

}  // namespace

void Gathering::add(Thread& thread) {
  const Knowledge& known = thread.clock.known;
  if (sum_ == nullptr) {
    sum_ = std::make_shared<Order>(*known);
  } else {
    if (sum_.use_count() > 1) sum_ = std::make_shared<Order>(*sum_);  // some have learnt it
    if (std::find(added_.begin(), added_.end(), known) == added_.end()) join(*sum_, *known);
  }
  added_.push_back(known);
  add_own(*sum_, thread);
  ++thread.clock.now;
}

PhaseOrder& phases_of(const void* barrier) {
  const auto [found, added] = memory.barriers.try_emplace(barrier);
  if (added) {
    if (memory.barriers.size() > kMostBarriers)
      fault("has more barriers in shared memory than are known");
    found->second.actor = actor_of_barrier(memory.barriers.size() - 1);
  }
  return found->second;
}

void end_phase(PhaseOrder& order) {
  ++order.phase;
  const Knowledge arrived = order.arrived.all();
  auto ended = std::make_shared<Order>(arrived == nullptr ? nothing_known() : *arrived);
  ended->over[order.actor] = ended->shown[order.actor] = order.phase;
  order.ended = std::move(ended);
}

void learn(Thread& thread, const Knowledge& more) {
  // Lanes know the same, and learn the same.
  static Knowledge last_known, last_more, last_sum;
  if (more == nullptr || thread.clock.known == more) return;
  if (thread.clock.known != last_known || more != last_more) {
    auto sum = std::make_shared<Order>(*thread.clock.known);
    join(*sum, *more);
    last_known = thread.clock.known;
    last_more = more;
    last_sum = std::move(sum);
  }
  thread.clock.known = last_sum;
}

void meet_lanes(Warp& warp) {
  Gathering all;
  for (unsigned i = 0; i < warp.lanes; ++i) all.add(warp.threads[i]);
  for (unsigned i = 0; i < warp.lanes; ++i) warp.threads[i].clock.known = all.all();
}

void show_writes(Thread& thread) {
  auto known = std::make_shared<Order>(*thread.clock.known);
  add_own(*known, thread);
  known->shown = known->over;
  thread.clock.known = std::move(known);
  ++thread.clock.now;
}

void wait_for_previous_kernel() { current->clock.previous = true; }
void let_next_kernel_start() {
  const Clock& clock = current->clock;
  if (overlaps && !clock.previous && clock.known->over[actor_before()] == 0) {
    fault("lets the next kernel start and has not waited for the one before");
  }
}

void touch(const void* memory, std::size_t bytes, const Access& access) {
  touch_as(*current, memory, bytes, access);
}

void touch_as(Thread& thread, const void* touched, std::size_t bytes, const Access& access) {
  if (!looking || busy) return;
  Place place{&thread, &access, thread.index, access.count, 0, false};
  const unsigned warp = thread.index / kLanes;
  switch (access.actor) {
    case Actor::thread:
      place.count = thread.clock.now;
      break;
    case Actor::lanes:
      place.actor = actor_of_lanes(warp);
      place.count = meetings_of(thread);
      break;
    case Actor::product:
      place.actor = actor_of_products(warp);
      break;
    case Actor::store:
      if (thread.lane != 0) fault("sends a box and is not the first lane: not emulated");
      place.actor = actor_of_stores(warp);
      break;
    case Actor::copy:
      place.actor = actor_of_copies(thread.index);
      break;
    case Actor::box:
      place.actor = access.phases->actor;
      break;
  }
  const auto first = reinterpret_cast<std::uintptr_t>(touched), end = first + bytes;
  place.shared = is_shared(first);
  busy = true;
  for (place.address = first / kCellBytes * kCellBytes; place.address < end;) {
    Page* const page = memory.page_of(place.address);
    if (page == nullptr) break;
    const std::uintptr_t page_end = (place.address / kPageBytes + 1) * kPageBytes;
    for (; place.address < std::min(end, page_end); place.address += kCellBytes) {
      touch_cell(place, page->cells[place.address % kPageBytes / kCellBytes]);
    }
  }
  busy = false;
}

void know_device_memory(const void* allocated, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(allocated);
  memory.allocations[first] = first + bytes;
}
void forget_device_memory(const void* allocated) {
  memory.allocations.erase(reinterpret_cast<std::uintptr_t>(allocated));
}

void begin_order_of_kernel(bool overlapping) {
  first_block_before = first_block;
  first_block = block_number + 1;
  overlaps = overlapping;
  if (memory.pages.size() > kMostPages) memory.forget_pages();
}
void end_order_of_kernels() { first_block = block_number + 1; }

void begin_order_of_block(std::vector<Thread>& threads) {
  ++block_number;
  memory.barriers.clear();
  memory.lists = 0;
  const Knowledge nothing = std::make_shared<Order>(nothing_known());
  for (Thread& thread : threads) thread.clock = {nothing};
}

void look_for_races() { looking = true; }

}  // namespace emulated
