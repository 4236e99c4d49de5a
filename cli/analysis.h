// Instruments on queries and keys: every kind of attention asked for on every head, a head measured
// on several samples (the sequences of a batch, or the seeds of a simulation) and reported by their
// mean. What lln analyze, its report and lln demo share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lln/instruments.h"
#include "lln/moments.h"
#include "progress.h"
#include "verb.h"

namespace lln::cli {

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

// Throws UsageError for a name that is none, or comes twice.
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

// `where` begins the line of progress: "lln analyze: layer 3 of 12".
LayerFindings analyze_layer(const AnalysisLayer& layer, const AnalysisRequest& request,
                            const std::string& where, Parallel& threads, Progress& progress);

// A line on stderr where a limit set alpha or beta; `what` begins it: "layer 3".
void warn_of_limits(const LayerFindings& found, const std::string& what, Progress& progress);

// Numbers are means over the samples, null where there is none. The brief form leaves out what only
// a look at one head needs.
Json to_json(const HeadFinding& finding);
Json to_brief_json(const HeadFinding& finding);

}  // namespace lln::cli
