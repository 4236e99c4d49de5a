// lln demo: what linear cost means, shown on this machine in less than a minute. LLN+Diag and
// softmax attention on the same random input of growing length, and how exact both are; then
// decoding and moment matching, each in a file of its own.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "demo_concentration.h"
#include "demo_decode.h"
#include "io/bytes.h"
#include "lln/attention.h"
#include "lln/version.h"
#include "progress.h"
#include "verb.h"

namespace lln::cli {
namespace {

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kDim = 64;
constexpr std::int64_t kBlock = 64;
constexpr std::int64_t kFirstTokens = 512;
// Equal shares of moment matching for queries and keys of unit variance at 64 channels.
constexpr float kAlpha = 2.15F;
constexpr double kLongestCall = 5;     // seconds; a call that would take longer is not made
constexpr double kEnoughTiming = 0.2;  // seconds of repeated calls, the fastest counts

struct Request {
  std::int64_t max_tokens = 131072;
  int threads = 0;
  bool json = false;
};

struct Measurement {
  double seconds = 0;
  bool predicted = false;  // from the shorter input; the call was not made
  double bytes = 0;        // inputs, output and workspace
};

struct Row {
  std::int64_t tokens = 0;
  Measurement lln, softmax;
  double matrix_bytes = 0;  // an N x N matrix for each head
};

// q, k, v and o for the longest input; a shorter one is a view of the first tokens.
class Input {
 public:
  Input(std::int64_t tokens, Parallel& threads) : tokens_(tokens) {
    for (io::Bytes& tensor : tensors_) {
      tensor = io::Bytes(static_cast<std::size_t>(kHeads * tokens * kDim) * sizeof(float));
    }
    const auto fill = [](void* self, std::int64_t task, int) {
      static_cast<Input*>(self)->fill_head(task / kHeads, task % kHeads);
    };
    threads.run(3 * kHeads, fill, this);
  }

  AttentionInputs inputs(std::int64_t tokens) const {
    return {.q = tensor(0, tokens),
            .k = tensor(1, tokens),
            .v = tensor(2, tokens),
            .alpha = scalar(&kAlpha),
            .beta = scalar(&kAlpha)};
  }
  AttentionOutputs outputs(std::int64_t tokens) const { return {.o = tensor(3, tokens)}; }

 private:
  View tensor(std::size_t index, std::int64_t tokens) const {
    const Stride stride = {kHeads * tokens_ * kDim, tokens_ * kDim, kDim, 1};
    return view(const_cast<std::byte*>(tensors_[index].data()), DType::f32,
                {1, kHeads, tokens, kDim}, stride);
  }

  void fill_head(std::int64_t index, std::int64_t head) {
    std::mt19937 random(static_cast<std::uint32_t>(index * kHeads + head));
    std::normal_distribution<float> normal;
    auto* first = reinterpret_cast<float*>(tensors_[static_cast<std::size_t>(index)].data()) +
                  head * tokens_ * kDim;
    std::generate_n(first, tokens_ * kDim, [&] { return normal(random); });
  }

