// lln run: attention on the tensors of files, forward or forward and backward, into another file.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention_file.h"
#include "interruption.h"
#include "io/npy.h"
#include "io/output_file.h"
#include "io/safetensors.h"
#include "lln/error.h"
#include "lln/version.h"
#include "npy_files.h"
#include "progress.h"
#include "scales.h"
#include "verb.h"

namespace lln::cli {
namespace {

struct Request {
  std::string input, output;
  std::string q, k, v, g;  // .npy files, in place of the input
  std::string kind = "lln+diag64";
  std::string feature = "exp";
  std::string layout = "bhnd";
  std::string kernel;
  std::optional<float> alpha, beta, mix;
  std::string matching;
  std::string calibration, layer;
  bool causal = false;
  bool backward = false;
  int threads = 0;
  bool json = false;
};

AttentionOptions options_of(const Request& request) {
  AttentionOptions options;
  try {
    parse_kind(request.kind, options.kind, options.diag_block);
    parse_feature(request.feature, options.feature, options.power);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  options.causal = request.causal;
  const bool has_lln = options.kind == Kind::lln || options.kind == Kind::lln_diag;
  const std::pair<const char*, bool> idle_flags[] = {
      {"--alpha", request.alpha && !has_lln},
      {"--beta", request.beta && !has_lln},
      {"--matching", !request.matching.empty() && !has_lln},
      {"--calibration", !request.calibration.empty() && !has_lln},
      {"--feature", options.feature != Feature::exp && !has_lln},
      {"--mix", request.mix && options.kind != Kind::lln_diag}};
  for (const auto& [flag, idle] : idle_flags) {
    if (idle) throw UsageError(fmt::format("{} plays no part in --kind {}", flag, request.kind));
  }
  return options;
}

bool is_npy(const std::string& path) { return path.ends_with(".npy"); }

// The .npy files by the names of their tensors; none where there is one file for all.
std::vector<std::pair<std::string, std::string>> npy_inputs(const Request& request) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& [name, path] : {std::pair<const char*, const std::string&>{"q", request.q},
                                   {"k", request.k},
                                   {"v", request.v},
                                   {"g", request.g}}) {
    if (!path.empty()) files.emplace_back(name, path);
  }
  return files;
}

void check_files(const Request& request) {
  const bool separate = !npy_inputs(request).empty();
  if (separate == !request.input.empty()) {
    throw UsageError("expected either IN or --q, --k and --v");
  }
  if (separate && (request.q.empty() || request.k.empty() || request.v.empty())) {
    throw UsageError("--q, --k and --v are given together");
  }
  if (is_npy(request.input)) {
    throw UsageError(fmt::format(
        "{}: IN is a safetensors file; .npy files are given as --q, --k and --v", request.input));
  }
  if (is_npy(request.output) && request.backward) {
    throw UsageError(
        fmt::format("-o {}: a .npy file holds one tensor, --backward writes several: use a "
                    "safetensors file",
                    request.output));
  }
}

std::unique_ptr<io::TensorSource> open_inputs(const Request& request) {
  if (request.input.empty()) return std::make_unique<NpyFiles>(npy_inputs(request));
  return std::make_unique<io::SafetensorsReader>(request.input);
}

// Everything that a call writes, by the names that the file gets.
class Results {
 public:
  Results(const AttentionFile& file, const AttentionOptions& options, const Request& request)
      : layout_(request.layout == "bnhd" ? FileLayout::bnhd : FileLayout::bhnd) {
    const AttentionInputs& in = file.inputs();
    const Shape o = {in.q.shape[0], in.q.shape[1], in.q.shape[2], in.v.shape[3]};
    out.o = add("o", make_tensor(in.q.dtype, o, layout_));
    for (const char* name : {"alpha", "beta"}) {
      if (const FileTensor* scale = file.tensor(name)) used_.emplace_back(name, scale);
    }
    if (!request.backward) return;
    if (options.kind == Kind::lln || options.kind == Kind::lln_diag) add_saved(in);
    grads.g = file.tensor("g")->view;
    grads.saved = out.saved;
    const std::pair<const char*, View*> gradients[] = {{"q", &grads.dq},
                                                       {"k", &grads.dk},
                                                       {"v", &grads.dv},
                                                       {"alpha", &grads.dalpha},
                                                       {"beta", &grads.dbeta},
                                                       {"mix", &grads.dmix},
                                                       {"lln_weight", &grads.dlln_weight},
                                                       {"diag_weight", &grads.ddiag_weight}};
    for (const auto& [name, gradient] : gradients) {
      const FileTensor* input = file.tensor(name);
      if (input != nullptr) *gradient = add(std::string("d") + name, make_like(*input));
    }
  }

