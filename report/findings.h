// Instruments on queries and keys: every kind of attention asked for on every head, a head measured
// on several samples (the sequences of a batch, or the seeds of a simulation) and reported by their
// mean, as the JSON that a report shows. What the program and the Python package share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lln/instruments.h"
#include "lln/moments.h"

namespace lln::report {

using Json = nlohmann::ordered_json;

struct KindRequest {
  std::string name;        // as it was asked for: "lln+diag64", "performer"
  AttentionMatrix matrix;  // q and k are not set
};

struct AnalysisRequest {
  std::vector<KindRequest> kinds = {};
  Matching matching = Matching::per_head;  // of the kinds with alpha and beta
  bool causal = false;
  std::int64_t rows = 0;  // of each matrix that are looked at; 0: all
  // Entropy, ln P and the gap alone: neither the chain nor what a figure of one head shows.
  bool brief = false;
};

// Throws Error for a name that is none, or comes twice.
std::vector<KindRequest> parse_kinds(const std::vector<std::string>& names);
// Whether alpha and beta play a part: LLN and LLN+Diag with the exponential.
bool has_scales(const KindRequest& kind) noexcept;

struct AnalysisLayer {
  std::optional<std::int64_t> index = {};  // none where there is no model behind the data
  std::string name = {};
  ConstView q = {};                 // [samples, heads, tokens, dim]
  ConstView k = {};                 // [samples, heads_k, tokens, dim]
  ConstView alpha = {}, beta = {};  // f32 [1 or samples, heads, 1, 1], for mode frozen
};

struct HeadFinding {
  std::optional<std::int64_t> layer, head;
  std::string layer_name;
  std::string kind;
  std::optional<Matching> matching;  // of kinds with alpha and beta
  double alpha = 0, beta = 0;        // their means
  bool clamped = false;              // a limit set them, for one of the samples at least
  std::vector<Examination> samples;
};

struct LayerFindings {
  std::vector<HeadFinding> heads;
  Matching mode;  // as requested
  MatchingReport matching;
};

// What is being done: the head, the kind as it was asked for, and the stage of its examination.
using Watch =
    std::function<void(std::int64_t head, const std::string& kind, const InstrumentProgress& now)>;

LayerFindings analyze_layer(const AnalysisLayer& layer, const AnalysisRequest& request,
                            Parallel* threads, const Watch& watch = {});

// Numbers are means over the samples, null where there is none. The brief form leaves out what only
// a look at one head needs.
Json to_json(const HeadFinding& finding);
Json to_brief_json(const HeadFinding& finding);

}  // namespace lln::report
