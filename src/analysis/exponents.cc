// Feature maps of math/feature_map.h on rows of a tensor.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/exponents.h"

#include "math/feature_map.h"

namespace lln::analysis {
namespace {

class MapExponents final : public Exponents {
 public:
  MapExponents(const ConstView& x, double scale, Feature feature, double power)
      : x_(cpu::rows_of(x, 0, 0, 0)), scale_(scale), feature_(feature), power_(power) {}

  std::int64_t width() const override { return x_.width; }
  std::int64_t spare() const override { return 0; }

  void load(Range rows, double* out, std::int64_t ld, double*) const override {
    cpu::load_rows(x_, rows.first, rows.count, scale_, out, ld);
    if (feature_ == Feature::exp) return;
    for (std::int64_t i = 0; i < rows.count; ++i) {
      for (std::int64_t c = 0; c < x_.width; ++c) {
        double& x = out[i * ld + c];
        x = log_feature(feature_, power_, x).value;
      }
    }
  }

 private:
  cpu::ConstRows x_;
  double scale_;
  Feature feature_;
  double power_;
};

}  // namespace

std::unique_ptr<Exponents> map_exponents(const ConstView& x, double scale, Feature feature,
                                         double power) {
  return std::make_unique<MapExponents>(x, scale, feature, power);
}

void transpose(const double* from, std::int64_t ld_from, std::int64_t rows, std::int64_t width,
               double* to, std::int64_t ld) {
  for (std::int64_t c = 0; c < width; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) to[c * ld + r] = from[r * ld_from + c];
  }
}

}  // namespace lln::analysis
