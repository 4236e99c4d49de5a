// The table of sequences that a device makes from lengths, masks and cumulative lengths, against
// the same found on the host.
// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <vector>

#include "cuda/device.h"
#include "cuda/device_call.h"
#include "device_run.h"
#include "lln/error.h"

namespace lln::test {
namespace {

using cuda::DeviceSequence;
using cuda::Jobs;

class CudaSequences : public OnDevice {};

constexpr Jobs kQueryJobs{.shortest_log2 = 6, .ordinary_log2 = 7};
constexpr Jobs kKeyJobs{};

// A list in device memory.
template <class T>
class OnDeviceList {
 public:
  explicit OnDeviceList(const std::vector<T>& values)
      : count_(values.size()), memory_(kDevice, values.size() * sizeof(T)) {
    memory_.write(std::as_bytes(std::span(values)));
  }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data()); }
  IndexView view() const { return on(kDevice, IndexView(std::span<const T>(data(), count_))); }

 private:
  std::size_t count_;
  DeviceMemory memory_;
};

// The sequence of every job, as the table says; then no sequence.
std::vector<std::int32_t> expected_jobs(const std::vector<DeviceSequence>& table, bool keys,
                                        std::int64_t limit) {
  std::vector<std::int32_t> list;
  for (std::size_t s = 0; s < table.size(); ++s) {
    const std::int64_t jobs =
        keys ? kKeyJobs.count(table[s].k_tokens) : kQueryJobs.count(table[s].q_tokens);
    list.resize(list.size() + static_cast<std::size_t>(jobs), static_cast<std::int32_t>(s));
  }
  list.resize(static_cast<std::size_t>(limit), -1);
  return list;
}

std::vector<std::int32_t> found_jobs(const std::int32_t* from, std::int64_t limit) {
  std::vector<std::int32_t> list(static_cast<std::size_t>(limit));
  EXPECT_EQ(
      cudaMemcpy(list.data(), from, list.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost),
      cudaSuccess);
  return list;
}

std::vector<DeviceSequence> make_table(const Problem& problem, const AttentionInputs& in) {
  Call call;
  call.problem = on_device(problem);
  call.in = in;
  EXPECT_TRUE(cuda::needs_table(call.problem));
  const DeviceMemory memory(kDevice, cuda::table_bytes(call.problem));
  cuda::DeviceCall device = cuda::make_device_call(call);
  cuda::prepare_sequences(call, kQueryJobs, kKeyJobs, memory.data(), device);
  EXPECT_EQ(static_cast<const void*>(device.sequences.table), memory.data());
  std::vector<DeviceSequence> table(static_cast<std::size_t>(problem.sequences));
  memory.read(std::as_writable_bytes(std::span(table)));
  EXPECT_TRUE(memory.guards_untouched());
  if (!table.empty()) {
    const DeviceSequence& last = table.back();
    EXPECT_LE(last.q_first_job + kQueryJobs.count(last.q_tokens), device.sequences.q_job_limit);
    EXPECT_LE(last.k_first_job + kKeyJobs.count(last.k_tokens), device.sequences.k_job_limit);
  }
  if (problem.packed) {
    const cuda::Sequences& all = device.sequences;
    EXPECT_EQ(found_jobs(all.q_job_sequence, all.q_job_limit),
              expected_jobs(table, false, all.q_job_limit));
    EXPECT_EQ(found_jobs(all.k_job_sequence, all.k_job_limit),
              expected_jobs(table, true, all.k_job_limit));
  }
  return table;
}

void expect_entry(const DeviceSequence& found, const DeviceSequence& expected, std::size_t s) {
  const auto list = [](const DeviceSequence& e) {
    return std::vector<std::int64_t>{e.batch,       e.q_begin,     e.q_tokens, e.k_begin,
                                     e.k_tokens,    e.key_first,   e.key_end,  e.q_first_job,
                                     e.k_first_job, e.block_origin};
  };
  ASSERT_EQ(list(found), list(expected)) << "sequence " << s;
}

template <class T>
std::vector<T> sums(const std::vector<std::int64_t>& lengths) {
  std::vector<T> list = {0};
  for (const std::int64_t length : lengths) list.push_back(static_cast<T>(list.back() + length));
  return list;
}

template <class T>
void expect_packed(const std::vector<std::int64_t>& q, const std::vector<std::int64_t>& k) {
  const std::vector<T> cu_q = sums<T>(q), cu_k = sums<T>(k);
  Problem problem = parse_problem("forward:f32:cpu:b1h1n1d8:lln:packed");
  problem.sequences = static_cast<std::int64_t>(q.size());
  problem.tokens = cu_q.back();
  problem.tokens_k = cu_k.back();
  const OnDeviceList<T> on_q(cu_q), on_k(cu_k);
  AttentionInputs in;
  in.cu_seqlens_q = on_q.view();
  in.cu_seqlens_k = on_k.view();
  const std::vector<DeviceSequence> table = make_table(problem, in);
  std::int64_t q_jobs = 0, k_jobs = 0;
  for (std::size_t s = 0; s < q.size(); ++s) {
    expect_entry(table[s], {0, cu_q[s], q[s], cu_k[s], k[s], 0, k[s], q_jobs, k_jobs, 0}, s);
    q_jobs += kQueryJobs.count(q[s]);
    k_jobs += kKeyJobs.count(k[s]);
  }
  cuda::throw_reported_faults(0);
}

