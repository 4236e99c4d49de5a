// Kinds from the command line, and the line of progress over heads, kinds and stages.
// SPDX-License-Identifier: Apache-2.0
#include "analysis.h"

#include <fmt/format.h>

#include "lln/error.h"
#include "scales.h"

namespace lln::cli {
namespace {

// Shows the stages of each examination, and which of them all it is.
class ExaminationProgress {
 public:
  ExaminationProgress(std::string where, std::int64_t heads, Progress& progress)
      : where_(std::move(where)), heads_(heads), progress_(progress) {}

  void operator()(std::int64_t head, const std::string& kind, const InstrumentProgress& now) {
    std::string stage =
        fmt::format("{}, head {} of {}, {}, {}", where_, head + 1, heads_, kind, now.stage);
    if (stage != stage_ || now.done < done_) {
      stage_ = std::move(stage);
      done_ = 0;
      progress_.stage(stage_);
      progress_.step(now.total);
    }
    for (; done_ < now.done; ++done_) progress_.advance();
  }

 private:
  std::string where_, stage_;
  std::int64_t heads_, done_ = 0;
  Progress& progress_;
};

}  // namespace

std::vector<KindRequest> parse_kinds(const std::vector<std::string>& names) {
  try {
    return report::parse_kinds(names);
  } catch (const Error& e) {
    throw UsageError(fmt::format("--kinds: {}", e.what()));
  }
}

void warn_of_limits(const LayerFindings& found, const std::string& what, Progress& progress) {
  if (found.matching.clamped.empty()) return;
  progress.print(stderr, fmt::format("lln: warning: {}: {}\n", what,
                                     clamped_text(found.matching.clamped, found.mode)));
}

LayerFindings analyze_layer(const AnalysisLayer& layer, const AnalysisRequest& request,
                            const std::string& where, Parallel& threads, Progress& progress) {
  progress.stage(where + ", moments");
  return report::analyze_layer(layer, request, &threads,
                               ExaminationProgress(where, layer.q.shape[1], progress));
}

}  // namespace lln::cli
