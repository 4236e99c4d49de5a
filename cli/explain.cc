// lln explain: which kernel would run a problem, and why not the others.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "lln/error.h"
#include "lln/problem.h"
#include "verb.h"

namespace lln::cli {
namespace {

struct Request {
  std::string problem;
  int threads = 0;
  bool json = false;
};

// As many workers as a ThreadPool of that size has, without the threads: nothing is run on them.
class WorkerCount final : public Parallel {
 public:
  explicit WorkerCount(int threads)
      : workers_(threads > 0
                     ? threads
                     : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()))) {}
  int workers() const noexcept override { return workers_; }
  void run(std::int64_t /*tasks*/, Task /*task*/, void* /*context*/) override {
    throw std::logic_error("lln explain runs no tasks");
  }

 private:
  int workers_;
};

Json to_json(const Explanation& e) {
  Json candidates = Json::array();
  for (const Explanation::Candidate& c : e.candidates) {
    candidates.push_back(
        {{"kernel", c.kernel}, {"takes_it", c.refusal.empty()}, {"refusal", c.refusal}});
  }
  return {{"problem", to_string(e.problem)},
          {"kernel", e.chosen.empty() ? Json(nullptr) : Json(e.chosen)},
          {"candidates", candidates},
          {"workspace_bytes", e.workspace_bytes},
          {"minimal_bytes", e.cost.bytes},
          {"minimal_flops", e.cost.flops}};
}

int run(const Request& request) {
  Problem problem;
  try {
    problem = parse_problem(request.problem);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  WorkerCount workers(request.threads);
  const Explanation explanation = explain(problem, {.parallel = &workers});
  if (request.json) {
    print_json(to_json(explanation));
  } else {
    fmt::print("{}", to_string(explanation));
  }
  return explanation.chosen.empty() ? kUnsupported : kOk;
}

}  // namespace

Verb add_explain(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("explain", "Which kernel runs a problem, and why not the others");
  const auto request = std::make_shared<Request>();
  command
      ->add_option("PROBLEM", request->problem,
                   "op:dtype:device:shape:kind[:flags]\n"
                   "op     forward | backward | append | step | train\n"
                   "dtype  f32 | f16 | bf16 | f64\n"
                   "device cpu | cuda | cuda:INDEX\n"
                   "shape  b batch, h heads, k key heads, n tokens, m key tokens,\n"
                   "       d channels, v channels of v; k, m, v may be omitted\n"
                   "kind   lln | diagB | lln+diagB | softmax (B: block size)\n"
                   "flags  causal, packed, masked,\n"
                   "       feature=exp|elu|relu|softplus|powerP")
      ->required();
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(
      help_footer("  lln explain forward:f32:cpu:b1h12n16384d64:lln\n"
                  "  lln explain backward:bf16:cpu:b2h16k4n4096d64:lln+diag64:causal\n"));
  return {command, [request] { return run(*request); }};
}

}  // namespace lln::cli
