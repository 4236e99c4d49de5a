// How the case table is filled: what a group of cases does not vary rotates, so that neighbouring
// subjects meet without the full product of everything.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/cases.h"

namespace lln::conformance {

inline constexpr std::array<int, 13> kDims = {1, 7, 16, 32, 40, 60, 64, 80, 96, 100, 128, 192, 256};
inline constexpr std::array<int, 9> kTokens = {0, 1, 7, 63, 64, 65, 197, 257, 1000};
inline constexpr std::array<int, 9> kBlocks = {1, 3, 16, 48, 64, 100, 128, 200, 300};
inline constexpr std::array<const char*, 3> kTypes = {"f32", "bf16", "f16"};
inline constexpr std::array<const char*, 5> kFeatures = {"exp", "elu", "relu", "softplus",
                                                         "power2"};
// Every kind, bidirectional and causal.
inline constexpr std::array<const char*, 8> kKinds = {
    "lln",        "lln:causal",        "diag16",  "diag16:causal",
    "lln+diag32", "lln+diag32:causal", "softmax", "softmax:causal"};

// Element i of a list that repeats.
template <class T, std::size_t N>
const T& rotate(const std::array<T, N>& list, std::size_t i) {
  return list[i % N];
}

class Table {
 public:
  // Adds forward and backward of a problem, given as its text without the op. `form` holds what is
  // not in the text; layout, parameters, saved state and gradients rotate. Without parameters no
  // gradient of them is asked for, with which kernels may go other ways.
  void add(std::string_view problem, Case form = {}, bool with_parameters = true) {
    constexpr std::array kLayouts = {Layout::bhnd, Layout::bnhd, Layout::gaps};
    constexpr std::array kForms = {ParameterForm::head, ParameterForm::sequence,
                                   ParameterForm::one};
    for (const char* op : {"forward:", "backward:"}) {
      form.problem = parse_problem(op + std::string(problem));
      form.layout = rotate(kLayouts, configurations_);
      form.parameters = rotate(kForms, configurations_ / 2);
      form.saved = form.problem.has_lln() && configurations_ % 2 == 0;
      form.parameter_gradients =
          with_parameters && (configurations_ % 3 != 1 || form.weights != WeightForm::constant);
      form.quick = is_quick(form);
      cases.push_back(form);
    }
    ++configurations_;
  }

  // Adds the decoding of a problem.
  void add_append(std::string_view problem, Case form = {}) {
    form.problem = parse_problem("append:" + std::string(problem));
    form.layout = configurations_ % 2 == 0 ? Layout::bnhd : Layout::gaps;
    form.parameters = ParameterForm::sequence;
    form.quick = is_quick(form);
    cases.push_back(form);
    ++configurations_;
  }

  std::vector<Case> cases;

 private:
  // Small problems, a few of every group; the stride shares no factor with the rotations above.
  bool is_quick(const Case& c) const {
    const Problem& p = c.problem;
    const bool small = p.batch * p.heads * p.tokens * p.tokens_k * p.dim < 2'500'000;
    return small && configurations_ % 5 == 0;
  }

  std::size_t configurations_ = 0;
};

// What the pieces of cut sequences are (conformance/piece_cases.cc).
void add_piece_cases(Table& table);
// f32 on tensor cores (conformance/float_cases.cc).
void add_float_cases(Table& table);
// Causal Diag in the 16-bit types on tensor cores (conformance/diag_cases.cc).
void add_diag_cases(Table& table);
// Heads of more than 128 channels (conformance/wide_cases.cc).
void add_wide_cases(Table& table);
// Diag and LLN+Diag of such heads (the same file).
void add_wide_diag_cases(Table& table);
// Causal LLN and LLN+Diag of such heads (conformance/wide_causal_cases.cc).
void add_wide_causal_cases(Table& table);
// dim and dim_v that are no multiples of 8 (conformance/padded_cases.cc).
void add_padded_cases(Table& table);
// LLN+Diag in two calls, and gradients of parameters beside kernels for tensor cores
// (conformance/parts_cases.cc).
void add_parts_cases(Table& table);

}  // namespace lln::conformance
