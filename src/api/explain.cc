// Choice of a kernel, the reasons behind it, and what a problem costs at the least.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "api/dispatch.h"
#include "cuda/host.h"
#include "lln/error.h"
#include "lln/problem.h"

namespace lln {
namespace {

// Benchmarks run forward and backward for `train`; the backward decides what is supported.
Op kernel_op(Op op) { return op == Op::train ? Op::backward : op; }

Problem with_op(Problem problem, Op op) {
  problem.op = op;
  return problem;
}

// Pairs of query and key that the block-diagonal part or softmax weighs, per head.
double weighed_pairs(const Problem& p) {
  const auto tokens = static_cast<double>(p.tokens);
  // Of packed sequences the equally long ones have the fewest pairs.
  const double keys =
      p.kind == Kind::softmax
          ? static_cast<double>(p.tokens_k) /
                static_cast<double>(p.packed ? std::max<std::int64_t>(p.sequences, 1) : 1)
          : static_cast<double>(std::min(p.diag_block, std::max<std::int64_t>(p.tokens_k, 1)));
  const bool causal = p.causal || p.op == Op::append;
  return causal ? tokens * (keys + 1) / 2 : tokens * keys;
}

// Rows of q and of k over all heads and sequences, and the sizes beside them.
struct Sizes {
  explicit Sizes(const Problem& p)
      : q_rows(static_cast<double>(p.batch * p.heads) * static_cast<double>(p.tokens)),
        k_rows(static_cast<double>(p.batch * p.heads_k) * static_cast<double>(p.tokens_k)),
        d(static_cast<double>(p.dim)),
        dv(static_cast<double>(p.dim_v)),
        bytes(static_cast<double>(size_of(p.dtype))),
        pairs(p.kind == Kind::lln ? 0 : static_cast<double>(p.batch * p.heads) * weighed_pairs(p)) {
  }
  double q_rows, k_rows, d, dv, bytes;
  double pairs;  // that the block-diagonal part or softmax weighs
};

// Of one state of every sequence and key head, in f32 (f64 with f64 tensors).
double state_bytes(const Problem& p) {
  const double numbers = static_cast<double>(p.sequences * p.heads_k) * static_cast<double>(p.dim) *
                         static_cast<double>(p.dim_v + 1);
  return numbers * (p.dtype == DType::f64 ? 8 : 4);
}

Cost forward_cost(const Problem& p) {
  const Sizes s(p);
  Cost cost;
  cost.bytes = (s.q_rows + s.k_rows) * (s.d + s.dv) * s.bytes;
  if (p.state) cost.bytes += state_bytes(p);
  if (p.has_lln()) cost.flops += 2 * (s.q_rows + s.k_rows) * s.d * s.dv;
  cost.flops += 2 * s.pairs * (s.d + s.dv);
  return cost;
}

Cost backward_cost(const Problem& p) {
  const Sizes s(p);
  Cost cost;
  cost.bytes = (s.q_rows * (2 * s.d + s.dv) + s.k_rows * 2 * (s.d + s.dv)) * s.bytes;
  if (p.state) cost.bytes += 3 * state_bytes(p);  // the state, its gradient, that of all keys
  if (p.has_lln()) cost.flops += 4 * (s.q_rows + s.k_rows) * s.d * s.dv;
  cost.flops += 2 * s.pairs * (3 * s.d + 2 * s.dv);
  return cost;
}

// Decoding reads the f32 state of every key head, and writes it where it adds keys; besides, the
// tokens are read once.
Cost decode_cost(const Problem& p) {
  const double state = static_cast<double>(p.batch) * static_cast<double>(p.heads_k) *
                       static_cast<double>(p.dim) * static_cast<double>(p.dim_v + 2) * 4;
  Cost cost = forward_cost(p);
  cost.bytes += p.tokens_k > 0 ? 2 * state : state;
  return cost;
}

// Why a kernel does not take a problem; empty when it does.
std::string refusal_of(const Kernel& kernel, const Problem& problem) {
  if (kernel.device == DeviceKind::cuda) {
    if (problem.device.kind != DeviceKind::cuda) {
      return "runs on cuda, the tensors are on " + to_string(problem.device);
    }
    if (std::string refusal = cuda::device_refusal(problem.device.index); !refusal.empty()) {
      return refusal;
    }
  }
  if (problem.is_piece() && !kernel.takes_pieces) {
    return "takes no pieces of a sequence: no state of other keys or its gradient, no block "
           "origins";
  }
  return kernel.refusal(problem);
}

std::string no_kernel_text(const Problem& problem) {
  std::string text = fmt::format("no kernel takes {}", to_string(problem));
  const auto list = kernels(kernel_op(problem.op));
  if (list.empty()) text += fmt::format(": this build has none for {}", to_string(problem.op));
  if (const std::string none = cuda::absence();
      problem.device.kind == DeviceKind::cuda && !none.empty()) {
    text += fmt::format(": this build has no CUDA kernels ({})", none);
  }
  for (const Kernel& kernel : list) {
    text += fmt::format("; {}: {}", kernel.name, refusal_of(kernel, problem));
  }
  return text;
}

}  // namespace

const Kernel& choose_kernel(const Problem& asked, std::string_view forced) {
  const Problem problem = with_op(asked, kernel_op(asked.op));
  const auto list = kernels(problem.op);
  if (forced.empty()) {
    for (const Kernel& kernel : list) {
      if (refusal_of(kernel, problem).empty()) return kernel;
    }
    throw Error(ErrorCode::unsupported, no_kernel_text(problem));
  }
  for (const Kernel& kernel : list) {
    if (kernel.name != forced) continue;
    const std::string refusal = refusal_of(kernel, problem);
    if (refusal.empty()) return kernel;
    throw Error(ErrorCode::unsupported,
                fmt::format("kernel {} does not take {}: {}", forced, to_string(problem), refusal));
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("unknown kernel '{}' for {}: expected one of {}", forced,
                          to_string(asked), fmt::join(kernel_names(problem.op), ", ")));
}

std::vector<std::string> kernel_names(Op op) {
  std::vector<std::string> names;
  for (const Kernel& kernel : kernels(kernel_op(op))) names.push_back(kernel.name);
  return names;
}

std::vector<std::string> kernel_names(Op op, DeviceKind device) {
  std::vector<std::string> names;
  for (const Kernel& kernel : kernels(kernel_op(op))) {
    if (kernel.device == device) names.push_back(kernel.name);
  }
  return names;
}

std::size_t workspace_bytes(const Problem& problem, const Exec& exec) {
  const int workers = worker_count(exec.parallel);
  const auto bytes = [&](const Problem& p) {
    return choose_kernel(p, exec.kernel).workspace_bytes(p, workers);
  };
  if (problem.op != Op::train) return bytes(problem);
  return std::max(bytes(with_op(problem, Op::forward)), bytes(with_op(problem, Op::backward)));
}

Cost minimal_cost(const Problem& problem) {
  switch (problem.op) {
    case Op::forward:
      return forward_cost(problem);
    case Op::backward:
      return backward_cost(problem);
    case Op::train: {
      const Cost forward = forward_cost(problem);
      const Cost backward = backward_cost(problem);
      return {forward.bytes + backward.bytes, forward.flops + backward.flops};
    }
    case Op::append:
    case Op::step:
      return decode_cost(problem);
  }
  return {};
}

Explanation explain(const Problem& problem, const Exec& exec) {
  Explanation explanation;
  explanation.problem = problem;
  explanation.cost = minimal_cost(problem);
  if (!exec.kernel.empty()) choose_kernel(problem, exec.kernel);  // an unknown name is an error
  const Problem run = with_op(problem, kernel_op(problem.op));
  for (const Kernel& kernel : kernels(run.op)) {
    std::string refusal = refusal_of(kernel, run);
    if (!exec.kernel.empty() && kernel.name != exec.kernel) {
      refusal = fmt::format("kernel {} is forced", exec.kernel);
    }
    if (refusal.empty() && explanation.chosen.empty()) explanation.chosen = kernel.name;
    explanation.candidates.push_back({kernel.name, std::move(refusal)});
  }
  if (!explanation.chosen.empty()) explanation.workspace_bytes = workspace_bytes(problem, exec);
  return explanation;
}

std::string to_string(const Explanation& e) {
  std::string text = fmt::format("problem    {}\n", to_string(e.problem));
  if (e.candidates.empty()) {
    text +=
        fmt::format("kernel     none: this build has no kernel for {}\n", to_string(e.problem.op));
  }
  std::size_t width = 12;
  for (const auto& candidate : e.candidates) width = std::max(width, candidate.kernel.size());
  bool found = false;
  for (const auto& [name, refusal] : e.candidates) {
    const char* verdict = !refusal.empty() ? "no" : found ? "could" : "runs";
    found = found || refusal.empty();
    text += fmt::format("kernel     {:<{}} {:<6}{}\n", name, width, verdict, refusal);
  }
  if (const std::string none = cuda::absence();
      e.problem.device.kind == DeviceKind::cuda && !none.empty()) {
    text += fmt::format("cuda       not built in: {}\n", none);
  }
  text += fmt::format("workspace  {} bytes\n", e.workspace_bytes);
  text +=
      fmt::format("at least   {:.4g} bytes of memory traffic, {:.4g} floating-point operations\n",
                  e.cost.bytes, e.cost.flops);
  return text;
}

}  // namespace lln
