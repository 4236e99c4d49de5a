// Layout of scratch memory.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan.h"

namespace lln::cpu {

ScoreTiles::ScoreTiles(Arena& arena, const Dims& dims, bool backward) {
  const std::int64_t tokens = padded(dims.chunk);
  q = arena.floats(tokens * dims.dp);
  k = arena.floats(tokens * dims.dp);
  kt = arena.floats(tokens * std::max(tokens, dims.dp));
  v = arena.floats(tokens * dims.dvp);
  scores = arena.floats(tokens * tokens);
  row_max = arena.floats(tokens);
  row_sum = arena.floats(tokens);
  key = arena.take<std::int64_t>(tokens);
  if (!backward) return;
  vt = arena.floats(dims.dvp * tokens);
  g = arena.floats(tokens * dims.dvp);
  dscores = arena.floats(tokens * tokens);
  row_delta = arena.floats(tokens);
}

}  // namespace lln::cpu
