// A layer of tensors for the report's findings, and their JSON as bytes.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/instruments.h"

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "lln/error.h"
#include "lln_torch/binding/exec.h"
#include "report/findings.h"

namespace lln_torch::binding {
namespace {

std::vector<std::string> split_kinds(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace

Tensor analyze(const Tensor& q, const Tensor& k, const OptionalTensor& alpha,
               const OptionalTensor& beta, const std::string& kinds, const std::string& matching,
               bool causal, std::int64_t rows, std::int64_t layer, const std::string& name) {
  const lln::report::AnalysisRequest request{.kinds = lln::report::parse_kinds(split_kinds(kinds)),
                                             .matching = lln::parse_matching(matching),
                                             .causal = causal,
                                             .rows = rows};
  lln::report::AnalysisLayer data{.name = name, .q = view4("q", q), .k = view4("k", k)};
  if (layer >= 0) data.index = layer;
  if (alpha) data.alpha = scale_view("alpha", *alpha);
  if (beta) data.beta = scale_view("beta", *beta);
  const lln::Exec exec = exec_for(q, q.numel() * q.size(2));
  lln::report::Json list = lln::report::Json::array();
  for (const lln::report::HeadFinding& head :
       lln::report::analyze_layer(data, request, exec.parallel).heads) {
    list.push_back(lln::report::to_json(head));
  }
  const std::string text = list.dump();
  Tensor bytes =
      new_host_tensor(std::array{static_cast<std::int64_t>(text.size())}, ScalarType::Byte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace lln_torch::binding
