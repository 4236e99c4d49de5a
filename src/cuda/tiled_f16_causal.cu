// The causal walks for f16.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32_causal.h"
#include "cuda/tiled_f32_causal_launch.cuh"

namespace lln::cuda {

void launch_f16_causal(const Problem& p, const CausalWork& work) {
  launch_float_causal<F16>(p, work);
}

}  // namespace lln::cuda
