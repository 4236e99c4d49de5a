// One run function per vector target, found by the target's Highway bit. Chosen by the kernel lists
// and not by Highway's own dispatch, so that a target can be named and forced per call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "api/kernel.h"

namespace lln::cpu {

using Run = void (*)(const Call&);

Run find_forward(std::int64_t target);
Run find_forward_pairs(std::int64_t target);
Run find_backward(std::int64_t target);
Run find_backward_pairs(std::int64_t target);
Run find_causal_forward(std::int64_t target);
Run find_causal_backward(std::int64_t target);
Run find_append(std::int64_t target);
Run find_step(std::int64_t target);

std::size_t forward_workspace(const Problem& problem, int workers);
std::size_t backward_workspace(const Problem& problem, int workers);
std::size_t causal_forward_workspace(const Problem& problem, int workers);
std::size_t causal_backward_workspace(const Problem& problem, int workers);
std::size_t append_workspace(const Problem& problem, int workers);
std::size_t step_workspace(const Problem& problem, int workers);

}  // namespace lln::cpu

#if HWY_TARGETS & HWY_AVX3
#define LLN_CPU_AVX3(name) {HWY_AVX3, N_AVX3::name},
#else
#define LLN_CPU_AVX3(name)
#endif
#if HWY_TARGETS & HWY_AVX2
#define LLN_CPU_AVX2(name) {HWY_AVX2, N_AVX2::name},
#else
#define LLN_CPU_AVX2(name)
#endif
#if HWY_TARGETS & HWY_SSE4
#define LLN_CPU_SSE4(name) {HWY_SSE4, N_SSE4::name},
#else
#define LLN_CPU_SSE4(name)
#endif
#if HWY_TARGETS & HWY_NEON
#define LLN_CPU_NEON(name) {HWY_NEON, N_NEON::name},
#else
#define LLN_CPU_NEON(name)
#endif
#if HWY_TARGETS & HWY_SCALAR
#define LLN_CPU_SCALAR(name) {HWY_SCALAR, N_SCALAR::name},
#else
#define LLN_CPU_SCALAR(name)
#endif

// Defines find_NAME for the targets that this file was compiled for.
#define LLN_CPU_EXPORT(name)                                                                  \
  Run find_##name(std::int64_t target) {                                                      \
    static constexpr struct {                                                                 \
      std::int64_t target;                                                                    \
      Run run;                                                                                \
    } kTable[] = {LLN_CPU_AVX3(name) LLN_CPU_AVX2(name) LLN_CPU_SSE4(name) LLN_CPU_NEON(name) \
                      LLN_CPU_SCALAR(name)};                                                  \
    for (const auto& entry : kTable) {                                                        \
      if (entry.target == target) return entry.run;                                           \
    }                                                                                         \
    return nullptr;                                                                           \
  }
