// The CUDA entries of the kernel lists: every family of kernels in order of preference.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels.h"

#include <iterator>
#include <utility>

#include "cuda/decode.h"
#include "cuda/padded.h"
#include "cuda/parts.h"
#include "cuda/plain.h"
#include "cuda/sm90/diag.h"
#include "cuda/sm90/sm90.h"
#include "cuda/tiled.h"
#include "cuda/tiled_causal.h"
#include "cuda/tiled_diag.h"
#include "cuda/tiled_f32.h"
#include "cuda/tiled_f32_causal.h"
#include "cuda/tiled_f32_diag.h"
#include "cuda/tiled_wide_causal.h"

namespace lln {
namespace {

void add(std::vector<Kernel>& list, std::vector<Kernel> family) {
  list.insert(list.end(), std::make_move_iterator(family.begin()),
              std::make_move_iterator(family.end()));
}

}  // namespace

std::vector<Kernel> cuda_forward_kernels() {
  std::vector<Kernel> list;
  add(list, cuda::sm90_forward_kernels());
  add(list, cuda::tiled_forward_kernels());
  add(list, cuda::tiled_f32_forward_kernels());
  add(list, cuda::tiled_causal_forward_kernels());
  add(list, cuda::tiled_wide_causal_forward_kernels());
  add(list, cuda::tiled_f32_causal_forward_kernels());
  add(list, cuda::sm90_diag_forward_kernels());
  add(list, cuda::tiled_diag_forward_kernels());
  add(list, cuda::tiled_f32_diag_forward_kernels());
  add(list, cuda::padded_forward_kernels());
  add(list, cuda::parts_forward_kernels());
  add(list, cuda::plain_forward_kernels());
  return list;
}

std::vector<Kernel> cuda_backward_kernels() {
  std::vector<Kernel> list;
  add(list, cuda::sm90_backward_kernels());
  add(list, cuda::tiled_backward_kernels());
  add(list, cuda::tiled_f32_backward_kernels());
  add(list, cuda::tiled_causal_backward_kernels());
  add(list, cuda::tiled_wide_causal_backward_kernels());
  add(list, cuda::tiled_f32_causal_backward_kernels());
  add(list, cuda::sm90_diag_backward_kernels());
  add(list, cuda::tiled_diag_backward_kernels());
  add(list, cuda::tiled_f32_diag_backward_kernels());
  add(list, cuda::padded_backward_kernels());
  add(list, cuda::parts_backward_kernels());
  add(list, cuda::plain_backward_kernels());
  return list;
}

std::vector<Kernel> cuda_append_kernels() {
  std::vector<Kernel> list;
  add(list, cuda::tiled_append_kernels());
  add(list, cuda::decode_append_kernels());
  return list;
}

std::vector<Kernel> cuda_step_kernels() {
  std::vector<Kernel> list;
  add(list, cuda::decode_step_kernels());
  return list;
}

}  // namespace lln
