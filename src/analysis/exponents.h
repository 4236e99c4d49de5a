// The exponents of a positive feature map, f = ln phi of queries or keys as f64 rows: all that the
// identity P = W K^T needs of a linear attention (docs/theory.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "analysis/weights.h"

namespace lln::analysis {

class Exponents {
 public:
  virtual ~Exponents() = default;
  virtual std::int64_t width() const = 0;
  virtual std::int64_t spare() const = 0;  // numbers of scratch memory for one call of load()
  // Rows [first, first + count) to out [count, ld]; count is at most kKeyTile.
  virtual void load(Range rows, double* out, std::int64_t ld, double* spare) const = 0;
};

// f(scale x), channel by channel.
std::unique_ptr<Exponents> map_exponents(const ConstView& x, double scale, Feature feature,
                                         double power);

// FAVOR+ (Choromanski et al., ICLR 2021): with x' = x dim^-1/4, phi = e^(R x' - |x'|^2/2) + 1e-4,
// where the rows of R are blocks of orthogonal vectors with the lengths of Gaussian ones. The
// largest exponent, which others subtract to avoid overflow, stays in: nothing overflows here, and
// without it the 1e-4 would outweigh most features (docs/instruments.md).
struct PerformerFeatures {
  std::unique_ptr<Exponents> q, k;
};
PerformerFeatures performer_exponents(const AttentionMatrix& matrix);

// The rows of a list that rises: as one range where they are consecutive.
template <class Load>
void load_listed(std::span<const std::int64_t> rows, Load&& load) {
  const auto count = static_cast<std::int64_t>(rows.size());
  if (rows.back() - rows.front() + 1 == count) return load(Range{rows.front(), count}, 0);
  for (std::int64_t i = 0; i < count; ++i) load(Range{rows[size(i)], 1}, i);
}

// to [width, ld] = the transpose of from [rows, ld_from].
void transpose(const double* from, std::int64_t ld_from, std::int64_t rows, std::int64_t width,
               double* to, std::int64_t ld);

}  // namespace lln::analysis
