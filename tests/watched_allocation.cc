// Replaces the allocation functions of the test program. A file of its own, because the compiler
// must not see both sides of a replaced pair at once.
// SPDX-License-Identifier: Apache-2.0
#include "watched_allocation.h"

#include <atomic>
#include <cstdlib>
#include <new>

// A sanitizer checks that allocations and deallocations match and keeps its own functions.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LLN_OWN_ALLOCATION 0
#else
#define LLN_OWN_ALLOCATION 1
#endif

namespace {

std::atomic<std::size_t> largest{0};
std::atomic<int> left{-1};  // allocations before the one that fails; -1: none does
std::atomic<bool> failed{false};

}  // namespace

namespace lln::test {

void largest_allocation_reset() { largest = 0; }
std::size_t largest_allocation() { return largest.load(); }

bool allocations_can_fail() { return LLN_OWN_ALLOCATION != 0; }

void fail_allocation_after(int passed) {
  failed = false;
  left = passed;
}

bool stop_failing() {
  left = -1;
  return failed;
}

}  // namespace lln::test

#if LLN_OWN_ALLOCATION
static void watch(std::size_t size) {
  std::size_t seen = largest.load();
  while (seen < size && !largest.compare_exchange_weak(seen, size)) {
  }
  if (left < 0 || left-- > 0) return;
  failed = true;
  throw std::bad_alloc();
}

void* operator new(std::size_t size) {
  watch(size);
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  watch(size);
  const auto a = static_cast<std::size_t>(alignment);
  if (void* p = std::aligned_alloc(a, (size + a - 1) / a * a)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
#endif
