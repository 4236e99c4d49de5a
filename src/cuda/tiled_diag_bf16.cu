// The tiled kernels of Diag and LLN+Diag for bf16.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_diag_launch.cuh"

namespace lln::cuda {

const TiledDiagLaunches kTiledDiagBf16 = {diag_forward_of_width<Bf16>,
                                          diag_backward_of_width<Bf16>};

}  // namespace lln::cuda
