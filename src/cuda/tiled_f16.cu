// The tiled kernels for f16.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_launch.cuh"

namespace lln::cuda {

const TiledLaunches kTiledF16 = {state_of_width<F16>, forward_of_width<F16>,
                                 backward_of_width<F16>};

}  // namespace lln::cuda
