// Stands in for the toolkit's header where the bodies of kernels are compiled for the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define __host__
#define __device__
