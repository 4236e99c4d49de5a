// The tiled kernels for bf16.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_launch.cuh"

namespace lln::cuda {

const TiledLaunches kTiledBf16 = {state_of_width<Bf16>, forward_of_width<Bf16>,
                                  backward_of_width<Bf16>};

}  // namespace lln::cuda
