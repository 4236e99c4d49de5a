// Which vector targets are compiled: one entry of the kernel lists for each. SSSE3 adds nothing
// over SSE4 on machines that exist; scalable vectors cannot be kept in the register tiles of
// gemm-inl.h. Included before any Highway header.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sanitizer builds take minutes per target, so they have two: the widest and the baseline.
#ifdef LLN_FEW_TARGETS
#define LLN_LEFT_OUT (HWY_AVX2 | HWY_SSE4)
#else
#define LLN_LEFT_OUT 0
#endif

#define HWY_DISABLED_TARGETS                                                              \
  (LLN_LEFT_OUT | HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | \
   HWY_WASM | HWY_WASM_EMU256)
