// lln check: the case table on this machine, every kernel against the f64 reference.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "conformance/cases.h"
#include "conformance/run.h"
#include "lln/error.h"
#include "progress.h"
#include "verb.h"

namespace lln::cli {
namespace {

using conformance::Case;
using conformance::CaseResult;
using conformance::Verdict;

struct Request {
  std::string filter;
  std::string kernel;
  bool quick = false;
  bool verbose = false;
  int threads = 0;
  bool json = false;
};

struct Tally {
  int passed = 0, failed = 0, skipped = 0;
  Json results = Json::array();  // failures; with --verbose everything
};

std::vector<Case> chosen_cases(const Request& request) {
  std::vector<Case> cases = request.quick ? conformance::quick_cases() : conformance::cases();
  std::erase_if(
      cases, [&](const Case& c) { return to_string(c).find(request.filter) == std::string::npos; });
  if (cases.empty()) {
    throw UsageError(
        fmt::format("no case contains '{}': lln check --verbose lists them all", request.filter));
  }
  return cases;
}

std::vector<std::string> chosen_kernels(const Request& request, Op op) {
  std::vector<std::string> names = kernel_names(op);
  if (request.kernel.empty()) return names;
  std::erase_if(names, [&](const std::string& name) { return name != request.kernel; });
  return names;
}

void check_kernel_name(const Request& request) {
  if (!chosen_kernels(request, Op::forward).empty() ||
      !chosen_kernels(request, Op::backward).empty()) {
    return;
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("unknown kernel '{}': forward has {}; backward has {}", request.kernel,
                          fmt::join(kernel_names(Op::forward), ", "),
                          fmt::join(kernel_names(Op::backward), ", ")));
}

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::passed:
      return "passed";
    case Verdict::failed:
      return "failed";
    case Verdict::skipped:
      break;
  }
  return "skipped";
}

void judge(const Case& c, const CaseResult& result, const Request& request, Progress& progress,
           Tally& tally) {
  int& count = result.verdict == Verdict::passed   ? tally.passed
               : result.verdict == Verdict::failed ? tally.failed
                                                   : tally.skipped;
  ++count;
  if (result.verdict != Verdict::failed && !request.verbose) return;
  if (request.json) {
    tally.results.push_back({{"case", to_string(c)},
                             {"kernel", result.kernel},
                             {"verdict", name_of(result.verdict)},
                             {"error_over_tolerance", result.worst},
                             {"text", result.text}});
    return;
  }
  std::string text =
      fmt::format("{:<8}{:<12} {}", name_of(result.verdict), result.kernel, to_string(c));
  if (result.verdict == Verdict::passed) {
    text += fmt::format("  ({:.2f} of the tolerance)", result.worst);
  } else {
    text += "\n" + result.text;
  }
  progress.print(stdout, text + (text.ends_with('\n') ? "" : "\n"));
}

int run(const Request& request) {
  check_kernel_name(request);
  const std::vector<Case> cases = chosen_cases(request);
  ThreadPool threads(request.threads);
  Tally tally;
  {
    Progress progress("lln check");
    progress.step(static_cast<std::int64_t>(cases.size()));
    for (const Case& c : cases) {
      const std::vector<std::string> kernels = chosen_kernels(request, c.problem.op);
      for (const CaseResult& result : conformance::run_case(c, kernels, &threads)) {
        judge(c, result, request, progress, tally);
      }
      progress.advance();
    }
  }
  if (request.json) {
    print_json({{"passed", tally.passed},
                {"failed", tally.failed},
                {"skipped", tally.skipped},
                {"results", tally.results}});
  } else {
    fmt::print("{} passed, {} failed, {} skipped\n", tally.passed, tally.failed, tally.skipped);
  }
  return tally.failed == 0 ? kOk : kCheckFailed;
}

}  // namespace

Verb add_check(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "check", "Run the case table on this machine: every kernel against the f64 reference");
  const auto request = std::make_shared<Request>();
  command->add_option("FILTER", request->filter, "Only cases whose text contains this");
  command->add_option("--kernel", request->kernel, "Only this kernel; lln info lists them");
  command->add_flag("--quick", request->quick, "A small part of the table");
  command->add_flag("--verbose", request->verbose, "Print every case, not only failures");
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(
      help_footer("  lln check --quick\n"
                  "  lln check lln+diag64:causal --verbose\n"
                  "  lln check bf16 --kernel reference\n\n"
                  "A kernel that does not take a case is skipped. The last line is\n"
                  "  N passed, M failed, K skipped\n"));
  return {command, [request] { return run(*request); }};
}

}  // namespace lln::cli
