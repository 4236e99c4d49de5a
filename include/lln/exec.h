// How a call is carried out: on which threads, in which scratch memory, by which kernel. Nothing
// here changes a result: outputs are the same bits for every number of threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace lln {

// Runs independent tasks. Implement it to run the kernels on your own scheduler.
class Parallel {
 public:
  using Task = void (*)(void* context, std::int64_t task, int worker);  // never throws

  virtual ~Parallel() = default;
  virtual int workers() const noexcept = 0;
  // Calls task(context, t, w) once for every t in [0, tasks) and returns when all are done; w is in
  // [0, workers()) and no two calls with the same w run at the same time. Must not throw: a kernel
  // is under way, so outputs, and the memory of a decode state, may be half written.
  virtual void run(std::int64_t tasks, Task task, void* context) = 0;
};

// A fixed set of threads; the thread that calls run() is one of them.
class ThreadPool final : public Parallel {
 public:
  // 0: one per hardware thread. Throws Error where a thread cannot be started.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  int workers() const noexcept override;
  void run(std::int64_t tasks, Task task, void* context) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Exec {
  Parallel* parallel = nullptr;  // null: the calling thread alone
  // Empty: allocated and freed inside the call, on a device in the order of the stream. Memory
  // where the tensors are; on a device aligned to 256 bytes.
  std::span<std::byte> workspace = {};
  std::string_view kernel = {};  // empty: the first kernel that takes the problem
  // A CUDA stream (cudaStream_t); null: the default one. Calls on a device put their work into it
  // and return; the tensors must live until it is done. Ignored on the CPU.
  void* stream = nullptr;
};

}  // namespace lln