  AttentionOutputs out;
  AttentionGradients grads;

  std::vector<io::TensorToWrite> to_write() const {
    std::vector<io::TensorToWrite> list;
    for (const auto& [name, tensor] : tensors_) list.push_back(tensor.to_write(name));
    for (const auto& [name, tensor] : used_) list.push_back(tensor->to_write(name));
    return list;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> list;
    for (const io::TensorToWrite& tensor : to_write()) list.push_back(tensor.name);
    return list;
  }

 private:
  View add(std::string name, FileTensor tensor) {
    tensors_.emplace_back(std::move(name), std::move(tensor));
    return tensors_.back().second.view;
  }

  // What the forward hands to the backward; not written.
  void add_saved(const AttentionInputs& in) {
    const std::int64_t sequences = in.cu_seqlens_q.given()
                                       ? std::max<std::int64_t>(in.cu_seqlens_q.count - 1, 0)
                                       : in.q.shape[0];
    const std::int64_t heads = in.k.shape[1], dim = in.q.shape[3], dim_v = in.v.shape[3];
    key_lse_ = make_tensor(DType::f32, {sequences, heads, 1, dim}, FileLayout::bhnd);
    values_ = make_tensor(DType::f32, {sequences, heads, dim, dim_v}, FileLayout::bhnd);
    out.saved = {key_lse_.view, values_.view};
  }

  FileLayout layout_;
  FileTensor key_lse_, values_;
  std::vector<std::pair<std::string, FileTensor>> tensors_;
  std::vector<std::pair<std::string, const FileTensor*>> used_;  // alpha and beta, of the file
};

struct Pass {
  Problem problem;
  std::string kernel;
  double seconds = 0;
};

template <class Call>
void time_pass(Pass& pass, const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  pass.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Both passes are checked, and the kernel, before anything is computed.
std::vector<Pass> check_passes(const AttentionFile& file, const Results& results,
                               const AttentionOptions& options, const Request& request,
                               const Exec& exec) {
  const AttentionInputs& in = file.inputs();
  std::vector<Pass> passes = {{make_problem(in, results.out, options), {}}};
  if (request.backward) passes.push_back({make_problem(in, results.grads, options), {}});
  for (Pass& pass : passes) {
    // workspace_bytes refuses with the reasons of all kernels, where explain only lists them.
    workspace_bytes(pass.problem, exec);
    pass.kernel = explain(pass.problem, exec).chosen;
  }
  return passes;
}

void compute(std::vector<Pass>& passes, const AttentionFile& file, const Results& results,
             const AttentionOptions& options, const Exec& exec, Progress& progress) {
  const AttentionInputs& in = file.inputs();
  progress.stage("lln run: forward");
  time_pass(passes[0], [&] { attention_forward(in, results.out, options, exec); });
  if (passes.size() > 1) {
    progress.stage("lln run: backward");
    time_pass(passes[1], [&] { attention_backward(in, results.grads, options, exec); });
  }
}

void write(const Results& results, const std::vector<Pass>& passes, const Scales& scales,
           const Request& request) {
  io::Metadata metadata = {{"producer", fmt::format("lln {}", build_info().version)}};
  for (const Pass& pass : passes) {
    const std::string op = to_string(pass.problem.op);
    metadata[op + "_problem"] = to_string(pass.problem);
    metadata[op + "_kernel"] = pass.kernel;
  }
  if (scales.mode) metadata["matching"] = to_string(*scales.mode);
  const NotedSignals signals;
  if (is_npy(request.output)) {
    const io::TensorToWrite o = results.to_write().front();
    io::write_npy(request.output, o.dtype, o.shape, o.data, [&] { return signals.arrived(); });
    return;
  }
  io::write_safetensors(request.output, results.to_write(), metadata,
                        [&] { return signals.arrived(); });
}

// What there is to report when all is written.
struct Outcome {
  std::string input;
  std::vector<Pass> passes;
  Scales scales;
  std::vector<std::string> tensors;
  std::vector<std::string> warnings;
};

Outcome read_compute_write(const AttentionOptions& options, std::optional<Matching> matching,
                           const CalibratedLayer* calibrated, const Request& request) {
  Progress progress("lln run: reading");
  Outcome outcome;
  const auto warn = [&](const std::string& text) {
    progress.print(stderr, fmt::format("lln: warning: {}\n", text));
    outcome.warnings.push_back(text);
  };
  const std::unique_ptr<io::TensorSource> source = open_inputs(request);
  outcome.input = source->path();
  AttentionFile file(*source,
                     {.kind = options.kind,
                      .layout = request.layout == "bnhd" ? FileLayout::bnhd : FileLayout::bhnd,
                      .backward = request.backward,
                      .causal = options.causal,
                      .feature = options.feature,
                      .matching = matching,
                      .alpha = request.alpha,
                      .beta = request.beta,
                      .mix = request.mix,
                      .calibrated = calibrated});
  for (const std::string& text : file.warnings()) warn(text);
  ThreadPool threads(request.threads);
  CountedTasks tasks(threads, progress);
  const Exec exec{.parallel = &tasks, .kernel = request.kernel};
  Results results(file, options, request);
  const std::string obstacle =
      is_npy(request.output) ? io::npy_obstacle(results.to_write().front().dtype) : "";
  if (!obstacle.empty()) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}: {}", request.output, obstacle));
  }
  outcome.passes = check_passes(file, results, options, request, exec);
  progress.stage("lln run: moments");
  outcome.scales = {file.matching(), file.match(options, exec)};
  if (!outcome.scales.report.clamped.empty()) {
    warn(clamped_text(outcome.scales.report.clamped, *outcome.scales.mode));
  }
  compute(outcome.passes, file, results, options, exec, progress);
  outcome.tensors = is_npy(request.output) ? std::vector<std::string>{"o"} : results.names();
  progress.stage("lln run: writing");
  write(results, outcome.passes, outcome.scales, request);
  return outcome;
}

