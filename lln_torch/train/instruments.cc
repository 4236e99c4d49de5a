// From observations to numbers.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/instruments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "lln/error.h"
#include "lln/instruments.h"

namespace lln_torch {
namespace {

using HeadJson = nlohmann::ordered_json;

// Rows of a matrix that are looked at; enough for a mean whose error is below a percent.
constexpr std::int64_t kMeasuredRows = 128;

Tensor host_f32(const Tensor& x) { return x.detach().to(at::kCPU, at::kFloat).contiguous(); }

// Means of numbers of which some may be missing.
struct MeanOf {
  double sum = 0;
  std::int64_t count = 0;
  void add(std::optional<double> value) {
    if (!value || !std::isfinite(*value)) return;
    sum += *value;
    ++count;
  }
  HeadJson json() const {
    return count > 0 ? HeadJson(sum / static_cast<double>(count)) : HeadJson(nullptr);
  }
};

struct HeadMeans {
  std::string kind;
  MeanOf temperature, entropy, limit, gap, alpha, beta;
  std::string fault;
};

lln::ConstView head_of(const Tensor& x, std::int64_t head) {
  const Tensor one = x[head];  // [tokens, channels], contiguous
  return lln::view(one.const_data_ptr<float>(), {1, 1, one.size(0), one.size(1)});
}

void measure_head(const ObservedLayer& layer, std::int64_t head, bool causal,
                  lln::ThreadPool& threads, HeadMeans& means) {
  lln::AttentionMatrix matrix;
  lln::parse_matrix(means.kind, matrix);
  matrix.q = head_of(layer.q, head);
  matrix.k = head_of(layer.k, head);
  matrix.causal = causal;
  if (layer.alpha.defined()) {
    matrix.alpha = layer.alpha[head].item<double>();
    matrix.beta = layer.beta[head].item<double>();
    means.alpha.add(matrix.alpha);
    means.beta.add(matrix.beta);
  }
  lln::InstrumentOptions options;
  options.rows = std::min(kMeasuredRows, layer.q.size(1));
  options.chain = false;
  options.eigenvalues = 2;
  try {
    const lln::Examination found = lln::examine(matrix, options, {.parallel = &threads});
    means.temperature.add(found.temperature);
    means.entropy.add(found.rows.entropy.mean);
    means.limit.add(std::log(static_cast<double>(found.tokens)));
    if (found.spectrum) means.gap.add(found.spectrum->gap);
  } catch (const lln::Error& e) {
    means.fault = e.what();  // q or k that are not finite, which the training will say itself
  }
}

}  // namespace

void Recorder::observe(const Observation& observation) {
  const Tensor& q = observation.q;
  const std::int64_t rows = q.defined() ? std::min(rows_, q.size(0)) : 0;
  if (rows == 0)
    layers_.push_back({observation.layer, observation.name, observation.kind, {}, {}, {}, {}});
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto pick = [&](const Tensor& x) {  // [heads, tokens, channels]
      Tensor own = x[row];
      if (observation.key_mask.defined() && own.size(1) == observation.key_mask.size(1)) {
        own = own.index_select(1, at::nonzero(observation.key_mask[row]).squeeze(1));
      }
      return host_f32(own.narrow(1, 0, std::min(tokens_, own.size(1))));
    };
    const auto scale = [&](const Tensor& x) {
      return x.defined() ? host_f32(x[x.size(0) > 1 ? row : 0]) : Tensor();
    };
    layers_.push_back({observation.layer, observation.name, observation.kind, pick(q),
                       pick(observation.k), scale(observation.alpha), scale(observation.beta)});
  }
}

std::vector<HeadJson> measure_layers(const std::vector<ObservedLayer>& layers, bool causal) {
  lln::ThreadPool threads(at::get_num_threads());
  std::map<std::pair<std::int64_t, std::int64_t>, HeadMeans> heads;
  for (const ObservedLayer& layer : layers) {
    // A matrix of one token says nothing.
    if (!layer.q.defined() || layer.q.size(1) < 2 || layer.q.sizes() != layer.k.sizes()) continue;
    for (std::int64_t head = 0; head < layer.q.size(0); ++head) {
      HeadMeans& means = heads[{layer.layer, head}];
      means.kind = layer.kind;
      measure_head(layer, head, causal, threads, means);
    }
  }
  std::vector<HeadJson> rows;
  for (const auto& [place, means] : heads) {
    rows.push_back({{"layer", place.first},
                    {"head", place.second},
                    {"kind", means.kind},
                    {"temperature", means.temperature.json()},
                    {"entropy", means.entropy.json()},
                    {"entropy_limit", means.limit.json()},
                    {"gap", means.gap.json()},
                    {"alpha", means.alpha.json()},
                    {"beta", means.beta.json()}});
    if (!means.fault.empty()) rows.back()["fault"] = means.fault;
  }
  return rows;
}

}  // namespace lln_torch