  std::int64_t tokens_;
  std::array<io::Bytes, 4> tensors_;
};

std::vector<double> to_double(const ConstView& v) {
  std::vector<double> values;
  for (std::int64_t h = 0; h < v.shape[1]; ++h) {
    for (std::int64_t n = 0; n < v.shape[2]; ++n) {
      const auto* row = static_cast<const float*>(v.data) + h * v.stride[1] + n * v.stride[2];
      values.insert(values.end(), row, row + v.shape[3]);
    }
  }
  return values;
}

AttentionOptions options_of(Kind kind) { return {.kind = kind, .diag_block = kBlock}; }

double time_call(const Input& input, std::int64_t tokens, Kind kind, const Exec& exec) {
  const AttentionInputs in = input.inputs(tokens);
  const AttentionOutputs out = input.outputs(tokens);
  double best = 0, total = 0;
  for (int call = 0; call == 0 || total < kEnoughTiming; ++call) {
    const auto start = std::chrono::steady_clock::now();
    attention_forward(in, out, options_of(kind), exec);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    total += seconds;
    best = call == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

// Times the call unless the growth seen so far says that it would take too long.
Measurement measure(const Input& input, std::int64_t tokens, Kind kind, const Exec& exec,
                    const std::vector<Row>& before, Measurement Row::*column) {
  Measurement m;
  const Problem problem =
      make_problem(input.inputs(tokens), input.outputs(tokens), options_of(kind));
  m.bytes = minimal_cost(problem).bytes + static_cast<double>(workspace_bytes(problem, exec));
  if (!before.empty()) {
    const Measurement& last = before.back().*column;
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

// Largest error relative to the largest output, against the reference in f64.
double exactness(const Input& input, std::int64_t tokens, Kind kind, const Exec& exec) {
  const AttentionInputs in = input.inputs(tokens);
  const AttentionOutputs out = input.outputs(tokens);
  attention_forward(in, out, options_of(kind), exec);

  const Shape shape = in.q.shape;
  const double alpha = kAlpha;
  const std::vector<double> q = to_double(in.q), k = to_double(in.k), v = to_double(in.v);
  std::vector<double> exact(q.size());
  const auto wide = [&](const std::vector<double>& values) {
    return view(static_cast<const void*>(values.data()), DType::f64, shape);
  };
  const ConstView scale = view(static_cast<const void*>(&alpha), DType::f64, {1, 1, 1, 1});
  attention_forward({.q = wide(q), .k = wide(k), .v = wide(v), .alpha = scale, .beta = scale},
                    {.o = view(static_cast<void*>(exact.data()), DType::f64, shape)},
                    options_of(kind), {.parallel = exec.parallel, .kernel = "reference"});
  double error = 0, largest = 0;
  const std::vector<double> found = to_double(out.o);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error = std::max(error, std::abs(found[i] - exact[i]));
    largest = std::max(largest, std::abs(exact[i]));
  }
  return error / largest;
}

struct Findings {
  std::vector<Row> rows;
  std::string kernel;
  int threads = 0;
  double lln_error = 0, softmax_error = 0;
  DecodeFindings decoding;
  std::vector<ConcentrationRow> concentration;
};

Findings measure_all(const Request& request) {
  Findings found;
  ThreadPool threads(request.threads);
  Progress progress("lln demo: preparing input");
  const Exec exec{.parallel = &threads};
  std::int64_t longest = kFirstTokens;
  while (longest * 2 <= request.max_tokens) longest *= 2;
  const Input input(longest, threads);

  progress.stage("lln demo: comparing with the reference");
  found.lln_error = exactness(input, kFirstTokens, Kind::lln_diag, exec);
  found.softmax_error = exactness(input, kFirstTokens, Kind::softmax, exec);
  for (std::int64_t tokens = kFirstTokens; tokens <= longest; tokens *= 2) {
    progress.stage(fmt::format("lln demo: {} tokens", tokens));
    Row row;
    row.tokens = tokens;
    row.lln = measure(input, tokens, Kind::lln_diag, exec, found.rows, &Row::lln);
    row.softmax = measure(input, tokens, Kind::softmax, exec, found.rows, &Row::softmax);
    row.matrix_bytes = static_cast<double>(kHeads * sizeof(float)) * static_cast<double>(tokens) *
                       static_cast<double>(tokens);
    found.rows.push_back(row);
  }
  progress.stage("lln demo: decoding");
  found.decoding = measure_decoding(input.inputs(longest), input.outputs(longest).o, kBlock, exec);
  progress.stage("lln demo: moment matching");
  found.concentration = measure_concentration(threads);
  found.threads = threads.workers();
  found.kernel = explain(make_problem(input.inputs(longest), input.outputs(longest),
                                      options_of(Kind::lln_diag)),
                         exec)
                     .chosen;
  return found;
}

std::string seconds_text(const Measurement& m) {
  if (!m.predicted) return time_text(m.seconds);
  return fmt::format("~{:.{}f} s", m.seconds, m.seconds < 10 ? 1 : 0);
}

std::string speed_up_text(const Row& row) {
  const double times = row.softmax.seconds / row.lln.seconds;
  return fmt::format("{}{:.{}f}x", row.softmax.predicted || row.lln.predicted ? "~" : "", times,
                     times < 10 ? 1 : 0);
}

std::string to_text(const Findings& f, const std::string& program) {
  std::string text = fmt::format(
      "LLN+Diag against softmax attention on this machine: forward, f32, {} heads of\n"
      "{} channels, blocks of {} tokens, random input, {} thread{}, kernel {}.\n\n"
      "                 time of one call                  memory of one call\n"
      "   tokens    LLN+Diag    softmax  speed-up   LLN+Diag    softmax  N x N matrix\n",
      kHeads, kDim, kBlock, f.threads, f.threads == 1 ? "" : "s", f.kernel);
  for (const Row& row : f.rows) {
    text += fmt::format("  {:>7} {:>11} {:>10} {:>9} {:>10} {:>10} {:>13}\n", row.tokens,
                        seconds_text(row.lln), seconds_text(row.softmax), speed_up_text(row),
                        size_text(row.lln.bytes), size_text(row.softmax.bytes),
                        size_text(row.matrix_bytes));
  }
  text += fmt::format(
      "\n"
      "  speed-up      softmax over LLN+Diag; ~ is predicted from the row above, because\n"
      "                the call would take longer than {:.0f} s\n"
      "  memory        inputs, output and workspace; neither operation stores the N x N matrix\n"
      "                of attention weights, whose size is in the last column\n\n"
      "Largest error against the f64 reference at {} tokens, relative to the largest output\n"
      "(f32 rounds by 6e-08):  LLN+Diag {:.1e},  softmax {:.1e}.\n\n",
      kLongestCall, kFirstTokens, f.lln_error, f.softmax_error);
  text += to_text(f.decoding) + "\n" + to_text(f.concentration);
  text += fmt::format(
      "\nWhat to try next\n"
      "  {0} check --quick\n"
      "      every kernel on this machine against the f64 reference\n"
      "  {0} explain forward:bf16:cpu:b1h12n65536d64:lln+diag64:causal\n"
      "      which kernel runs a problem, its workspace, and why not the other kernels\n"
      "  {0} run --help\n"
      "      attention and its gradients on your own tensors, from a safetensors file\n",
      program);
  return text;
}

Json to_json(const Measurement& m) {
  return {{"seconds", m.seconds}, {"predicted", m.predicted}, {"bytes", m.bytes}};
}

Json to_json(const Findings& f) {
  Json rows = Json::array();
  for (const Row& row : f.rows) {
    rows.push_back({{"tokens", row.tokens},
                    {"lln_diag", to_json(row.lln)},
                    {"softmax", to_json(row.softmax)},
                    {"matrix_bytes", row.matrix_bytes}});
  }
  return {{"version", build_info().version},
          {"kernel", f.kernel},
          {"threads", f.threads},
          {"heads", kHeads},
          {"dim", kDim},
          {"diag_block", kBlock},
          {"rows", rows},
          {"relative_error", {{"lln_diag", f.lln_error}, {"softmax", f.softmax_error}}},
          {"decoding", to_json(f.decoding)},
          {"matching", to_json(f.concentration)}};
}

}  // namespace

Verb add_demo(CLI::App& program, const std::string& program_path) {
  CLI::App* command = program.add_subcommand(
      "demo", "LLN+Diag against softmax on random input: time, memory, exactness, decoding");
  const auto request = std::make_shared<Request>();
  command->add_option("--max-n", request->max_tokens, "Longest input in tokens")
      ->check(CLI::Range(kFirstTokens, std::int64_t{1} << 22))
      ->capture_default_str();
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(help_footer("  lln demo\n  lln demo --max-n 8192 --threads 1\n"));
  return {command, [request, program_path] {
            const Findings found = measure_all(*request);
            if (request->json) {
              print_json(to_json(found));
            } else {
              fmt::print("{}", to_text(found, program_path));
            }
            return kOk;
          }};
}

}  // namespace lln::cli
