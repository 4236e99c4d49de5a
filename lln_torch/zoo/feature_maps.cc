// Linear attentions with other positive feature maps than the exponential, on the core's kernels.
// They have no temperature: scaling q or k changes little (elu, relu) or nothing (power).
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/lln.h"

namespace lln_torch {
namespace {

std::shared_ptr<Attention> make_elu(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LlnAttention>(config, options, "elu");
}

std::shared_ptr<Attention> make_relu(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LlnAttention>(config, options, "relu");
}

std::shared_ptr<Attention> make_power(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LlnAttention>(config, options, "power");
}

ZooEntry feature_map_entry(const char* name, const char* summary,
                           std::shared_ptr<Attention> (*make)(const AttentionConfig&,
                                                              const Settings&)) {
  return {.name = name,
          .summary = summary,
          .cost = "time N D^2, memory N D",
          .parameters = "none",
          .padding = "masked keys",
          .causal = true,
          .takes_diag = true,
          .make = make};
}

}  // namespace

ZooEntry elu_entry() {
  return feature_map_entry("elu", "features elu(x) + 1, rows normalised", make_elu);
}

ZooEntry relu_entry() {
  return feature_map_entry("relu", "features max(x, 0) + 1e-3, rows normalised", make_relu);
}

ZooEntry power_entry() {
  return feature_map_entry("power", "features |x|^power (2), rows normalised", make_power);
}

}  // namespace lln_torch
