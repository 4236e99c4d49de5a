// The loop over heads, kinds and samples.
// SPDX-License-Identifier: Apache-2.0
#include "analysis.h"

#include <fmt/format.h>

#include <algorithm>

#include "lln/error.h"
#include "scales.h"

namespace lln::cli {
namespace {

// Points of a Q-Q plot and bins of a histogram: as fine as a figure can show.
constexpr std::int64_t kQuantiles = 49, kBins = 48;

// Shows the stages of one examination, and which of them all it is.
class ExaminationProgress {
 public:
  ExaminationProgress(std::string where, Progress& progress)
      : where_(std::move(where)), progress_(progress) {}

  void operator()(const InstrumentProgress& now) {
    if (now.stage != stage_ || now.done < done_) {
      stage_ = now.stage;
      done_ = 0;
      progress_.stage(fmt::format("{}, {}", where_, stage_));
      progress_.step(now.total);
    }
    for (; done_ < now.done; ++done_) progress_.advance();
  }

 private:
  std::string where_, stage_;
  std::int64_t done_ = 0;
  Progress& progress_;
};

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
    try {
      parse_matrix(kind.name, kind.matrix);
    } catch (const Error& e) {
      throw UsageError(fmt::format("--kinds: {}", e.what()));
    }
    const std::string text = to_string(kind.matrix);
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) {
      throw UsageError(fmt::format("--kinds: {} is there twice", kind.name));
    }
    seen.push_back(text);
    kinds.push_back(std::move(kind));
  }
  return kinds;
}

void warn_of_limits(const LayerFindings& found, const std::string& what, Progress& progress) {
  if (found.matching.clamped.empty()) return;
  progress.print(stderr, fmt::format("lln: warning: {}: {}\n", what,
                                     clamped_text(found.matching.clamped, found.mode)));
}

LayerFindings analyze_layer(const AnalysisLayer& layer, const AnalysisRequest& request,
                            const std::string& where, Parallel& threads, Progress& progress) {
  const Exec exec{.parallel = &threads};
  const std::int64_t samples = layer.q.shape[0], heads = layer.q.shape[1],
                     heads_k = layer.k.shape[1];
  progress.stage(where + ", moments");
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
        options.progress = ExaminationProgress(
            fmt::format("{}, head {} of {}, {}", where, h + 1, heads, finding.kind), progress);
        finding.samples.push_back(examine(matrix, options, exec));
      }
    }
  }
  return found;
}

}  // namespace lln::cli
