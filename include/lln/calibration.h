// Calibration: alpha and beta of every head of a model, found once on data and stored beside its
// weights, for mode frozen. The file is JSON; `lln calibrate` writes it from dumped q and k.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lln/exec.h"
#include "lln/moments.h"

namespace lln {

struct CalibratedLayer {
  std::string name = {};
  std::int64_t dim = 0;           // of the heads
  double tokens = 0;              // keys of a sequence that counted, on average
  std::vector<float> alpha = {};  // one per query head
  std::vector<float> beta = {};   // one per key head
  bool operator==(const CalibratedLayer&) const = default;
};

struct Calibration {
  Matching mode = Matching::entropy;  // that found the numbers
  std::vector<CalibratedLayer> layers = {};
  // Throws an Error where there is no such layer.
  const CalibratedLayer& layer(std::string_view name) const;
  bool operator==(const Calibration&) const = default;
};

// alpha and beta of one layer in mode paper, per_head, exact or entropy: as match_moments, with the
// moments of a key head taken over all sequences together, and the mean number of keys that count
// in place of each sequence's own. The name stays empty. `clamped`, where given, gets the heads
// that a limit was applied to, their sequence -1. With tensors on a device this call waits.
CalibratedLayer calibrate(const MatchingInputs& in, Matching mode,
                          std::vector<ClampedHead>* clamped = nullptr, const Exec& exec = {});

// Moments of one layer over any number of sequences, for data that come in batches: sums of
// head_moments() by merge().
struct PooledMoments {
  std::int64_t heads = 0;       // query heads; a multiple of the number of key heads
  std::int64_t dim = 0;         // of the heads
  std::vector<Moments> q = {};  // one per key head, over the query heads that share it
  std::vector<Moments> k = {};  // one per key head
  std::int64_t sequences = 0;   // with at least one key that counts
};

// As above, to rounding, from moments that were pooled before.
CalibratedLayer calibrate(const PooledMoments& pooled, Matching mode,
                          std::vector<ClampedHead>* clamped = nullptr);

// Every fault of the text is one Error with ErrorCode::io that begins with `source`.
Calibration parse_calibration(std::string_view text, const std::string& source);
Calibration load_calibration(const std::string& path);
// alpha and beta come back as the same f32 numbers. Throws where a scale is not positive and
// finite, or two layers have one name.
std::string to_json(const Calibration& calibration);
// Appears complete or not at all.
void save_calibration(const Calibration& calibration, const std::string& path);

}  // namespace lln
