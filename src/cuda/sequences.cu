// Which sequences a call has, found on the device: lengths, masks and cumulative lengths are never
// read by the host. Values that are out of range are made harmless here, once, so that no kernel
// ever meets them, and reported (device.h).
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "lln/error.h"

namespace lln::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct Indices {
  const void* data = nullptr;
  bool wide = false;
  __device__ std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i]
                : static_cast<const std::int32_t*>(data)[i];
  }
};

__device__ void report(std::uint32_t* word, DeviceFault fault) {
  atomicOr(word, static_cast<std::uint32_t>(fault));
}

// Where diagonal blocks are counted from, in each sequence; the first valid key without data.
struct Origins {
  Indices of_sequence;
  std::int64_t block = 0;
  // As near as can be, like make_sequences().
  __device__ std::int64_t at(std::int64_t s, std::int64_t key_first, std::int64_t tokens) const {
    if (of_sequence.data == nullptr) return key_first;
    const std::int64_t origin = of_sequence[s];
    return origin < 0 ? origin % block : min(origin, tokens);
  }
};

// A batch of sequences of the same length.
struct BatchTable {
  DeviceSequence* table;
  std::int64_t count, tokens, tokens_k;
  std::int64_t q_each, k_each;  // jobs of a sequence
  Origins origins;
  std::uint32_t* faults;

  __device__ void write(std::int64_t s, std::int64_t key_first, std::int64_t key_end) const {
    if (key_first >= key_end) key_first = key_end = 0;
    table[s] = {s,         0,       tokens,     0,          tokens_k,
                key_first, key_end, s * q_each, s * k_each, origins.at(s, key_first, tokens_k)};
  }
};

__global__ void __launch_bounds__(kThreads)
    lengths_kernel(const BatchTable batch, const Indices lengths) {
  const std::int64_t s = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (s >= batch.count) return;
  std::int64_t length = lengths.data == nullptr ? batch.tokens_k : lengths[s];
  if (length < 0 || length > batch.tokens_k) {
    report(batch.faults, DeviceFault::key_lengths);
    length = length < 0 ? 0 : batch.tokens_k;
  }
  batch.write(s, 0, length);
}

struct Mask {
  const std::uint8_t* data;
  std::int64_t batch, token;
};

constexpr int kKeysPerThread = 16;

// One block looks for the first and the last valid key of a sequence, from both ends and no further
// than it must.
__global__ void __launch_bounds__(kThreads) mask_kernel(const BatchTable batch, const Mask mask) {
  constexpr std::int64_t kStep = kThreads * kKeysPerThread;
  __shared__ unsigned long long first, last;
  const std::int64_t s = blockIdx.x;
  const std::int64_t tokens = batch.tokens_k;
  const std::uint8_t* const row = mask.data + s * mask.batch;
  const auto valid = [&](std::int64_t key) {
    return key >= 0 && key < tokens && row[key * mask.token] != 0;
  };
  if (threadIdx.x == 0) {
    first = static_cast<unsigned long long>(tokens);
    last = 0;  // one past the last valid key
  }
  __syncthreads();
  for (std::int64_t begin = 0; begin < tokens; begin += kStep) {
    const std::int64_t own = begin + static_cast<std::int64_t>(threadIdx.x) * kKeysPerThread;
    std::int64_t found = tokens;
    for (int i = kKeysPerThread - 1; i >= 0; --i) {
      if (valid(own + i)) found = own + i;
    }
    if (found < tokens) atomicMin(&first, static_cast<unsigned long long>(found));
    if (__syncthreads_or(found < tokens)) break;
  }
  for (std::int64_t end = tokens; end > 0; end -= kStep) {
    const std::int64_t own = end - static_cast<std::int64_t>(threadIdx.x) * kKeysPerThread;
    std::int64_t found = 0;
    for (int i = kKeysPerThread; i > 0; --i) {
      if (valid(own - i)) found = own - i + 1;
    }
    if (found > 0) atomicMax(&last, static_cast<unsigned long long>(found));
    if (__syncthreads_or(found > 0)) break;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    batch.write(s, static_cast<std::int64_t>(first), static_cast<std::int64_t>(last));
  }
}

