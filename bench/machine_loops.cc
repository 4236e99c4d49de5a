// Compiled once per vector target, like the kernels, and chosen by Highway: the targets are those
// of cpu/highway.h, so the choice is the one that the kernel lists make.
// SPDX-License-Identifier: Apache-2.0
#include "bench/machine_loops.h"

#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/machine_loops.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace lln::bench {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// 12 chains and two constants fit the 16 registers of AVX2 and SSE4, and 12 > 5 cycles x 2 units.
constexpr std::int64_t kChains = 12;
constexpr std::int64_t kStepsPerRound = 8;

}  // namespace

bool has_pairs_here() { return HWY_TARGET == HWY_AVX3; }

float pair_chains_here([[maybe_unused]] std::int64_t rounds) {
#if HWY_TARGET == HWY_AVX3
  const __m512i x = _mm512_set1_epi16(0x3F00);  // 0.5
  // By value: chains stay in registers.
  const auto next = [x](__m512 sum) HWY_ATTR {
    asm("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(x));
    return sum;
  };
  __m512 sums[kChains];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < rounds * kStepsPerRound; ++i) {
    HWY_UNROLL(12)
    for (std::int64_t c = 0; c < kChains; ++c) sums[c] = next(sums[c]);
  }
  for (std::int64_t c = 1; c < kChains; ++c) sums[0] = _mm512_add_ps(sums[0], sums[c]);
  return _mm512_reduce_add_ps(sums[0]);
#else
  return 0;  // no such CPU has these products
#endif
}

float fma_chains_here(std::int64_t rounds) {
  const hn::ScalableTag<float> d;
  // x -> x * 0.75 + 0.25 stays near 1: neither overflow nor denormal numbers change the speed. Read
  // through volatile, lest the chains be computed while compiling.
  const volatile float factor = 0.75F, term = 0.25F;
  const auto m = hn::Set(d, factor), t = hn::Set(d, term);
  auto c0 = hn::Set(d, 0.5F), c1 = hn::Set(d, 0.6F), c2 = hn::Set(d, 0.7F), c3 = hn::Set(d, 0.8F),
       c4 = hn::Set(d, 0.9F), c5 = hn::Set(d, 1.1F), c6 = hn::Set(d, 1.2F), c7 = hn::Set(d, 1.3F),
       c8 = hn::Set(d, 1.4F), c9 = hn::Set(d, 1.5F), c10 = hn::Set(d, 1.6F), c11 = hn::Set(d, 1.7F);
  const auto step = [&]() HWY_ATTR {
    c0 = hn::MulAdd(c0, m, t);
    c1 = hn::MulAdd(c1, m, t);
    c2 = hn::MulAdd(c2, m, t);
    c3 = hn::MulAdd(c3, m, t);
    c4 = hn::MulAdd(c4, m, t);
    c5 = hn::MulAdd(c5, m, t);
    c6 = hn::MulAdd(c6, m, t);
    c7 = hn::MulAdd(c7, m, t);
    c8 = hn::MulAdd(c8, m, t);
    c9 = hn::MulAdd(c9, m, t);
    c10 = hn::MulAdd(c10, m, t);
    c11 = hn::MulAdd(c11, m, t);
  };
  for (std::int64_t i = 0; i < rounds; ++i) {
    step();
    step();
    step();
    step();
    step();
    step();
    step();
    step();
  }
  const auto low = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), hn::Add(c4, c5));
  const auto high = hn::Add(hn::Add(hn::Add(c6, c7), hn::Add(c8, c9)), hn::Add(c10, c11));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
}

std::int64_t flops_per_round_here() {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  return 2 * lanes * kChains * kStepsPerRound;
}

void copy_past_caches_here(const float* from, float* to, std::int64_t floats) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < floats; i += 4 * lanes) {
    const auto v0 = hn::Load(d, from + i), v1 = hn::Load(d, from + i + lanes),
               v2 = hn::Load(d, from + i + 2 * lanes), v3 = hn::Load(d, from + i + 3 * lanes);
    hn::Stream(v0, d, to + i);
    hn::Stream(v1, d, to + i + lanes);
    hn::Stream(v2, d, to + i + 2 * lanes);
    hn::Stream(v3, d, to + i + 3 * lanes);
  }
  hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::bench {

HWY_EXPORT(fma_chains_here);
HWY_EXPORT(has_pairs_here);
HWY_EXPORT(pair_chains_here);
HWY_EXPORT(flops_per_round_here);
HWY_EXPORT(copy_past_caches_here);

float fma_chains(std::int64_t rounds) { return HWY_DYNAMIC_DISPATCH(fma_chains_here)(rounds); }

bool has_pairs() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("avx512bf16") != 0 && HWY_DYNAMIC_DISPATCH(has_pairs_here)();
#else
  return false;
#endif
}

float pair_chains(std::int64_t rounds) { return HWY_DYNAMIC_DISPATCH(pair_chains_here)(rounds); }

std::int64_t flops_per_round() { return HWY_DYNAMIC_DISPATCH(flops_per_round_here)(); }

void copy_past_caches(const float* from, float* to, std::int64_t floats) {
  HWY_DYNAMIC_DISPATCH(copy_past_caches_here)(from, to, floats);
}

}  // namespace lln::bench
#endif
