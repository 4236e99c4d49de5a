// Which threads run next, what they wait for, and when it comes.
// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <utility>

emulated::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

Thread* current = nullptr;

namespace {

// What a block may have of a device of compute capability 9.0, and a guard behind it.
constexpr std::size_t kSharedBytes = 227 * 1024, kGuardBytes = 5 * 1024;
constexpr unsigned char kUnwritten = 0xFF;  // NaN in every type
alignas(1024) unsigned char memory[kSharedBytes + kGuardBytes];

// The block that runs.
struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::array<Meeting, 16> meetings;  // at its barriers
  std::vector<Task> tasks;
  std::uint64_t moves = 0;
  unsigned running = 0;
  const std::function<void()>* body = nullptr;
};
Block& block = *new Block;  // on the heap: variables of the program are shared memory (races.cc)

// Another schedule for a test that is to be tried under several.
unsigned seed() {
  static const unsigned given = [] {
    const char* const text = std::getenv("EMULATED_DEVICE_SEED");
    return text == nullptr ? 1U : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  }();
  return given;
}
std::minstd_rand random_bits(seed());

void complete(Meeting& meeting) {
  meeting.arrived = 0;
  meeting.last = std::exchange(meeting.votes, {});
  ++meeting.number;
  const Knowledge known = std::exchange(meeting.known, {}).all();
  for (Thread* const thread : meeting.waiting) thread->clock.known = known;
  meeting.waiting.clear();
  moved();
}

void arrive_with(unsigned barrier, unsigned threads, bool own) {
  Meeting& meeting = block.meetings.at(barrier);
  if (meeting.arrived > 0 && meeting.threads != threads) {
    fault("is at a barrier for " + std::to_string(threads) + " threads, where others wait for " +
          std::to_string(meeting.threads));
  }
  meeting.threads = threads;
  meeting.votes.all = meeting.votes.all && own;
  meeting.votes.any = meeting.votes.any || own;
  meeting.known.add(*current);
  if (++meeting.arrived >= (threads == 0 ? block.running : threads)) complete(meeting);
}

void run_thread(void*) {
  (*block.body)();
  if (!current->copies.ended()) fault("ends before its copies into shared memory");
  if (!current->stores.ended()) fault("ends before its copies have read shared memory");
  if (current->products > current->products_awaited) fault("ends before its products");
  current->ended = true;
  // Those that wait for all wait for one less.
  --block.running;
  Meeting& all = block.meetings[0];
  if (all.arrived > 0 && all.threads == 0 && all.arrived == block.running) complete(all);
  moved();
}

// Threads go on, all of them, or those of some warps: some are ahead of the others, or far behind,
// and the lanes of a warp run in either direction.
void run_warps(bool all) {
  for (std::size_t w = 0; w < block.warps.size(); ++w) {
    const Warp& warp = block.warps[w];
    if (!all && random_bits() % 16 < warp.rests) continue;
    const bool reverse = random_bits() % 2 == 0;
    for (unsigned i = 0; i < warp.lanes; ++i) {
      Thread& thread = block.threads[w * kLanes + (reverse ? warp.lanes - 1 - i : i)];
      if (thread.ended) continue;
      current = &thread;
      threadIdx = {thread.index, 0, 0};
      thread.fiber.resume();
      current = nullptr;
    }
  }
}

// Does what has been begun and is ready: all of it, or some.
void run_tasks(bool all) {
  for (std::size_t i = 0; i < block.tasks.size();) {
    if ((!all && random_bits() % 2 == 0) || (block.tasks[i].ready && !block.tasks[i].ready())) {
      ++i;
      continue;
    }
    const Task task = std::move(block.tasks[i]);
    if (i + 1 < block.tasks.size()) block.tasks[i] = std::move(block.tasks.back());
    block.tasks.pop_back();
    task.run();
    moved();
  }
}

void report_stand_still() {
  std::map<std::string, unsigned> waits;
  for (const Thread& thread : block.threads) {
    if (!thread.ended) ++waits[thread.waits_for];
  }
  std::string text = "all threads wait:";
  for (const auto& [what, count] : waits) {
    text += " " + std::to_string(count) + " for " + what + ";";
  }
  fault(text);
}

void prepare_block() {
  std::memset(memory, kUnwritten, sizeof memory);
  block.meetings = {};
  block.running = blockDim.x;
  block.warps.assign((blockDim.x + kLanes - 1) / kLanes, {});
  for (unsigned i = 0; i < block.warps.size(); ++i) {
    constexpr unsigned kRests[] = {0, 8, 15};  // of 16 turns
    block.warps[i].threads = &block.threads[i * kLanes];
    block.warps[i].lanes = std::min(kLanes, blockDim.x - i * kLanes);
    block.warps[i].rests = kRests[random_bits() % std::size(kRests)];
  }
  for (unsigned i = 0; i < blockDim.x; ++i) {
    Thread& thread = block.threads[i];
    thread.index = i;
    thread.warp = &block.warps[i / kLanes];
    thread.lane = i % kLanes;
    thread.ended = false;
    thread.copies = thread.stores = {};
    thread.products = thread.products_awaited = 0;
    thread.product_groups.clear();
    thread.fiber.start(run_thread, nullptr);
  }
  begin_order_of_block(block.threads);
}