// Packed sequences.
struct PackedTable {
  DeviceSequence* table;
  std::int64_t count, tokens, tokens_k;
  Indices cu_q, cu_k;
  bool same_keys;  // causal or block-diagonal: q and k must be cut alike
  Jobs q_jobs, k_jobs;
  Origins origins;
  std::uint32_t* faults;
};

struct JobCounts {
  std::int64_t q = 0, k = 0;
};

__device__ JobCounts operator+(const JobCounts& a, const JobCounts& b) {
  return {a.q + b.q, a.k + b.k};
}

__device__ JobCounts shifted_up(const JobCounts& counts, int lanes) {
  return {__shfl_up_sync(~0U, counts.q, lanes), __shfl_up_sync(~0U, counts.k, lanes)};
}

// The sum over all threads up to this one, itself included; *total the sum over all of them.
__device__ JobCounts block_scan(JobCounts own, JobCounts* total) {
  __shared__ JobCounts warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const JobCounts before = shifted_up(own, step);
    if (lane >= step) own = own + before;
  }
  if (lane == 31) warps[warp] = own;
  __syncthreads();
  if (warp == 0) {
    JobCounts sum = warps[lane];
    for (int step = 1; step < 32; step *= 2) {
      const JobCounts before = shifted_up(sum, step);
      if (lane >= step) sum = sum + before;
    }
    warps[lane] = sum;
  }
  __syncthreads();
  if (warp > 0) own = own + warps[warp - 1];
  *total = warps[kWarps - 1];
  __syncthreads();  // the next scan may begin
  return own;
}
static_assert(kWarps == 32, "one warp scans the sums of all warps");

constexpr std::int64_t kSequencesPerBlock = 4 * kThreads;

// What is wrong with sequence s, as bits of DeviceFault.
__device__ std::uint32_t packed_faults(const PackedTable& packed, std::int64_t s) {
  const auto bad = [&](const Indices& cu, std::int64_t tokens) {
    return cu[s] > cu[s + 1] || (s == 0 && cu[0] != 0) ||
           (s == packed.count - 1 && cu[s + 1] != tokens);
  };
  std::uint32_t faults = 0;
  if (bad(packed.cu_q, packed.tokens)) {
    faults |= static_cast<std::uint32_t>(DeviceFault::cu_seqlens_q);
  }
  if (bad(packed.cu_k, packed.tokens_k)) {
    faults |= static_cast<std::uint32_t>(DeviceFault::cu_seqlens_k);
  }
  if (packed.same_keys && packed.cu_q[s + 1] != packed.cu_k[s + 1]) {
    faults |= static_cast<std::uint32_t>(DeviceFault::different_cu_seqlens);
  }
  return faults;
}

// Every block looks at the whole list, so that each knows on its own whether it is right and how
// many jobs come before its sequences: a list of 100000 is read in a few microseconds, and no block
// waits for another. A list with one bad entry has no sequences that could be trusted: all are
// then empty.
__global__ void __launch_bounds__(kThreads) packed_kernel(const PackedTable packed) {
  const std::int64_t begin = blockIdx.x * kSequencesPerBlock;
  const std::int64_t end = min(begin + kSequencesPerBlock, packed.count);
  const auto jobs_of = [&](std::int64_t s) -> JobCounts {
    return {packed.q_jobs.count(packed.cu_q[s + 1] - packed.cu_q[s]),
            packed.k_jobs.count(packed.cu_k[s + 1] - packed.cu_k[s])};
  };
  std::uint32_t faults = 0;
  JobCounts before;
#pragma unroll 4
  for (std::int64_t s = threadIdx.x; s < packed.count; s += kThreads) {
    faults |= packed_faults(packed, s);
    if (s < begin) before = before + jobs_of(s);
  }
  const bool right = __syncthreads_or(faults != 0) == 0;
  if (faults != 0) atomicOr(packed.faults, faults);
  JobCounts base;
  block_scan(before, &base);
  for (std::int64_t tile = begin; tile < end; tile += kThreads) {
    const std::int64_t s = tile + threadIdx.x;
    const bool own = right && s < end;
    const JobCounts jobs = own ? jobs_of(s) : JobCounts{};
    JobCounts total;
    const JobCounts upto = block_scan(jobs, &total);
    if (own) {
      const std::int64_t q = packed.cu_q[s], k = packed.cu_k[s];
      const std::int64_t k_tokens = packed.cu_k[s + 1] - k;
      packed.table[s] = {0,
                         q,
                         packed.cu_q[s + 1] - q,
                         k,
                         k_tokens,
                         0,
                         k_tokens,
                         base.q + upto.q - jobs.q,
                         base.k + upto.k - jobs.k,
                         packed.origins.at(s, 0, k_tokens)};
    } else if (s < end) {
      packed.table[s] = {
          0, 0, 0, 0, 0, 0, 0, s * packed.q_jobs.count(0), s * packed.k_jobs.count(0), 0};
    }
    base = base + total;
  }
}

