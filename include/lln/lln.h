// Everything in one include.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lln/attention.h"
#include "lln/calibration.h"
#include "lln/decode.h"
#include "lln/error.h"
#include "lln/exec.h"
#include "lln/instruments.h"
#include "lln/moments.h"
#include "lln/problem.h"
#include "lln/tensor.h"
#include "lln/version.h"
