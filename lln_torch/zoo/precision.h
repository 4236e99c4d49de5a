// f32 inside a model that runs in 16 bits: for attentions whose formulas (exponentials of large
// numbers, sums over all tokens, inverses) 16 bits cannot hold.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lln_torch {

// Autocast does not reach what is computed while this lives.
class WithoutAutocast {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

// f32 of 16-bit numbers; f32 and f64 as they are.
inline at::Tensor at_least_f32(const at::Tensor& x) {
  return x.element_size() < 4 ? x.to(at::kFloat) : x;
}

}  // namespace lln_torch
