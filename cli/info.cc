// lln info: what this program is and what it uses on this machine.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "lln/problem.h"
#include "lln/version.h"
#include "verb.h"

namespace lln::cli {
namespace {

std::string capability_text(const BuildInfo::CudaDevice& device) {
  return fmt::format("{}.{}", device.compute_capability / 10, device.compute_capability % 10);
}

Json to_json(const BuildInfo::Cuda& cuda) {
  Json devices = Json::array();
  for (const BuildInfo::CudaDevice& device : cuda.devices) {
    devices.push_back({{"name", device.name},
                       {"compute_capability", capability_text(device)},
                       {"multiprocessors", device.multiprocessors},
                       {"memory_bytes", device.memory_bytes},
                       {"usable", device.refusal.empty()},
                       {"refusal", device.refusal}});
  }
  return {{"toolkit", cuda.toolkit},
          {"architectures", cuda.architectures},
          {"driver", cuda.driver},
          {"devices", devices},
          {"no_devices", cuda.no_devices}};
}

Json to_json(const BuildInfo& info) {
  Json parts = Json::array();
  for (const BuildInfo::Part& part : info.parts) {
    parts.push_back({{"name", part.name}, {"built", part.built}, {"reason", part.reason}});
  }
  Json json = {{"version", info.version},
               {"compiler", info.compiler},
               {"cpu_target", info.cpu_target},
               {"cpu_targets", info.cpu_targets},
               {"kernels",
                {{"forward", kernel_names(Op::forward)},
                 {"backward", kernel_names(Op::backward)},
                 {"append", kernel_names(Op::append)},
                 {"step", kernel_names(Op::step)}}},
               {"parts", parts}};
  if (!info.cuda.toolkit.empty()) json["cuda"] = to_json(info.cuda);
  return json;
}

std::string to_text(const BuildInfo::Cuda& cuda) {
  std::string text =
      fmt::format("            toolkit {}, code for {}, driver {}\n", cuda.toolkit,
                  cuda.architectures, cuda.driver.empty() ? "none" : "for CUDA " + cuda.driver);
  if (cuda.devices.empty()) text += fmt::format("            {}\n", cuda.no_devices);
  for (std::size_t i = 0; i < cuda.devices.size(); ++i) {
    const BuildInfo::CudaDevice& device = cuda.devices[i];
    text += fmt::format("cuda:{:<7}{}, compute capability {}, {} multiprocessors, {}{}\n", i,
                        device.name, capability_text(device), device.multiprocessors,
                        size_text(static_cast<double>(device.memory_bytes)),
                        device.refusal.empty() ? "" : "; not used: " + device.refusal);
  }
  return text;
}

std::string to_text(const BuildInfo& info) {
  std::string text = fmt::format("lln         {}\ncompiler    {}\n", info.version, info.compiler);
  text += fmt::format("CPU target  {} (available here: {})\n", info.cpu_target,
                      fmt::join(info.cpu_targets, ", "));
  for (const Op op : {Op::forward, Op::backward, Op::append, Op::step}) {
    text += fmt::format("{:<12}{}\n", to_string(op), fmt::join(kernel_names(op), ", "));
  }
  for (const BuildInfo::Part& part : info.parts) {
    text += fmt::format("{:<12}{}\n", part.name,
                        part.built ? std::string("built in") : "not built in: " + part.reason);
    if (part.name == "cuda" && part.built) text += to_text(info.cuda);
  }
  return text;
}

}  // namespace

Verb add_info(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "info", "Version, vector targets of this CPU, CUDA devices, kernels, and what was built in");
  const auto json = std::make_shared<bool>(false);
  add_json_option(*command, *json);
  command->footer(help_footer("  lln info\n  lln info --json\n"));
  return {command, [json] {
            const BuildInfo info = build_info();
            if (*json) {
              print_json(to_json(info));
            } else {
              fmt::print("{}", to_text(info));
            }
            return kOk;
          }};
}

}  // namespace lln::cli
