// The CPU entries of the kernel lists: one per vector target, best first. Each takes every problem
// with CPU tensors of 16 or 32 bits on a machine that has the target's instructions.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#include <hwy/highway.h>
#include <hwy/targets.h>

#include "cpu/kernels.h"
#include "cpu/targets.h"

namespace lln {
namespace {

struct Target {
  std::int64_t bit;
  const char* name;
};

constexpr Target kAvx512{HWY_AVX3, "avx512"};
constexpr Target kAvx2{HWY_AVX2, "avx2"};
constexpr Target kSse4{HWY_SSE4, "sse4"};
constexpr Target kNeon{HWY_NEON, "neon"};
constexpr Target kScalar{HWY_SCALAR, "scalar"};

// Asking the CPU costs 20 us in a virtual machine, so it is asked once.
bool runs_here(const Target& target) {
  static const std::int64_t supported = hwy::SupportedTargets();
  return (supported & target.bit) != 0;
}

// Products of bf16 pairs, which no target of Highway stands for: a kernel of kAvx512.
constexpr const char* kPairsName = "avx512-bf16";

bool has_pairs() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("avx512bf16") != 0 && runs_here(kAvx512);
#else
  return false;
#endif
}

// Where they pay: measured on Zen 4, they are as fast as multiply-adds, and twice the work; later
// CPUs of AMD are taken to be no worse. CPUs with half as many units for them gain nothing.
bool pairs_pay() {
#if HWY_ARCH_X86
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

bool is_causal_lln(const Problem& p) { return p.causal && p.has_lln(); }

template <const Target& kTarget>
std::string refusal(const Problem& problem) {
  if (problem.device.kind != DeviceKind::cpu) return "tensors are not on the CPU";
  if (problem.dtype == DType::f64) return "f64 is taken by the reference alone";
  if (!runs_here(kTarget)) return std::string("this CPU has no ") + kTarget.name;
  return {};
}

std::string pairs_refusal(const Problem& p) {
  if (!has_pairs()) return std::string("this CPU has no ") + kPairsName;
  if (p.dtype != DType::bf16) return "takes bf16 alone";
  if (p.kind == Kind::softmax) return "takes lln, diag and lln+diag alone";
  if (p.feature != Feature::exp) return "takes the feature map exp alone";
  if (p.causal) return "is not for causal attention";
  if (p.dim % 16 != 0 || p.dim_v % 16 != 0) return "needs dim and dim_v in multiples of 16";
  return refusal<kAvx512>(p);
}

template <const Target& kTarget>
std::string decode_refusal(const Problem& problem) {
  if (!problem.has_lln()) return "decoding is of lln and lln+diagB alone";
  if (problem.dtype == DType::f64) return "decoding takes f32, f16 and bf16";
  return refusal<kTarget>(problem);
}

template <const Target& kTarget>
void run_forward(const Call& call) {
  const auto find = is_causal_lln(call.problem) ? cpu::find_causal_forward : cpu::find_forward;
  find(kTarget.bit)(call);
}

template <const Target& kTarget>
void run_backward(const Call& call) {
  const auto find = is_causal_lln(call.problem) ? cpu::find_causal_backward : cpu::find_backward;
  find(kTarget.bit)(call);
}

std::size_t forward_bytes(const Problem& problem, int workers) {
  return is_causal_lln(problem) ? cpu::causal_forward_workspace(problem, workers)
                                : cpu::forward_workspace(problem, workers);
}

std::size_t backward_bytes(const Problem& problem, int workers) {
  return is_causal_lln(problem) ? cpu::causal_backward_workspace(problem, workers)
                                : cpu::backward_workspace(problem, workers);
}

void add_pairs(std::vector<Kernel>& list, cpu::Run run, std::size_t (*bytes)(const Problem&, int)) {
  if (run == nullptr) return;
  list.push_back({std::string("cpu-") + kPairsName, pairs_refusal, bytes, run, DeviceKind::cpu,
                  /*takes_pieces=*/true});
}

template <const Target& kTarget>
void add_forward(std::vector<Kernel>& list) {
  if (cpu::find_forward(kTarget.bit) == nullptr) return;
  list.push_back({std::string("cpu-") + kTarget.name, refusal<kTarget>, forward_bytes,
                  run_forward<kTarget>, DeviceKind::cpu, /*takes_pieces=*/true});
}

template <const Target& kTarget>
void add_backward(std::vector<Kernel>& list) {
  if (cpu::find_backward(kTarget.bit) == nullptr) return;
  list.push_back({std::string("cpu-") + kTarget.name, refusal<kTarget>, backward_bytes,
                  run_backward<kTarget>, DeviceKind::cpu, /*takes_pieces=*/true});
}

template <const Target& kTarget>
void add_append(std::vector<Kernel>& list) {
  const cpu::Run run = cpu::find_append(kTarget.bit);
  if (run == nullptr) return;
  list.push_back(
      {std::string("cpu-") + kTarget.name, decode_refusal<kTarget>, cpu::append_workspace, run});
}

template <const Target& kTarget>
void add_step(std::vector<Kernel>& list) {
  const cpu::Run run = cpu::find_step(kTarget.bit);
  if (run == nullptr) return;
  list.push_back(
      {std::string("cpu-") + kTarget.name, decode_refusal<kTarget>, cpu::step_workspace, run});
}

}  // namespace

std::vector<Kernel> cpu_forward_kernels() {
  std::vector<Kernel> list;
  if (pairs_pay()) add_pairs(list, cpu::find_forward_pairs(kAvx512.bit), forward_bytes);
  add_forward<kAvx512>(list);
  if (!pairs_pay()) add_pairs(list, cpu::find_forward_pairs(kAvx512.bit), forward_bytes);
  add_forward<kAvx2>(list);
  add_forward<kSse4>(list);
  add_forward<kNeon>(list);
  add_forward<kScalar>(list);
  return list;
}

std::vector<Kernel> cpu_backward_kernels() {
  std::vector<Kernel> list;
  if (pairs_pay()) add_pairs(list, cpu::find_backward_pairs(kAvx512.bit), backward_bytes);
  add_backward<kAvx512>(list);
  if (!pairs_pay()) add_pairs(list, cpu::find_backward_pairs(kAvx512.bit), backward_bytes);
  add_backward<kAvx2>(list);
  add_backward<kSse4>(list);
  add_backward<kNeon>(list);
  add_backward<kScalar>(list);
  return list;
}

std::vector<Kernel> cpu_append_kernels() {
  std::vector<Kernel> list;
  add_append<kAvx512>(list);
  add_append<kAvx2>(list);
  add_append<kSse4>(list);
  add_append<kNeon>(list);
  add_append<kScalar>(list);
  return list;
}

std::vector<Kernel> cpu_step_kernels() {
  std::vector<Kernel> list;
  add_step<kAvx512>(list);
  add_step<kAvx2>(list);
  add_step<kSse4>(list);
  add_step<kNeon>(list);
  add_step<kScalar>(list);
  return list;
}

std::vector<std::string> cpu_target_names() {
  std::vector<std::string> names;
  for (const Target& target : {kAvx512, kAvx2, kSse4, kNeon, kScalar}) {
    if (cpu::find_forward(target.bit) != nullptr && runs_here(target)) {
      names.emplace_back(target.name);
    }
  }
  return names;
}

}  // namespace lln
