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
constexpr unsigned kMostBlocks = 8;         // of a cluster
constexpr unsigned char kUnwritten = 0xFF;  // NaN in every type
alignas(1024) unsigned char memories[kMostBlocks][kSharedBytes + kGuardBytes];

// The threads of the cluster that runs, those of a block behind each other, and what they share.
struct Cluster {
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  std::vector<Task> tasks;
  Meeting meeting;
  std::uint64_t moves = 0;
  const std::function<void()>* body = nullptr;
} cluster;

std::minstd_rand random_bits(1);

void complete(Meeting& meeting) {
  meeting.arrived = 0;
  meeting.last = std::exchange(meeting.votes, {});
  ++meeting.number;
  moved();
}

void arrive_with(Meeting& meeting, unsigned threads, bool own) {
  meeting.votes.all = meeting.votes.all && own;
  meeting.votes.any = meeting.votes.any || own;
  if (++meeting.arrived >= threads) complete(meeting);
}

void run_thread(void*) {
  (*cluster.body)();
  if (!current->copies.ended()) fault("ends before its copies into shared memory");
  if (!current->stores.ended()) fault("ends before its copies have read shared memory");
  current->ended = true;
  // Those that wait for all wait for one less.
  Block& block = *current->block;
  --block.running;
  if (block.meetings[0].arrived > 0 && block.meetings[0].arrived == block.running) {
    complete(block.meetings[0]);
  }
  moved();
}

// Threads go on, all of them, or those of some warps: some are ahead of the others, or far behind.
void run_warps(bool all) {
  for (Block& block : cluster.blocks) {
    for (std::size_t w = 0; w < block.warps.size(); ++w) {
      if (!all && random_bits() % 16 < block.warps[w].rests) continue;
      for (std::size_t i = w * kLanes; i < w * kLanes + block.warps[w].lanes; ++i) {
        if (block.threads[i].ended) continue;
        current = &block.threads[i];
        threadIdx = {current->index, 0, 0};
        blockIdx = {block.index, 0, 0};
        current->fiber.resume();
      }
    }
  }
}

// Does what has been begun and is ready: all of it, or some.
void run_tasks(bool all) {
  for (std::size_t i = 0; i < cluster.tasks.size();) {
    if ((!all && random_bits() % 2 == 0) || (cluster.tasks[i].ready && !cluster.tasks[i].ready())) {
      ++i;
      continue;
    }
    const Task task = std::move(cluster.tasks[i]);
    cluster.tasks.erase(cluster.tasks.begin() + static_cast<std::ptrdiff_t>(i));
    task.run();
    moved();
  }
}

void report_stand_still() {
  std::map<std::string, unsigned> waits;
  for (const Thread& thread : cluster.threads) {
    if (!thread.ended) ++waits[thread.waits_for];
  }
  std::string text = "all threads wait:";
  for (const auto& [what, count] : waits) {
    text += " " + std::to_string(count) + " for " + what + ";";
  }
  fault(text);
}

void prepare(Block& block, unsigned index, Thread* threads, unsigned char* memory) {
  block = {};
  block.index = index;
  block.threads = threads;
  block.memory = memory;
  block.running = blockDim.x;
  std::memset(memory, kUnwritten, kSharedBytes + kGuardBytes);
  block.warps.resize((blockDim.x + kLanes - 1) / kLanes);
  for (unsigned i = 0; i < block.warps.size(); ++i) {
    constexpr unsigned kRests[] = {0, 8, 15};  // of 16 turns
    block.warps[i].lanes = std::min(kLanes, blockDim.x - i * kLanes);
    block.warps[i].rests = kRests[random_bits() % std::size(kRests)];
  }
  for (unsigned i = 0; i < blockDim.x; ++i) {
    Thread& thread = threads[i];
    thread.index = i;
    thread.block = &block;
    thread.warp = &block.warps[i / kLanes];
    thread.lane = i % kLanes;
    thread.ended = false;
    thread.copies = thread.stores = {};
    thread.products = 0;
    thread.product_groups.clear();
    thread.fiber.start(run_thread, nullptr);
  }
}