TEST_F(CudaSequences, Packed) {
  std::mt19937_64 random(7);
  for (const std::size_t count : {1, 5, 1024, 4096, 4097, 100000}) {
    std::vector<std::int64_t> q(count), k(count);
    for (std::size_t s = 0; s < count; ++s) {
      q[s] = random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % 900);
      k[s] = random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % 20000);
    }
    expect_packed<std::int64_t>(q, k);
    expect_packed<std::int32_t>(q, q);
  }
}

TEST_F(CudaSequences, OneBadEntryLeavesAllSequencesEmpty) {
  std::vector<std::int64_t> cu = sums<std::int64_t>(std::vector<std::int64_t>(9000, 3));
  Problem problem = parse_problem("forward:f32:cpu:b1h1n27000d8:lln:packed=9000");
  std::swap(cu[8000], cu[8001]);
  const OnDeviceList<std::int64_t> list(cu);
  AttentionInputs in;
  in.cu_seqlens_q = list.view();
  const std::vector<DeviceSequence> table = make_table(problem, in);
  for (std::size_t s = 0; s < table.size(); ++s) {
    const auto jobs = static_cast<std::int64_t>(s);  // one for each, as for all empty sequences
    expect_entry(table[s], {0, 0, 0, 0, 0, 0, 0, jobs, jobs, 0}, s);
  }
  EXPECT_THROW(cuda::throw_reported_faults(0), Error);
  EXPECT_NO_THROW(cuda::throw_reported_faults(0));
}

template <class T>
void expect_lengths(const std::vector<T>& lengths, std::int64_t tokens) {
  Problem problem = parse_problem("forward:f32:cpu:b1h1n1d8:lln:masked");
  problem.batch = problem.sequences = static_cast<std::int64_t>(lengths.size());
  problem.tokens = 500;
  problem.tokens_k = tokens;
  const OnDeviceList<T> list(lengths);
  AttentionInputs in;
  in.key_lengths = list.view();
  const std::vector<DeviceSequence> table = make_table(problem, in);
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const auto b = static_cast<std::int64_t>(s);
    const std::int64_t length = std::clamp<std::int64_t>(lengths[s], 0, tokens);
    expect_entry(
        table[s],
        {b, 0, 500, 0, tokens, 0, length, b * kQueryJobs.count(500), b * kKeyJobs.count(tokens), 0},
        s);
  }
}

TEST_F(CudaSequences, Lengths) {
  std::vector<std::int32_t> lengths;
  for (std::int32_t b = 0; b < 3000; ++b) lengths.push_back(b % 701);
  expect_lengths(lengths, 700);
  expect_lengths(std::vector<std::int64_t>(lengths.begin(), lengths.end()), 700);
  EXPECT_NO_THROW(cuda::throw_reported_faults(0));
  expect_lengths<std::int64_t>({700, 701, -1, std::int64_t{1} << 40}, 700);
  EXPECT_THROW(cuda::throw_reported_faults(0), Error);
}

TEST_F(CudaSequences, Masks) {
  struct Valid {
    std::int64_t first, end;
  };
  for (const std::int64_t tokens : {1, 15, 16, 17, 1000, 16384, 16385, 100000}) {
    const std::vector<Valid> valid = {
        {0, tokens},          {0, 0}, {tokens - 1, tokens},    {0, 1}, {tokens / 3, tokens / 2 + 1},
        {tokens / 2, tokens}, {0, 1}, {tokens / 2, tokens / 2}};
    // A row of the mask is longer than the sequence, and what is behind it does not count.
    const std::int64_t stride = tokens + 3;
    std::vector<std::uint8_t> mask(valid.size() * static_cast<std::size_t>(stride), 1);
    for (std::size_t b = 0; b < valid.size(); ++b) {
      for (std::int64_t n = 0; n < tokens; ++n) {
        // Both ends, and every second key between them.
        const bool inside = n >= valid[b].first && n < valid[b].end;
        const bool hole = n != valid[b].first && n + 1 != valid[b].end && n % 2 == 0;
        mask[b * static_cast<std::size_t>(stride) + static_cast<std::size_t>(n)] =
            inside && !hole ? 7 : 0;
      }
    }
    const OnDeviceList<std::uint8_t> list(mask);
    Problem problem = parse_problem("forward:f32:cpu:b1h1n1d8:lln:masked");
    problem.batch = problem.sequences = static_cast<std::int64_t>(valid.size());
    problem.tokens_k = tokens;
    AttentionInputs in;
    in.key_mask = on(kDevice, mask_view(list.data(), problem.batch, tokens));
    in.key_mask.stride = {stride, 1};
    const std::vector<DeviceSequence> table = make_table(problem, in);
    for (std::size_t s = 0; s < valid.size(); ++s) {
      const auto b = static_cast<std::int64_t>(s);
      const bool none = valid[s].first == valid[s].end;
      const std::int64_t first = none ? 0 : valid[s].first, end = none ? 0 : valid[s].end;
      expect_entry(table[s], {b, 0, 1, 0, tokens, first, end, b, b * kKeyJobs.count(tokens), first},
                   s);
    }
  }
}

}  // namespace
}  // namespace lln::test
