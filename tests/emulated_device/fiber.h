// A function with a stack of its own that can be left in its middle and gone on with later.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

namespace emulated {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;
  Fiber& operator=(Fiber&&) noexcept;

  // The next resume() calls body(argument) from its beginning.
  void start(void (*body)(void*), void* argument);
  void resume();  // until it leaves or its body returns
  void leave();   // from inside, back to who resumed it
  bool has_on_stack(const void* memory) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emulated
