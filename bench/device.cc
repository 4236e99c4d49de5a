// The order of samples on a device: copies, a batch of calls, copies, a batch of calls, ...,
// copies. Each batch is held against the copies around it. A batch is enqueued behind a kernel that
// waits, so that the host is always ahead and no sample contains its time.
// SPDX-License-Identifier: Apache-2.0
#include "bench/device.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "bench/device_tensors.h"
#include "bench/percentile.h"
#include "bench/problem_data.h"

namespace lln::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kBatchSeconds = 0.02;   // calls between two copies
constexpr std::int64_t kLeastCalls = 5;  // of a batch
constexpr std::int64_t kMostCalls = 200;
constexpr double kHostSeconds = 40e-6;  // more than the host needs to enqueue a call
constexpr int kLeastBatches = 3;
constexpr std::size_t kCacheFactor = 4;  // all sets of data together, over the last cache
constexpr std::size_t kMostSets = 256;
constexpr std::int64_t kGraphCalls = 64;  // at least, in a graph
constexpr std::size_t kCopyBytes = std::size_t{1} << 30;
constexpr int kCopies = 4;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Marks on a stream, and the seconds between neighbours once all are passed.
class Marks {
 public:
  explicit Marks(cudaStream_t stream) : stream_(stream) {}
  ~Marks() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  void restart() { used_ = 0; }
  void mark() {
    if (used_ == events_.size()) {
      cudaEvent_t event = nullptr;
      check_cuda(cudaEventCreate(&event), "cudaEventCreate");
      events_.push_back(event);
    }
    check_cuda(cudaEventRecord(events_[used_++], stream_), "cudaEventRecord");
  }
  std::vector<double> intervals() const {
    check_cuda(cudaEventSynchronize(events_[used_ - 1]), "cudaEventSynchronize");
    std::vector<double> seconds;
    for (std::size_t i = 1; i < used_; ++i) {
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]),
                 "cudaEventElapsedTime");
      seconds.push_back(1e-3 * milliseconds);
    }
    return seconds;
  }

 private:
  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  std::size_t used_ = 0;
};

// Bytes read and written per second by copies inside the device.
class Copies {
 public:
  Copies(DeviceTensors& memory, cudaStream_t stream)
      : stream_(stream),
        marks_(stream),
        from_(memory.zeros(kCopyBytes)),
        to_(memory.zeros(kCopyBytes)) {
    sample();  // the first is slower
  }