// Of a table of packed sequences: the sequence of every job of q, then of every job of k.
struct JobTable {
  const DeviceSequence* table;
  std::int64_t count;
  Jobs q_jobs, k_jobs;
  std::int64_t q_limit, k_limit;
  std::int32_t* sequences;  // [q_limit + k_limit]
};

__global__ void __launch_bounds__(kThreads) jobs_kernel(const JobTable jobs) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= jobs.q_limit + jobs.k_limit) return;
  const bool keys = i >= jobs.q_limit;
  const std::int64_t job = keys ? i - jobs.q_limit : i;
  const auto first_job = [&](const DeviceSequence& at) {
    return keys ? at.k_first_job : at.q_first_job;
  };
  std::int64_t low = 0, high = jobs.count;  // the last sequence whose first job is not after `job`
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_job(jobs.table[middle]) <= job ? low : high) = middle;
  }
  const DeviceSequence& found = jobs.table[low];
  const std::int64_t count =
      keys ? jobs.k_jobs.count(found.k_tokens) : jobs.q_jobs.count(found.q_tokens);
  jobs.sequences[i] = job - first_job(found) < count ? static_cast<std::int32_t>(low) : -1;
}

Indices indices(const IndexView& view) { return {view.data, view.wide}; }

Scale scale(const ConstView& view) {
  return {static_cast<const float*>(view.data), view.stride[0], view.stride[1]};
}

Weight weight(const ConstView& view, float constant, bool complement) {
  return {static_cast<const float*>(view.data),
          view.stride[0],
          view.stride[1],
          view.stride[2],
          view.stride[3],
          constant,
          complement};
}

}  // namespace

cudaError_t find_code(int& version) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, lengths_kernel);
  version = attributes.ptxVersion;
  return status;
}

Rows rows_of(const ConstView& view) {
  return {const_cast<void*>(view.data), view.stride[0], view.stride[1], view.stride[2]};
}

DeviceCall make_device_call(const Call& call) {
  const Problem& p = call.problem;
  const AttentionInputs& in = call.in;
  DeviceCall device{};
  device.dtype = p.dtype;
  device.heads = p.heads;
  device.heads_k = p.heads_k;
  device.dim = p.dim;
  device.dim_v = p.dim_v;
  device.kind = p.kind;
  device.channels = static_cast<std::int32_t>(p.dim - call.padding);
  device.diag_block = p.diag_block;
  device.feature = p.feature;
  device.power = p.power;
  device.q = rows_of(in.q);
  device.k = rows_of(in.k);
  device.v = rows_of(in.v);
  device.o = rows_of(call.out.o);
  device.g = rows_of(call.grads.g);
  device.dq = rows_of(call.grads.dq);
  device.dk = rows_of(call.grads.dk);
  device.dv = rows_of(call.grads.dv);
  device.alpha = scale(in.alpha);
  device.beta = scale(in.beta);
  const bool two = in.lln_weight.given();
  const float mix = call.options.mix;
  device.lln_weight = two ? weight(in.lln_weight, 0, false) : weight(in.mix, mix, false);
  device.diag_weight = two ? weight(in.diag_weight, 0, false) : weight(in.mix, mix, true);
  Sequences& sequences = device.sequences;
  sequences.count = p.sequences;
  sequences.tokens = p.tokens;
  sequences.tokens_k = p.tokens_k;
  if (in.key_mask.given()) {
    sequences.mask = in.key_mask.data;
    sequences.mask_batch = in.key_mask.stride[0];
    sequences.mask_token = in.key_mask.stride[1];
  }
  return device;
}

