// Random numbers for plans and features: a generator of their own for each layer and draw, so that
// they depend on the seed of the config and the step alone, not on what else was drawn before.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {

// For draw `number` (0, 1, ...) of the layer of `config`; tensors are drawn on the CPU.
inline at::Generator plan_generator(const AttentionConfig& config, std::int64_t number) {
  // splitmix64 over the three numbers: neighbouring seeds share nothing.
  std::uint64_t mixed = config.seed;
  for (const std::int64_t part : {config.layer, number}) {
    mixed += static_cast<std::uint64_t>(part) + 0x9e3779b97f4a7c15U;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
    mixed ^= mixed >> 31;
  }
  return at::detail::createCPUGenerator(mixed);
}

}  // namespace lln_torch
