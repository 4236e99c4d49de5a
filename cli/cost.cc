// Timed calls on growing input.
// SPDX-License-Identifier: Apache-2.0
#include "cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "tasks.h"

namespace lln::cli {
namespace {

// Equal shares of moment matching for queries and keys of unit variance at 64 channels.
constexpr float kAlpha = 2.15F;
constexpr double kEnoughTiming = 0.2;  // seconds of repeated calls, the fastest counts

double time_call(const CostInput& input, std::int64_t tokens, Kind kind, const Exec& exec) {
  const AttentionInputs in = input.inputs(tokens);
  const AttentionOutputs out = input.outputs(tokens);
  double best = 0, total = 0;
  for (int call = 0; call == 0 || total < kEnoughTiming; ++call) {
    const auto start = std::chrono::steady_clock::now();
    attention_forward(in, out, cost_options(kind), exec);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    total += seconds;
    best = call == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

// Times the call unless the growth seen so far says that it would take too long.
CostMeasurement measure(const CostInput& input, std::int64_t tokens, Kind kind, const Exec& exec,
                        const std::vector<CostRow>& before, CostMeasurement CostRow::*column) {
  CostMeasurement m;
  const Problem problem =
      make_problem(input.inputs(tokens), input.outputs(tokens), cost_options(kind));
  m.bytes = minimal_cost(problem).bytes + static_cast<double>(workspace_bytes(problem, exec));
  if (!before.empty()) {
    const CostMeasurement& last = before.back().*column;
    double growth = 4;  // the most that twice the tokens can cost
    if (before.size() > 1) {
      growth = std::clamp(last.seconds / (before[before.size() - 2].*column).seconds, 2.0, 4.0);
    }
    m.seconds = last.seconds * growth;
    m.predicted = last.predicted || m.seconds > kLongestCall;
  }
  if (!m.predicted) m.seconds = time_call(input, tokens, kind, exec);
  return m;
}

Json to_json(const CostMeasurement& m) {
  return {{"seconds", m.seconds}, {"predicted", m.predicted}, {"bytes", m.bytes}};
}

}  // namespace

CostInput::CostInput(std::int64_t tokens, Parallel& threads) : tokens_(tokens) {
  for (io::Bytes& tensor : tensors_) {
    tensor = io::Bytes(static_cast<std::size_t>(kCostHeads * tokens * kCostDim) * sizeof(float));
  }
  for_each_task(threads, 3 * kCostHeads,
                [this](std::int64_t task) { fill_head(task / kCostHeads, task % kCostHeads); });
}

AttentionInputs CostInput::inputs(std::int64_t tokens) const {
  return {.q = tensor(0, tokens),
          .k = tensor(1, tokens),
          .v = tensor(2, tokens),
          .alpha = scalar(&kAlpha),
          .beta = scalar(&kAlpha)};
}

View CostInput::tensor(std::size_t index, std::int64_t tokens) const {
  const Stride stride = {kCostHeads * tokens_ * kCostDim, tokens_ * kCostDim, kCostDim, 1};
  return view(const_cast<std::byte*>(tensors_[index].data()), DType::f32,
              {1, kCostHeads, tokens, kCostDim}, stride);
}

void CostInput::fill_head(std::int64_t index, std::int64_t head) {
  std::mt19937 random(static_cast<std::uint32_t>(index * kCostHeads + head));
  std::normal_distribution<float> normal;
  auto* first = reinterpret_cast<float*>(tensors_[static_cast<std::size_t>(index)].data()) +
                head * tokens_ * kCostDim;
  std::generate_n(first, tokens_ * kCostDim, [&] { return normal(random); });
}

AttentionOptions cost_options(Kind kind) { return {.kind = kind, .diag_block = kCostBlock}; }

std::vector<CostRow> measure_cost(const CostInput& input, const std::string& what, const Exec& exec,
                                  Progress& progress) {
  std::vector<CostRow> rows;
  for (std::int64_t tokens = kCostFirstTokens; tokens <= input.tokens(); tokens *= 2) {
    progress.stage(fmt::format("{}: {} tokens", what, tokens));
    CostRow row;
    row.tokens = tokens;
    row.lln = measure(input, tokens, Kind::lln, exec, rows, &CostRow::lln);
    row.lln_diag = measure(input, tokens, Kind::lln_diag, exec, rows, &CostRow::lln_diag);
    row.softmax = measure(input, tokens, Kind::softmax, exec, rows, &CostRow::softmax);
    row.matrix_bytes = static_cast<double>(kCostHeads * sizeof(float)) *
                       static_cast<double>(tokens) * static_cast<double>(tokens);
    rows.push_back(row);
  }
  return rows;
}

Json to_json(const std::vector<CostRow>& rows) {
  Json json = Json::array();
  for (const CostRow& row : rows) {
    json.push_back({{"tokens", row.tokens},
                    {"lln", to_json(row.lln)},
                    {"lln_diag", to_json(row.lln_diag)},
                    {"softmax", to_json(row.softmax)},
                    {"matrix_bytes", row.matrix_bytes}});
  }
  return json;
}

}  // namespace lln::cli
