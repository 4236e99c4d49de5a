// A layer of tensors for the report's findings, and their JSON.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/instruments.h"

#include <nlohmann/json.hpp>

#include "lln_torch/binding/exec.h"
#include "report/findings.h"

namespace lln_torch::binding {

std::string analyze(const Tensor& q, const Tensor& k, const OptionalTensor& alpha,
                    const OptionalTensor& beta, const AnalysisWords& words) {
  const lln::report::AnalysisRequest request{.kinds = lln::report::parse_kinds(words.kinds),
                                             .matching = lln::parse_matching(words.matching),
                                             .causal = words.causal,
                                             .rows = words.rows,
                                             .brief = words.brief};
  lln::report::AnalysisLayer data{
      .index = words.layer, .name = words.name, .q = view4("q", q), .k = view4("k", k)};
  if (alpha) data.alpha = scale_view("alpha", *alpha);
  if (beta) data.beta = scale_view("beta", *beta);
  const lln::Exec exec = exec_for(q, q.numel() * q.size(2));
  lln::report::Json list = lln::report::Json::array();
  for (const lln::report::HeadFinding& head :
       lln::report::analyze_layer(data, request, exec.parallel).heads) {
    list.push_back(words.brief ? lln::report::to_brief_json(head) : lln::report::to_json(head));
  }
  return list.dump();
}

}  // namespace lln_torch::binding
