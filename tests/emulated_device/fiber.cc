// Two ways to exchange stacks: by hand where the processor is known, by the C library elsewhere.
// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;  // touched pages alone take memory

}  // namespace

#if defined(__x86_64__)

// swapcontext() would ask the kernel for the signal mask, hundreds of times the cost of this: the
// registers that a call must keep go to the stack, whose pointer is exchanged.
extern "C" void emulated_exchange_stacks(void** leaving, void* entering);
asm(R"(
.text
.globl emulated_exchange_stacks
.hidden emulated_exchange_stacks
.type emulated_exchange_stacks, @function
emulated_exchange_stacks:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_exchange_stacks, .-emulated_exchange_stacks
)");

struct Fiber::State {
  void* stack = nullptr;
  void* inside = nullptr;
  void* outside = nullptr;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;

  static inline State* entering = nullptr;
  static void enter() {
    State& own = *entering;
    own.body(own.argument);
    own.go_out();
    std::abort();  // a fiber that ended is not resumed
  }
  void prepare() {
    auto* top = reinterpret_cast<void**>(static_cast<char*>(stack) + kStackBytes);
    *--top = nullptr;  // where enter() would return to; keeps the alignment that calls have
    *--top = reinterpret_cast<void*>(&enter);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    inside = top;
  }
  void go_in() {
    entering = this;
    emulated_exchange_stacks(&outside, inside);
  }
  void go_out() { emulated_exchange_stacks(&inside, outside); }
};

#else

struct Fiber::State {
  void* stack = nullptr;
  ucontext_t inside{}, outside{};
  void (*body)(void*) = nullptr;
  void* argument = nullptr;

  static void enter(unsigned low, unsigned high) {
    auto* const own =
        reinterpret_cast<State*>(std::uintptr_t{low} | std::uintptr_t{high} << 16 << 16);
    own->body(own->argument);
    own->go_out();
  }
  void prepare() {
    getcontext(&inside);
    inside.uc_stack.ss_sp = stack;
    inside.uc_stack.ss_size = kStackBytes;
    inside.uc_link = nullptr;
    const auto own = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&inside, reinterpret_cast<void (*)()>(&enter), 2, static_cast<unsigned>(own),
                static_cast<unsigned>(own >> 16 >> 16));
  }
  void go_in() { swapcontext(&outside, &inside); }
  void go_out() { swapcontext(&inside, &outside); }
};

#endif

Fiber::Fiber() : state_(std::make_unique<State>()) {
  state_->stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (state_->stack == MAP_FAILED) throw std::bad_alloc();
}
Fiber::~Fiber() {
  if (state_) munmap(state_->stack, kStackBytes);
}
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber& Fiber::operator=(Fiber&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

void Fiber::start(void (*body)(void*), void* argument) {
  state_->body = body;
  state_->argument = argument;
  state_->prepare();
}
void Fiber::resume() { state_->go_in(); }
void Fiber::leave() { state_->go_out(); }
bool Fiber::has_on_stack(const void* memory) const {
  const auto first = reinterpret_cast<std::uintptr_t>(state_->stack);
  return reinterpret_cast<std::uintptr_t>(memory) - first < kStackBytes;
}

}  // namespace emulated
