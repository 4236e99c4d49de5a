// Running one case on kernels by name.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "conformance/decode.h"
#include "conformance/device_data.h"
#include "lln/error.h"

namespace lln::conformance {
namespace {

// Scratch memory that is NaN everywhere, and 64-byte aligned as an allocation inside a call is.
class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(std::size_t bytes) : storage_(bytes + kAlignment, std::byte{0xFF}) {
    void* at = storage_.data();
    std::size_t space = storage_.size();
    std::align(kAlignment, bytes, at, space);
    span_ = {static_cast<std::byte*>(at), bytes};
  }
  std::span<std::byte> span() const { return span_; }

 private:
  static constexpr std::size_t kAlignment = 64;
  std::vector<std::byte> storage_;
  std::span<std::byte> span_;
};

void run_op(const Case& c, const Inputs& in, const CaseViews& views, const Exec& exec) {
  switch (c.problem.op) {
    case Op::append:
      return decode_all(c, in, views, exec);
    case Op::forward:
      return attention_forward(views.in, views.out, options(c), exec);
    default:
      return attention_backward(views.in, views.grads, options(c), exec);
  }
}

// Of this one call, where its problem may need more.
std::size_t bytes_of_call(const Case& c, const CaseViews& views, const Exec& exec) {
  switch (c.problem.op) {
    case Op::append:
      return workspace_bytes(c.problem, exec);
    case Op::forward:
      return workspace_bytes(views.in, views.out, options(c), exec);
    default:
      return workspace_bytes(views.in, views.grads, options(c), exec);
  }
}

// (c, C) for the backward of a case that reads them, by the reference.
TensorSet make_saved(const Case& c, const Inputs& in, Parallel* parallel) {
  TensorSet outputs;
  if (c.problem.op != Op::backward || !c.saved) return outputs;
  Case forward = c;
  forward.problem.op = Op::forward;
  outputs = make_outputs(forward, in, c.problem.dtype);
  run_op(forward, in, host_views(in, outputs), {.parallel = parallel, .kernel = "reference"});
  return outputs;
}

// Empty when the kernel takes the problem.
std::string refusal(const Problem& problem, const std::string& kernel) {
  for (const auto& candidate : explain(problem).candidates) {
    if (candidate.kernel == kernel) return candidate.refusal;
  }
  return fmt::format("there is no kernel '{}' for {}", kernel, to_string(problem.op));
}

void run_on_host(const Case& c, const Inputs& in, TensorSet& outputs, TensorSet& saved, Exec exec) {
  CaseViews views = host_views(in, outputs);
  views.grads.saved = {saved.view("key_lse"), saved.view("channel_values")};
  const PoisonedWorkspace workspace(bytes_of_call(c, views, exec));
  exec.workspace = workspace.span();
  run_op(c, in, views, exec);
}

void run_on_device(const Case& c, const Inputs& in, TensorSet& outputs, TensorSet& saved,
                   Exec exec) {
  const Device device = c.problem.device;
  DeviceData data(device, in, outputs);
  CaseViews views = data.views();
  // Read alone, though its views could be written.
  const auto writable = [](const ConstView& v) {
    return View{const_cast<void*>(v.data), v.dtype, v.device, v.shape, v.stride};
  };
  if (saved.has("key_lse")) {
    views.grads.saved = {writable(data.copy(saved.at("key_lse"))),
                         writable(data.copy(saved.at("channel_values")))};
  }
  const DeviceMemory workspace(device, bytes_of_call(c, views, exec));
  exec.workspace = workspace.span();
  run_op(c, in, views, exec);
  data.fetch();
  if (!workspace.guards_untouched()) {
    throw Error(ErrorCode::internal, "the kernel wrote before or behind its workspace");
  }
}

CaseResult skipped(const std::string& kernel, const std::string& why) {
  CaseResult result;
  result.kernel = kernel;
  result.text = why;
  result.verdict = Verdict::skipped;
  return result;
}

bool uses_tensor_cores(const std::string& kernel) {
  return kernel.starts_with("cuda-tiled") || kernel.starts_with("cuda-sm90") ||
         kernel == "cuda-padded" || kernel == "cuda-parts";
}

// Whether products have operands of the tensors' type.
bool has_narrow_operands(const Problem& p, const std::string& kernel) {
  return unit_roundoff(p.dtype) > unit_roundoff(DType::f32) &&
         (uses_tensor_cores(kernel) || kernel == "cpu-avx512-bf16");
}

// Gradients of weights sum g x over a part x of o, and those of scales q dq, where x and dq were
// stored in 16 bits (tensor cores) or made of weights rounded to bf16 (cpu-avx512-bf16). Where the
// result is one number, the error of the plain evaluation is one sample, which bounds nothing:
// hence a term for so many roundings.
double rounded_terms(const Case& c, const std::string& kernel, const TensorSet::Entry& entry) {
  const Problem& p = c.problem;
  if (!has_narrow_operands(p, kernel)) return 0;
  // With gradients of scales other kernels compute in f32, and so do plain ones of tensors with
  // gaps.
  const bool stored = uses_tensor_cores(kernel) && c.layout != Layout::gaps;
  double terms = 0;
  if (entry.name == "dmix" || entry.name.ends_with("_weight")) {
    if (c.weight_gradients || stored) {
      terms = static_cast<double>(p.batch * p.heads * p.tokens * p.dim_v);
    }
  } else if (stored && p.dtype == DType::bf16) {
    if (entry.name == "dalpha") {
      terms = static_cast<double>(p.batch * p.heads * p.tokens * p.dim);
    } else if (entry.name == "dbeta") {
      terms = static_cast<double>(p.batch * p.heads_k * p.tokens_k * p.dim);
    }
  }
  for (const std::int64_t size : entry.tensor.shape()) terms /= static_cast<double>(size);
  return terms;
}

CaseResult judge(const Case& c, const Inputs& in, const Truth& truth, TensorSet& saved,
                 const std::string& kernel, Parallel* parallel) {
  CaseResult result;
  result.kernel = kernel;
  TensorSet outputs = make_outputs(c, in, c.problem.dtype);
  try {
    const Exec exec{.parallel = parallel, .kernel = kernel};
    if (c.problem.device.kind == DeviceKind::cpu) {
      run_on_host(c, in, outputs, saved, exec);
    } else {
      run_on_device(c, in, outputs, saved, exec);
    }
  } catch (const Error& error) {
    result.verdict = Verdict::failed;
    result.text = error.what();
    return result;
  }
  const Operands operands =
      has_narrow_operands(c.problem, kernel) ? Operands::narrow : Operands::f32;
  for (const TensorSet::Entry& entry : outputs.entries()) {
    const Comparison comparison = compare(
        entry.name, entry.tensor, truth.reference.at(entry.name), truth.plain.values.at(entry.name),
        truth.plain.sizes.at(entry.name), truth.plain.exponent,
        {operands, rounded_terms(c, kernel, entry), unit_roundoff(c.problem.dtype)});
    result.text += (result.text.empty() ? "" : "\n") + to_string(comparison);
    result.worst = std::max(result.worst, comparison.ratio());
    if (!comparison.passed()) result.verdict = Verdict::failed;
  }
  return result;
}

}  // namespace

