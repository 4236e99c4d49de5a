// Which vector targets are compiled: one entry of the kernel lists for each. SSSE3 adds nothing
// over SSE4 on machines that exist; scalable vectors cannot be kept in the register tiles of
// gemm-inl.h. Included before any Highway header.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define HWY_DISABLED_TARGETS                                                          \
  (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_WASM | \
   HWY_WASM_EMU256)