  double sample() {
    marks_.restart();
    wait_on_device(kCopies * kHostSeconds, stream_);
    for (int i = 0; i < kCopies; ++i) {
      marks_.mark();
      check_cuda(
          cudaMemcpyAsync(to_.data(), from_.data(), kCopyBytes, cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
    }
    marks_.mark();
    return 2.0 * static_cast<double>(kCopyBytes) / percentile(marks_.intervals(), 50);
  }

 private:
  cudaStream_t stream_;
  Marks marks_;
  std::span<std::byte> from_, to_;
};

// Enough copies of the problem's data that the next call finds nothing of it in a cache.
class Sets {
 public:
  Sets(const Problem& problem, DeviceTensors& memory, const Exec& exec, const Manner& manner) {
    const auto add = [&] {
      sets_.push_back(std::make_unique<ProblemData>(problem, memory, exec, manner));
    };
    const std::size_t before = memory.bytes();
    add();
    const std::size_t each = std::max<std::size_t>(memory.bytes() - before, 1);
    int cache = 0;
    check_cuda(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, problem.device.index),
               "cudaDeviceGetAttribute");
    const std::size_t wanted = (kCacheFactor * static_cast<std::size_t>(cache) + each - 1) / each;
    while (sets_.size() < std::min(wanted, kMostSets)) add();
    workspace_ = memory.zeros(sets_.front()->needed_workspace());
    for (const auto& set : sets_) set->use_workspace(workspace_);
  }

  void run_next() { sets_[next_++ % sets_.size()]->run(); }
  std::int64_t count() const { return static_cast<std::int64_t>(sets_.size()); }
  std::size_t workspace_bytes() const { return workspace_.size(); }

 private:
  std::span<std::byte> workspace_;
  std::vector<std::unique_ptr<ProblemData>> sets_;
  std::size_t next_ = 0;
};

// What a sample times: one call, or a graph of several.
class Work {
 public:
  Work(Sets& sets, const Stream& stream, bool graph) : sets_(sets), stream_(stream.get()) {
    const auto start = Clock::now();
    sets.run_next();
    stream.wait();
    first_seconds_ = seconds_since(start);
    for (std::int64_t i = 1; i < sets.count(); ++i) sets.run_next();  // once outside a capture
    stream.wait();
    if (!graph) return;
    calls_ = std::max(kGraphCalls, sets.count());
    cudaGraph_t captured = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
    for (std::int64_t i = 0; i < calls_; ++i) sets.run_next();
    check_cuda(cudaStreamEndCapture(stream_, &captured), "cudaStreamEndCapture");
    const cudaError_t status = cudaGraphInstantiate(&program_, captured, 0);
    cudaGraphDestroy(captured);
    check_cuda(status, "cudaGraphInstantiate");
  }
  ~Work() {
    if (program_ != nullptr) cudaGraphExecDestroy(program_);
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  void enqueue() {
    if (program_ == nullptr) {
      sets_.run_next();
    } else {
      check_cuda(cudaGraphLaunch(program_, stream_), "cudaGraphLaunch");
    }
  }
  std::int64_t calls() const { return calls_; }
  double first_seconds() const { return first_seconds_; }

  // Seconds of one call, for each of so many samples.
  std::vector<double> samples(std::int64_t count, Marks& marks) {
    marks.restart();
    wait_on_device(static_cast<double>(count) * kHostSeconds, stream_);
    marks.mark();
    for (std::int64_t i = 0; i < count; ++i) {
      enqueue();
      marks.mark();
    }
    std::vector<double> seconds = marks.intervals();
    for (double& s : seconds) s /= static_cast<double>(calls_);
    return seconds;
  }

 private:
  Sets& sets_;
  cudaStream_t stream_;
  std::int64_t calls_ = 1;
  double first_seconds_ = 0;
  cudaGraphExec_t program_ = nullptr;
};

}  // namespace

Result measure_on_device(const Problem& problem, double seconds, const Manner& manner) {
  check_cuda(cudaSetDevice(problem.device.index), "cudaSetDevice");
  Result result;
  result.problem = to_string(problem);
  const Stream stream;
  const Exec exec{.kernel = manner.kernel, .stream = stream.get()};
  result.kernel = explain(problem, exec).chosen;
  result.cost = minimal_cost(problem);
  result.manner = manner;
  DeviceTensors memory(problem.device);
  Copies copies(memory, stream.get());
  Sets sets(problem, memory, exec, manner);
  result.workspace_bytes = sets.workspace_bytes();
  stream.wait();
  Work work(sets, stream, manner.graph);
  result.first_ms = 1e3 * work.first_seconds();
  Marks marks(stream.get());

  const double call = percentile(work.samples(kLeastCalls, marks), 50);
  const auto batch = std::clamp(
      static_cast<std::int64_t>(kBatchSeconds / (call * static_cast<double>(work.calls()))),
      kLeastCalls, kMostCalls);
  std::vector<double> times, ratios;
  const auto start = Clock::now();
  result.bandwidths.push_back(copies.sample());
  for (int i = 0; i < kLeastBatches || seconds_since(start) < seconds; ++i) {
    const std::vector<double> samples = work.samples(batch, marks);
    const double before = result.bandwidths.back();
    result.bandwidths.push_back(copies.sample());
    const double bandwidth = 2 / (1 / before + 1 / result.bandwidths.back());
    for (const double sample : samples) {
      times.push_back(sample);
      ratios.push_back(sample * bandwidth / result.cost.bytes);
    }
  }
  summarise(times, ratios, result);
  return result;
}

}  // namespace lln::bench