Truth make_truth(const Case& c, Parallel* parallel) {
  const Inputs in = make_inputs(c, DType::f64);
  const bool decoding = c.problem.op == Op::append;
  const Case run = decoding ? causal_case(c) : c;
  Truth truth;
  truth.reference = make_outputs(run, in, DType::f64);
  run_op(run, in, host_views(in, truth.reference), {.parallel = parallel, .kernel = "reference"});
  truth.plain = evaluate_plain(run, in, parallel);
  for (TensorSet* set : {&truth.reference, &truth.plain.values, &truth.plain.sizes}) {
    if (decoding) zero_rows_past_lengths(in, set->at("o"));
  }
  return truth;
}

std::vector<CaseResult> run_case(const Case& c, std::span<const std::string> kernels,
                                 Parallel* parallel) {
  std::vector<CaseResult> results;
  // The truth costs more than all kernels together: it is made for the first that takes the case.
  std::optional<Truth> truth;
  std::optional<Inputs> in;
  TensorSet saved;
  for (const std::string& kernel : kernels) {
    if (const std::string why = refusal(c.problem, kernel); !why.empty()) {
      results.push_back(skipped(kernel, why));
      continue;
    }
    if (!truth) {
      truth.emplace(make_truth(c, parallel));
      in.emplace(make_inputs(c, c.problem.dtype));
      saved = make_saved(c, *in, parallel);
    }
    results.push_back(judge(c, *in, *truth, saved, kernel, parallel));
  }
  return results;
}

}  // namespace lln::conformance