void report(const Outcome& outcome, const Request& request) {
  if (request.json) {
    Json json = {
        {"input", outcome.input}, {"output", request.output}, {"tensors", outcome.tensors}};
    for (const Pass& pass : outcome.passes) {
      json[to_string(pass.problem.op)] = {
          {"problem", to_string(pass.problem)}, {"kernel", pass.kernel}, {"seconds", pass.seconds}};
    }
    json["matching"] = to_json(outcome.scales);
    json["warnings"] = outcome.warnings;
    print_json(json);
    return;
  }
  for (const Pass& pass : outcome.passes) {
    fmt::print("{}  {}  {}\n", to_string(pass.problem), pass.kernel, time_text(pass.seconds));
  }
  if (outcome.scales.mode) fmt::print("alpha and beta: {}\n", to_string(*outcome.scales.mode));
  fmt::print("wrote {}: {}\n", request.output, fmt::join(outcome.tensors, ", "));
}

// alpha and beta of --calibration; nothing without it.
std::optional<CalibratedLayer> calibrated_layer(const Request& request) {
  if (request.calibration.empty()) {
    if (!request.layer.empty()) throw UsageError("--layer names a layer of --calibration FILE");
    return std::nullopt;
  }
  if (request.alpha || request.beta ||
      (!request.matching.empty() && request.matching != "frozen")) {
    throw UsageError(
        "--calibration gives alpha and beta: leave out --alpha, --beta and --matching");
  }
  return load_calibration(request.calibration).layer(request.layer);
}

int run(const Request& request) {
  const AttentionOptions options = options_of(request);
  check_files(request);
  const std::optional<Matching> matching = requested_matching(
      request.matching, request.alpha.has_value() || request.beta.has_value(), options);
  std::vector<std::string> inputs = {request.input, request.calibration};
  for (const auto& [name, path] : npy_inputs(request)) inputs.push_back(path);
  check_output("-o", request.output, inputs);
  const std::optional<CalibratedLayer> calibrated = calibrated_layer(request);
  report(read_compute_write(options, matching, calibrated ? &*calibrated : nullptr, request),
         request);
  return kOk;
}

