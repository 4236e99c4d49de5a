// The loop over heads, kinds and samples.
// SPDX-License-Identifier: Apache-2.0
#include "report/findings.h"

#include <fmt/format.h>

#include <algorithm>

#include "lln/error.h"

namespace lln::report {
namespace {

// Points of a Q-Q plot and bins of a histogram: as fine as a figure can show.
constexpr std::int64_t kQuantiles = 49, kBins = 48;

// alpha [samples, heads] and beta [samples, heads_k] of a layer.
struct LayerScales {
  std::vector<float> alpha, beta;
  MatchingReport report;
};

LayerScales match(const AnalysisLayer& layer, const AnalysisRequest& request, const Exec& exec) {
  const Shape q = {layer.q.shape[0], layer.q.shape[1], 1, 1},
              k = {layer.k.shape[0], layer.k.shape[1], 1, 1};
  LayerScales scales{std::vector<float>(static_cast<std::size_t>(q[0] * q[1]), 1),
                     std::vector<float>(static_cast<std::size_t>(k[0] * k[1]), 1),
                     {}};
  if (std::none_of(request.kinds.begin(), request.kinds.end(), has_scales)) return scales;
  MatchingInputs in{.q = layer.q, .k = layer.k};
  if (request.matching == Matching::frozen) {
    in.alpha = layer.alpha;
    in.beta = layer.beta;
  }
  scales.report = match_moments(in, {view(scales.alpha.data(), q), view(scales.beta.data(), k)},
                                {.mode = request.matching, .causal = request.causal}, exec);
  return scales;
}

std::string trimmed(const std::string& text) {
  const std::size_t first = text.find_first_not_of(' '), last = text.find_last_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool any_clamped(const MatchingReport& report, std::int64_t key_head) {
  return std::any_of(report.clamped.begin(), report.clamped.end(),
                     [&](const ClampedHead& c) { return c.head_k < 0 || c.head_k == key_head; });
}

}  // namespace

bool has_scales(const KindRequest& kind) noexcept {
  const AttentionMatrix& matrix = kind.matrix;
  return (matrix.kind == MatrixKind::lln || matrix.kind == MatrixKind::lln_diag) &&
         matrix.feature == Feature::exp;
}

std::vector<KindRequest> parse_kinds(const std::vector<std::string>& names) {
  std::vector<KindRequest> kinds;
  std::vector<std::string> seen;
  for (const std::string& name : names) {
    KindRequest kind{trimmed(name), {}};
    parse_matrix(kind.name, kind.matrix);
    const std::string text = to_string(kind.matrix);
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) {
      throw Error(ErrorCode::invalid_argument, fmt::format("{} is there twice", kind.name));
    }
    seen.push_back(text);
    kinds.push_back(std::move(kind));
  }
  return kinds;
}

LayerFindings analyze_layer(const AnalysisLayer& layer, const AnalysisRequest& request,
                            Parallel* threads, const Watch& watch) {
  const Exec exec{.parallel = threads};
  const std::int64_t samples = layer.q.shape[0], heads = layer.q.shape[1],
                     heads_k = layer.k.shape[1];
  LayerScales scales = match(layer, request, exec);
  LayerFindings found{{}, request.matching, std::move(scales.report)};
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t key_head = h * heads_k / heads;
    for (const KindRequest& kind : request.kinds) {
      HeadFinding& finding = found.heads.emplace_back();
      finding.layer = layer.index;
      finding.layer_name = layer.name;
      if (layer.index) finding.head = h;
      finding.kind = kind.name;
      if (has_scales(kind)) {
        finding.matching = request.matching;
        finding.clamped = any_clamped(found.matching, key_head);
      }
      for (std::int64_t s = 0; s < samples; ++s) {
        AttentionMatrix matrix = kind.matrix;
        matrix.q = head_view(layer.q, s, h);
        matrix.k = head_view(layer.k, s, key_head);
        matrix.causal = request.causal;
        matrix.seed = static_cast<std::uint64_t>(s);
        if (has_scales(kind)) {
          matrix.alpha = static_cast<double>(scales.alpha[static_cast<std::size_t>(s * heads + h)]);
          matrix.beta =
              static_cast<double>(scales.beta[static_cast<std::size_t>(s * heads_k + key_head)]);
          finding.alpha += matrix.alpha / static_cast<double>(samples);
          finding.beta += matrix.beta / static_cast<double>(samples);
        }
        InstrumentOptions options{.rows = request.rows, .bins = kBins, .qq_points = kQuantiles};
        if (request.brief) options.eigenvalues = 2;
        options.chain = !request.brief;
        if (watch) {
          options.progress = [&, h](const InstrumentProgress& now) { watch(h, kind.name, now); };
        }
        finding.samples.push_back(examine(matrix, options, exec));
      }
    }
  }
  return found;
}

}  // namespace lln::report
