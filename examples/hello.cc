// The program of README.md: LLN+Diag attention over 16384 tokens on all cores. Its text below this
// comment and the one in README are kept equal by a test.
// SPDX-License-Identifier: Apache-2.0

#include <cmath>
#include <cstdio>
#include <vector>

#include "lln/lln.h"

int main() {
  const lln::Shape shape{1, 12, 16384, 64};  // [batch, head, token, channel]
  std::vector<float> q(12 * 16384 * 64), k(q.size()), v(q.size()), o(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = k[i] = v[i] = std::sin(0.1F * float(i));
  const float alpha = 2.1F, beta = 2.1F;  // how concentrated the attention is
  const lln::AttentionInputs in{.q = lln::view(q.data(), shape),
                                .k = lln::view(k.data(), shape),
                                .v = lln::view(v.data(), shape),
                                .alpha = lln::scalar(&alpha),
                                .beta = lln::scalar(&beta)};
  lln::ThreadPool threads;
  lln::attention_forward(in, {.o = lln::view(o.data(), shape)}, {.kind = lln::Kind::lln_diag},
                         {.parallel = &threads});
  std::printf("o[0] = %g, o[last] = %g\n", o.front(), o.back());
}
