// What the layers of a model concentrate on: q and k of one forward pass, and the instruments of
// the core on them. Written every so often during a training, so that concentration can be seen
// against the loss.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lln_torch/models/model.h"

namespace lln_torch {

// One sequence of one layer, in host memory, f32, without padding.
struct ObservedLayer {
  std::int64_t layer = 0;
  std::string attention;  // its name in the zoo
  std::string kind;       // of the matrix that is measured: Observation::kind
  Tensor q, k;            // [heads, tokens, channels]; undefined where the attention has none
  Tensor alpha, beta;     // [heads], or undefined
};

// Keeps what every layer shows. Rows from `first` to first + rows of the batch; of each at most
// `tokens` tokens.
class Recorder : public Observer {
 public:
  Recorder(std::int64_t rows, std::int64_t tokens) : rows_(rows), tokens_(tokens) {}
  void observe(const Observation& observation) override;
  // [layer observations of row 0, of row 1, ...], in the order in which the layers ran.
  const std::vector<ObservedLayer>& layers() const { return layers_; }

 private:
  std::int64_t rows_, tokens_;
  std::vector<ObservedLayer> layers_;
};

// One object for each layer and head, the mean over its rows: layer, head, kind, temperature,
// entropy (nats), entropy_limit (ln of the tokens), gap, alpha, beta; null for what there is not.
// Causal layers have no gap.
std::vector<nlohmann::ordered_json> measure_layers(const std::vector<ObservedLayer>& layers,
                                                   bool causal);

}  // namespace lln_torch