const char* const kFileHelp =
    "  lln run in.safetensors -o out.safetensors\n"
    "  lln run in.safetensors -o out.safetensors --alpha 2.1 --beta 2.1\n"
    "  lln run in.safetensors -o out.safetensors --kind lln --causal --backward\n"
    "  lln run in.safetensors -o out.safetensors --calibration calibration.json --layer enc.2\n"
    "  lln run --q q.npy --k k.npy --v v.npy -o o.npy --alpha 2.1 --beta 2.1\n\n"
    "Tensors of IN (B batch, H heads, Hk key heads, N tokens, Nk key tokens, S sequences):\n"
    "  q [B,H,N,D]  k [B,Hk,Nk,D]  v [B,Hk,Nk,Dv]      F32, F16 or BF16\n"
    "  g [B,H,N,Dv]                                    dL/do, with --backward\n"
    "  alpha [H] or [S,H]  beta [Hk] or [S,Hk]         F32; or --alpha, --beta,\n"
    "                                                  or --matching\n"
    "  mix [] [1] [H] [H,Dv] [B,H,N]                   F32; or --mix; or lln_weight and\n"
    "                                                  diag_weight of the same shapes\n"
    "  key_lengths [B] I32/I64, or key_mask [B,Nk] BOOL/U8\n"
    "  cu_seqlens [S+1], or cu_seqlens_q and cu_seqlens_k, I32/I64: packed, B = 1\n"
    "With --layout bnhd the dimensions of q, k, v, g and of o, dq, dk, dv are [B,N,H,D].\n"
    "S is B unless packed.\n\n"
    "--matching none: alpha = beta = 1; paper: one sigma of all q, one of all k, the authors'\n"
    "constants; per_head: moments of each sequence and key head; exact: the same with tables in\n"
    "place of the line; entropy: the mean entropy of rows is matched; frozen: those of IN, of\n"
    "the flags or of --calibration. Without it: frozen where they are given, otherwise per_head.\n"
    "All but none and frozen need --feature exp and no --causal, since they read the whole\n"
    "sequence.\n\n"
    "Tensors of OUT: o; for LLN the alpha and beta that were used, [S,H] and [S,Hk], or where\n"
    "frozen in the shape of IN; with --backward also dq, dk, dv in the dtype of q, and in F32\n"
    "dalpha, dbeta and dmix (or dlln_weight, ddiag_weight) in the shape of what they belong to.\n"
    "A number from a flag or by default counts as one per head: [H], or [Hk] for beta. dq and\n"
    "dk hold alpha and beta fixed: no gradient flows through the moments.\n"
    "OUT appears complete or not at all.\n\n"
    "In place of IN: one .npy file for each of q, k, v (and g), <f4 or <f2, in C order. An OUT\n"
    "that ends in .npy is such a file and holds o alone; any other is a safetensors file.\n";

}  // namespace

Verb add_run(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "run", "Attention on the tensors of safetensors or .npy files, forward and backward");
  const auto request = std::make_shared<Request>();
  command->add_option("IN", request->input, "Safetensors file with q, k, v");
  command->add_option("--q", request->q, ".npy file with q, in place of IN");
  command->add_option("--k", request->k, ".npy file with k");
  command->add_option("--v", request->v, ".npy file with v");
  command->add_option("--g", request->g, ".npy file with g, for --backward");
  command->add_option("-o,--output", request->output, "File to write")->required();
  command->add_option("--kind", request->kind, "lln | diagB | lln+diagB | softmax")
      ->capture_default_str();
  command->add_option("--feature", request->feature, "exp | elu | relu | softplus | powerP")
      ->capture_default_str();
  command->add_flag("--causal", request->causal, "Row i sees keys j <= i");
  command->add_option("--mix", request->mix, "Weight of LLN in lln+diagB; 0.5 where not given");
  command->add_option("--alpha", request->alpha, "One number for all query heads");
  command->add_option("--beta", request->beta, "One number for all key heads");
  command->add_option("--matching", request->matching, "How alpha and beta are set")
      ->check(CLI::IsMember({"none", "paper", "per_head", "exact", "entropy", "frozen"}));
  command->add_option("--calibration", request->calibration,
                      "alpha and beta as lln calibrate wrote them");
  command->add_option("--layer", request->layer, "Which layer of the calibration");
  command->add_flag("--backward", request->backward, "Gradients as well; needs g");
  command->add_option("--layout", request->layout, "Order of dimensions in both files")
      ->check(CLI::IsMember({"bhnd", "bnhd"}))
      ->capture_default_str();
  command->add_option("--kernel", request->kernel, "Force a kernel; lln info lists them");
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(help_footer(kFileHelp));
  return {command, [request] { return run(*request); }};
}

}  // namespace lln::cli