void check_guard(const Block& block, std::size_t shared) {
  const unsigned char* const end = block.memory + kSharedBytes + kGuardBytes;
  const unsigned char* const found =
      std::find_if(static_cast<const unsigned char*>(block.memory) + shared, end,
                   [](unsigned char byte) { return byte != kUnwritten; });
  if (found == end) return;
  fault("byte " + std::to_string(found - block.memory) +
        " of shared memory was written, the launch has " + std::to_string(shared));
}

void run_cluster(unsigned first, std::size_t shared) {
  cluster.meeting = {};
  for (unsigned i = 0; i < cluster.blocks.size(); ++i) {
    prepare(cluster.blocks[i], first + i, &cluster.threads[i * blockDim.x], memories[i]);
  }
  const auto running = [] {
    return std::any_of(cluster.blocks.begin(), cluster.blocks.end(),
                       [](const Block& block) { return block.running > 0; });
  };
  while (running()) {
    const std::uint64_t before = cluster.moves;
    run_warps(false);
    run_tasks(false);
    if (cluster.moves != before) continue;
    run_warps(true);
    run_tasks(true);
    if (cluster.moves == before) report_stand_still();
  }
  current = nullptr;
  for (const Block& block : cluster.blocks) check_guard(block, shared);
}

}  // namespace

unsigned char* dynamic_memory() { return current->block->memory; }

unsigned cluster_blocks() { return static_cast<unsigned>(cluster.blocks.size()); }

unsigned char* memory_of(unsigned rank) { return cluster.blocks.at(rank).memory; }

void fault(const std::string& what) {
  std::fprintf(stderr, "emulated device: block %u of %u", blockIdx.x, gridDim.x);
  if (current != nullptr) {
    std::fprintf(stderr, ", thread %u of %u", current->index, blockDim.x);
  }
  std::fprintf(stderr, ": %s\n", what.c_str());
  std::abort();
}

void leave(const char* waits_for) {
  current->waits_for = waits_for;
  current->fiber.leave();
}

void moved() { ++cluster.moves; }

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

Votes meet(unsigned barrier, unsigned threads, bool own) {
  Meeting& meeting = current->block->meetings.at(barrier);
  const std::uint64_t number = meeting.number;
  arrive_with(meeting, threads == 0 ? current->block->running : threads, own);
  wait_until("a barrier of the block", [&] { return meeting.number != number; });
  return meeting.last;
}

void arrive(unsigned barrier, unsigned threads) {
  arrive_with(current->block->meetings.at(barrier), threads, true);
}

void arrive_in_cluster() {
  current->cluster_meeting = cluster.meeting.number;
  arrive_with(cluster.meeting, static_cast<unsigned>(cluster.threads.size()), true);
}

void wait_in_cluster() {
  wait_until("a barrier of the cluster",
             [] { return cluster.meeting.number != current->cluster_meeting; });
}

void begin(Task task) { cluster.tasks.push_back(std::move(task)); }

void run_grid(unsigned blocks, unsigned threads, unsigned each, std::size_t shared,
              const std::function<void()>& body) {
  cluster.body = &body;
  blockDim = {threads, 1, 1};
  gridDim = {blocks, 1, 1};
  if (shared > kSharedBytes)
    fault("asks for " + std::to_string(shared) + " bytes of shared memory");
  if (each > kMostBlocks || blocks % each != 0) {
    fault("a cluster of " + std::to_string(each) + " blocks");
  }
  cluster.blocks.resize(each);
  while (cluster.threads.size() > each * threads) cluster.threads.pop_back();
  while (cluster.threads.size() < each * threads) cluster.threads.emplace_back();
  std::vector<unsigned> order(blocks / each);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random_bits);
  for (const unsigned i : order) run_cluster(i * each, shared);
}

}  // namespace emulated