// Jobs of q and k of packed sequences, at most: no kernel has pieces shorter than its tiles of 64.
std::int64_t most_jobs(const Problem& p) {
  constexpr Jobs kShortest{.every_log2 = 6};
  return kShortest.most(p.tokens, p.sequences) + kShortest.most(p.tokens_k, p.sequences);
}

bool needs_table(const Problem& problem) {
  return problem.packed || problem.masked || problem.block_origins;
}

std::size_t table_bytes(const Problem& problem) {
  if (!needs_table(problem)) return 0;
  constexpr std::size_t kAlignment = 256;  // of what a kernel puts behind the table
  std::size_t bytes = static_cast<std::size_t>(problem.sequences) * sizeof(DeviceSequence);
  if (problem.packed) {
    bytes += static_cast<std::size_t>(most_jobs(problem)) * sizeof(std::int32_t);
  }
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void prepare_sequences(const Call& call, const Jobs& q_jobs, const Jobs& k_jobs, void* table,
                       DeviceCall& device) {
  const Problem& p = call.problem;
  Sequences& all = device.sequences;
  all.q_jobs = q_jobs;
  all.k_jobs = k_jobs;
  if (p.packed) {
    all.q_job_limit = q_jobs.most(p.tokens, p.sequences);
    all.k_job_limit = k_jobs.most(p.tokens_k, p.sequences);
  } else {
    all.q_job_limit = p.sequences * q_jobs.count(p.tokens);
    all.k_job_limit = p.sequences * k_jobs.count(p.tokens_k);
  }
  if (!needs_table(p)) return;
  auto* const entries = static_cast<DeviceSequence*>(table);
  all.table = entries;
  if (p.sequences == 0) return;
  const auto in_blocks = [&](std::int64_t items, int each) {
    return LaunchShape{blocks_for(items, each), kThreads, 0,
                       static_cast<cudaStream_t>(call.stream)};
  };
  std::uint32_t* const faults = fault_word(p.device.index);
  const Origins origins{indices(call.in.block_origins), p.diag_block};
  if (p.packed) {
    const IndexView& cu_k =
        call.in.cu_seqlens_k.given() ? call.in.cu_seqlens_k : call.in.cu_seqlens_q;
    const PackedTable packed{entries,
                             p.sequences,
                             p.tokens,
                             p.tokens_k,
                             indices(call.in.cu_seqlens_q),
                             indices(cu_k),
                             p.causal || p.has_diag(),
                             q_jobs,
                             k_jobs,
                             origins,
                             faults};
    launch("packed_kernel", packed_kernel, in_blocks(p.sequences, kSequencesPerBlock), packed);
    auto* const job_sequences = reinterpret_cast<std::int32_t*>(entries + p.sequences);
    all.q_job_sequence = job_sequences;
    all.k_job_sequence = job_sequences + all.q_job_limit;
    const std::int64_t jobs = all.q_job_limit + all.k_job_limit;
    if (jobs > most_jobs(p)) {
      throw Error(ErrorCode::internal, "packed sequences: " + std::to_string(jobs) +
                                           " jobs, room for " + std::to_string(most_jobs(p)));
    }
    launch("jobs_kernel", jobs_kernel, in_blocks(jobs, kThreads),
           JobTable{entries, p.sequences, q_jobs, k_jobs, all.q_job_limit, all.k_job_limit,
                    job_sequences});
    return;
  }
  const BatchTable batch{
      entries, p.sequences, p.tokens, p.tokens_k, q_jobs.count(p.tokens), k_jobs.count(p.tokens_k),
      origins, faults};
  if (call.in.key_mask.given()) {
    const Mask mask{all.mask, all.mask_batch, all.mask_token};
    launch("mask_kernel", mask_kernel, in_blocks(p.sequences, 1), batch, mask);
  } else {
    launch("lengths_kernel", lengths_kernel, in_blocks(p.sequences, kThreads), batch,
           indices(call.in.key_lengths));
  }
}

}  // namespace lln::cuda
