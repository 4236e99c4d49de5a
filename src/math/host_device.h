// Marks functions that kernels on a device call too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#ifdef __CUDACC__
#define LLN_HOST_DEVICE __host__ __device__
#else
#define LLN_HOST_DEVICE
#endif
