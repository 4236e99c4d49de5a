// What the C tests share: checks that count failures and print where and why, and numbers to
// compute with. C has no test framework that Debian and every compiler agree on, and needs little.
// SPDX-License-Identifier: Apache-2.0
#ifndef LLN_TESTS_C_CHECK_H_
#define LLN_TESTS_C_CHECK_H_

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lln/c.h"

static int failures = 0;

static inline void check(int holds, const char* file, int line, const char* text) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "%s:%d: %s\n    last error: %s\n", file, line, text, lln_last_error());
}

static inline void check_error(lln_status found, lln_status expected, const char* part,
                               const char* file, int line) {
  if (found == expected && strstr(lln_last_error(), part) != NULL) return;
  ++failures;
  fprintf(stderr, "%s:%d: status %s, expected %s with: %s\n    last error: %s\n", file, line,
          lln_status_name(found), lln_status_name(expected), part, lln_last_error());
}

#define CHECK(condition) check(condition, __FILE__, __LINE__, #condition)
#define CHECK_OK(call) check((call) == LLN_OK, __FILE__, __LINE__, #call)
#define CHECK_ERROR(call, status, part) check_error(call, status, part, __FILE__, __LINE__)
#define CHECK_INVALID(call, part) CHECK_ERROR(call, LLN_ERROR_INVALID_ARGUMENT, part)

// Between -1 and 1, the same on every machine.
static inline double next_number(void) {
  static uint32_t state = 1;
  state = state * 1664525U + 1013904223U;
  return (double)(state >> 8) / (1 << 23) - 1;
}

static inline void fill(float* x, size_t count) {
  for (size_t i = 0; i < count; ++i) x[i] = (float)next_number();
}

static inline double largest_difference(const float* a, const float* b, size_t count) {
  double largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const double difference = fabs((double)a[i] - (double)b[i]);
    if (!(difference <= largest)) largest = isnan(difference) ? HUGE_VAL : difference;
  }
  return largest;
}

static inline lln_view f32_view(const float* data, int64_t b, int64_t h, int64_t n, int64_t d) {
  return lln_view_of(data, LLN_DTYPE_F32, b, h, n, d);
}

static inline int finish(void) {
  if (failures != 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
