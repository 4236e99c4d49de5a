// lln check: the case table on this machine, every kernel against the f64 reference.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>

#include "conformance/cases.h"
#include "conformance/random_cases.h"
#include "conformance/run.h"
#include "lln/error.h"
#include "lln/version.h"
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
  std::string device = "cpu";
  bool quick = false;
  std::int64_t random = 0;
  std::uint64_t seed = 0;
  std::string slice;  // I/N
  bool verbose = false;
  int threads = 0;
  bool json = false;
};

struct Tally {
  int passed = 0, failed = 0, skipped = 0;
  Json results = Json::array();  // failures; with --verbose everything
};

// As the text of a problem has it: cpu, cuda or cuda:INDEX.
Device chosen_device(const Request& request) {
  try {
    return parse_problem("forward:f32:" + request.device + ":n1d1:lln").device;
  } catch (const Error&) {
    throw UsageError(
        fmt::format("unknown device '{}': expected cpu, cuda or cuda:INDEX", request.device));
  }
}

// On a device that cannot be used every case would be skipped, which looks like success.
void check_device(Device device) {
  if (device.kind == DeviceKind::cpu) return;
  const BuildInfo info = build_info();
  const auto index = static_cast<std::size_t>(device.index);
  std::string reason;
  for (const BuildInfo::Part& part : info.parts) {
    if (part.name == "cuda" && !part.built) reason = "CUDA is not built in: " + part.reason;
  }
  if (reason.empty() && info.cuda.devices.empty()) reason = info.cuda.no_devices;
  if (reason.empty() && index >= info.cuda.devices.size()) {
    reason = fmt::format("this machine has {}", info.cuda.devices.size());
  }
  if (reason.empty()) reason = info.cuda.devices[index].refusal;
  if (reason.empty()) return;
  throw Error(ErrorCode::device,
              fmt::format("device {} cannot be used: {}", to_string(device), reason));
}

struct Slice {
  std::size_t first = 0, step = 1;
};

Slice chosen_slice(const std::string& text) {
  if (text.empty()) return {};
  Slice slice;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, slice.first);
  const bool parted = first.ec == std::errc() && first.ptr != end && *first.ptr == '/';
  const auto step = std::from_chars(parted ? first.ptr + 1 : end, end, slice.step);
  if (!parted || step.ec != std::errc() || step.ptr != end || slice.first >= slice.step) {
    throw UsageError(fmt::format("unknown slice '{}': expected I/N with I from 0 to N - 1", text));
  }
  return slice;
}

std::vector<Case> chosen_cases(const Request& request) {
  const Slice slice = chosen_slice(request.slice);
  std::vector<Case> cases = conformance::on_device(
      request.random > 0 ? conformance::random_cases(request.random, request.seed)
      : request.quick    ? conformance::quick_cases()
                         : conformance::cases(),
      chosen_device(request));
  std::erase_if(
      cases, [&](const Case& c) { return to_string(c).find(request.filter) == std::string::npos; });
  if (cases.empty()) {
    throw UsageError(fmt::format("no case contains '{}': without FILTER --verbose lists them all",
                                 request.filter));
  }
  std::vector<Case> chosen;
  for (std::size_t i = slice.first; i < cases.size(); i += slice.step) chosen.push_back(cases[i]);
  return chosen;
}

std::vector<std::string> chosen_kernels(const Request& request, Op op) {
  std::vector<std::string> names = kernel_names(op, chosen_device(request).kind);
  if (request.kernel.empty()) return names;
  std::erase_if(names, [&](const std::string& name) { return name != request.kernel; });
  return names;
}

void check_kernel_name(const Request& request) {
  std::string all;
  for (const Op op : {Op::forward, Op::backward, Op::append}) {
    if (request.kernel.empty() || !chosen_kernels(request, op).empty()) return;
    all += fmt::format("{}{} has {}", all.empty() ? "" : "; ", to_string(op),
                       fmt::join(kernel_names(op, chosen_device(request).kind), ", "));
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("unknown kernel '{}' for {}: {}", request.kernel, request.device, all));
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
  check_device(chosen_device(request));
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
  command->add_option("--device", request->device, "Where the tensors are: cpu, cuda or cuda:INDEX")
      ->capture_default_str();
  CLI::Option* const quick =
      command->add_flag("--quick", request->quick, "A small part of the table");
  CLI::Option* const random =
      command
          ->add_option("--random", request->random, "So many cases that nobody wrote down, instead")
          ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
          ->excludes(quick);
  command->add_option("--seed", request->seed, "Of random cases")
      ->needs(random)
      ->capture_default_str();
  command->add_option("--slice", request->slice,
                      "I/N: every Nth case from the Ith on, for N runs at a time");
  command->add_flag("--verbose", request->verbose, "Print every case, not only failures");
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(
      help_footer("  lln check --quick\n"
                  "  lln check lln+diag64:causal --verbose\n"
                  "  lln check bf16 --kernel reference\n"
                  "  lln check --device cuda\n"
                  "  lln check --random 1000 --seed 7\n"
                  "  lln check --device cuda --slice 3/16 --threads 1\n\n"
                  "A kernel that does not take a case is skipped. The last line is\n"
                  "  N passed, M failed, K skipped\n"));
  return {command, [request] { return run(*request); }};
}

}  // namespace lln::cli
