// What g++ calls for every access to memory of the kernels (-fsanitize=thread), in place of the
// library that it comes with.
// SPDX-License-Identifier: Apache-2.0
#include "block.h"

namespace {

void told(const void* memory, std::size_t bytes, bool writes, const void* instruction) {
  // The host's part of a kernel's file, and what a thread keeps in registers or for itself.
  if (emulated::current == nullptr || emulated::current->fiber.has_on_stack(memory)) return;
  emulated::touch(memory, bytes, {.writes = writes, .instruction = instruction});
}

[[maybe_unused]] const bool looking = (emulated::look_for_races(), true);

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
// Of the host: whether a static variable has been made, and counts of shared pointers.
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
int __tsan_atomic32_fetch_add(volatile int* p, int x, int) {
  return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}
int __tsan_atomic32_fetch_sub(volatile int* p, int x, int) {
  return __atomic_fetch_sub(p, x, __ATOMIC_ACQ_REL);
}

#define LLN_TOLD(bytes)                                                                    \
  void __tsan_read##bytes(void* p) { told(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* p) { told(p, bytes, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##bytes(void* p) {                                             \
    told(p, bytes, false, __builtin_return_address(0));                                    \
  }                                                                                        \
  void __tsan_unaligned_write##bytes(void* p) { told(p, bytes, true, __builtin_return_address(0)); }
LLN_TOLD(1)
LLN_TOLD(2)
LLN_TOLD(4)
LLN_TOLD(8)
LLN_TOLD(16)
#undef LLN_TOLD
void __tsan_read_range(void* p, std::size_t bytes) {
  told(p, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, std::size_t bytes) {
  told(p, bytes, true, __builtin_return_address(0));
}

}  // extern "C"
