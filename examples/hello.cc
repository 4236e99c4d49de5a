// The program of README.md: LLN+Diag attention over 16384 tokens on all cores. Its text below this
// comment and the one in README are kept equal by a test.
// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <vector>

#include "lln/lln.h"

int main() {
  const lln::Shape shape{1, 12, 16384, 64};  // [batch, head, token, channel]
  std::vector<float> q(12 * 16384 * 64, 0.5F), k(q), v(q), o(q);
  const float alpha = 2.1F, beta = 2.1F;  // how concentrated the attention is
  const lln::AttentionInputs in{lln::view(q.data(), shape), lln::view(k.data(), shape),
                                lln::view(v.data(), shape), lln::scalar(&alpha),
                                lln::scalar(&beta)};
  lln::ThreadPool threads;
  lln::attention_forward(in, {lln::view(o.data(), shape)}, {lln::Kind::lln_diag}, {&threads});
  std::printf("o[0] = %g\n", o[0]);
}