void check_end(std::size_t shared) {
  if (!block.tasks.empty()) fault("ends with copies or products under way");
  const unsigned char* const end = memory + sizeof memory;
  const unsigned char* const found =
      std::find_if(static_cast<const unsigned char*>(memory) + shared, end,
                   [](unsigned char byte) { return byte != kUnwritten; });
  if (found == end) return;
  fault("byte " + std::to_string(found - memory) +
        " of shared memory was written, the launch has " + std::to_string(shared));
}

void run_block(std::size_t shared) {
  prepare_block();
  while (block.running > 0) {
    const std::uint64_t before = block.moves;
    run_warps(false);
    run_tasks(false);
    if (block.moves != before) continue;
    run_warps(true);
    run_tasks(true);
    if (block.moves == before) report_stand_still();
  }
  check_end(shared);
}

}  // namespace

unsigned char* dynamic_memory() { return memory; }
unsigned char* dynamic_memory_end() { return memory + sizeof memory; }

void fault(const std::string& what) {
  std::fprintf(stderr, "emulated device: block %u of %u", blockIdx.x, gridDim.x);
  if (current != nullptr) {
    std::fprintf(stderr, ", thread %u of %u", current->index, blockDim.x);
  }
  std::fprintf(stderr, ": %s (EMULATED_DEVICE_SEED=%u)\n", what.c_str(), seed());
  std::abort();
}

void leave(const char* waits_for) {
  current->waits_for = waits_for;
  current->fiber.leave();
}

void moved() { ++block.moves; }

void together(const char* instruction, void* operand, void (*work)(const Operands&)) {
  Warp& warp = *current->warp;
  if (warp.arrived == 0) {
    warp.instruction = instruction;
  } else if (std::strcmp(warp.instruction, instruction) != 0) {
    fault(std::string("is at ") + instruction + ", other lanes of its warp at " + warp.instruction);
  }
  warp.operands[current->lane] = operand;
  const std::uint64_t meeting = warp.meetings;
  if (++warp.arrived < warp.lanes) {
    return wait_until(instruction, [&] { return warp.meetings != meeting; });
  }
  warp.arrived = 0;
  ++warp.meetings;
  work(warp.operands);
  moved();
}

void meet_warp() {
  together("bar.warp.sync", nullptr, [](const Operands&) { meet_lanes(*current->warp); });
}

Votes meet(unsigned barrier, unsigned threads, bool own) {
  Meeting& meeting = block.meetings.at(barrier);
  const std::uint64_t number = meeting.number;
  meeting.waiting.push_back(current);
  arrive_with(barrier, threads, own);
  wait_until("a barrier of the block", [&] { return meeting.number != number; });
  return meeting.last;
}

void arrive(unsigned barrier, unsigned threads) { arrive_with(barrier, threads, true); }

void begin(Task task) { block.tasks.push_back(std::move(task)); }

void begin_copy(std::uint32_t to, const void* from, std::size_t bytes, bool valid) {
  if (to % bytes != 0 || reinterpret_cast<std::uintptr_t>(from) % bytes != 0) {
    fault("copies " + std::to_string(bytes) + " bytes at addresses that are no multiple");
  }
  Groups& copies = current->copies;
  unsigned char* const at = at_address(to);
  if (valid) touch(from, bytes, {});
  touch(at, bytes, {Actor::copy, true, copies.open()});
  copies.begin_one();
  begin({{}, [=, ended = copies.end_one()] {
           if (valid) {
             std::memcpy(at, from, bytes);
           } else {
             std::memset(at, 0, bytes);
           }
           ended();
         }});
}

void commit_copies() { current->copies.commit(); }

void wait_copies(std::size_t pending_groups) {
  const Groups& copies = current->copies;
  wait_until("copies into shared memory", [&] { return copies.ended_but(pending_groups); });
  current->clock.copies = copies.before(pending_groups);
}

void run_grid(unsigned blocks, unsigned threads, std::size_t shared, bool overlapping,
              const std::function<void()>& body) {
  begin_order_of_kernel(overlapping);
  block.body = &body;
  blockDim = {threads, 1, 1};
  gridDim = {blocks, 1, 1};
  while (block.threads.size() > threads) block.threads.pop_back();
  while (block.threads.size() < threads) block.threads.emplace_back();
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random_bits);
  for (const unsigned i : order) {
    blockIdx = {i, 0, 0};
    run_block(shared);
  }
}

}  // namespace emulated
