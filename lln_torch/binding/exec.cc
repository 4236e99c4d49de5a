// torch's threads behind the core's interface for them, and torch's current stream.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/exec.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "lln/error.h"

// Of libtorch_cuda, which a torch without CUDA has not: asked for tensors of a device alone.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    std::int32_t device_index, void** stream);

namespace lln_torch::binding {
namespace {

// Below this many numbers waking a second thread takes longer than it saves.
constexpr std::int64_t kSmallCall = 1 << 15;

// torch.set_num_threads() holds for these calls too, and no thread is started beside torch's.
class TorchThreads final : public lln::Parallel {
 public:
  int workers() const noexcept override {
    std::uint32_t threads = 1;
    if (torch_get_num_threads(&threads) != TORCH_SUCCESS) return 1;
    return static_cast<int>(std::max<std::uint32_t>(threads, 1));
  }

  // Tasks are handed out one by one: they differ in length, as sequences and blocks do. Inside a
  // parallel region of torch all turns fall to the calling thread, one after another.
  void run(std::int64_t tasks, Task task, void* context) override {
    struct Turns {
      std::atomic<std::int64_t> next{0};
      std::int64_t tasks;
      Task task;
      void* context;
    } turns{.tasks = tasks, .task = task, .context = context};
    const auto turn = [](std::int64_t begin, std::int64_t end, void* data) {
      auto& all = *static_cast<Turns*>(data);
      for (std::int64_t worker = begin; worker < end; ++worker) {
        for (std::int64_t t = all.next++; t < all.tasks; t = all.next++) {
          all.task(all.context, t, static_cast<int>(worker));
        }
      }
    };
    const std::int64_t turns_wanted = std::min<std::int64_t>(workers(), tasks);
    if (torch_parallel_for(0, turns_wanted, 1, turn, &turns) != TORCH_SUCCESS) {
      turn(0, 1, &turns);
    }
  }
};

}  // namespace

lln::Exec exec_for(const Tensor& x, std::int64_t elements) {
  static TorchThreads threads;
  lln::Exec exec;
  if (!x.is_cpu()) {
    if (aoti_torch_get_current_cuda_stream == nullptr) {
      throw lln::Error(lln::ErrorCode::unsupported,
                       "a tensor is on a CUDA device, and this torch has no CUDA: its current "
                       "stream is not known");
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &exec.stream));
  } else if (elements >= kSmallCall && threads.workers() > 1) {
    exec.parallel = &threads;
  }
  return exec;
}

void Workspace::allocate(const Tensor& x, lln::Exec& exec, std::size_t bytes) {
  if (bytes == 0) return;
  memory_ = new_tensor(x, std::array{static_cast<std::int64_t>(bytes)}, ScalarType::Byte);
  exec.workspace = {static_cast<std::byte*>(memory_->data_ptr()), bytes};
}

}  // namespace lln_torch::binding
