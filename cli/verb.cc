// Errors, exit codes and output of all verbs.
// SPDX-License-Identifier: Apache-2.0
#include "verb.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <string_view>

#include "io/output_file.h"
#include "lln/error.h"

namespace lln::cli {
namespace {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::io:
      return kInput;
    case ErrorCode::unsupported:
      return kUnsupported;
    case ErrorCode::out_of_memory:
    case ErrorCode::device:
    case ErrorCode::internal:
      return kDevice;
  }
  return kDevice;
}

int report(const char* code, const std::string& text, int exit, bool json) {
  if (json) {
    print_json({{"error", {{"code", code}, {"text", text}}}});
  } else {
    fmt::print(stderr, "lln: {}\n", text);
  }
  return exit;
}

}  // namespace

void add_json_option(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "Print the result as JSON, and nothing else, on stdout");
}

void add_threads_option(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "Threads to use; 0: one per hardware thread")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

std::string help_footer(const std::string& examples) {
  return "Examples:\n" + examples +
         "\nExit codes: 0 ok, 1 a check failed, 2 usage, 3 input, 4 unsupported,\n"
         "            5 device, memory or internal failure.\n"
         "Errors are text on stderr; with --json they are on stdout:\n"
         "            {\"error\": {\"code\": \"io\", \"text\": \"...\"}}\n";
}

void check_output(const char* flag, const std::string& path,
                  const std::vector<std::string>& inputs) {
  if (const std::string obstacle = io::write_obstacle(path); !obstacle.empty()) {
    throw Error(ErrorCode::io, obstacle);
  }
  for (const std::string& input : inputs) {
    std::error_code ignored;
    if (std::filesystem::equivalent(input, path, ignored)) {
      throw UsageError(fmt::format("{} {} would replace the input", flag, path));
    }
  }
}

void print_json(const Json& result) {
  // File names and names of tensors come from outside and need not be UTF-8.
  fmt::print("{}\n", result.dump(2, ' ', false, Json::error_handler_t::replace));
}

int run_reporting_errors(const Verb& verb, bool json) {
  try {
    const int exit = verb.run();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      throw Error(ErrorCode::io, "stdout: the result could not be written");
    }
    return exit;
  } catch (const UsageError& e) {
    return report_usage_error(e.what(), json);
  } catch (const Error& e) {
    return report(to_string(e.code()), e.what(), exit_code(e.code()), json);
  } catch (const std::bad_alloc&) {
    return report(to_string(ErrorCode::out_of_memory), "not enough memory", kDevice, json);
  } catch (const std::exception& e) {
    return report(to_string(ErrorCode::internal), e.what(), kDevice, json);
  }
}

int report_usage_error(const std::string& text, bool json) {
  return report("usage", json ? text : text + "\nlln --help and lln VERB --help say more", kUsage,
                json);
}

int run_program(CLI::App& program, std::span<const Verb> verbs, int argc, const char* const* argv) {
  // Looked up before parsing: a command line that cannot be parsed also ends in JSON.
  const bool json =
      std::any_of(argv, argv + argc, [](const char* a) { return std::string_view(a) == "--json"; });
  if (argc < 2) {
    fmt::print(stderr, "{}", program.help());
    return kUsage;
  }
  std::vector<std::string> names;
  for (const CLI::App* command : program.get_subcommands({})) names.push_back(command->get_name());
  const std::string first = argv[1];
  if (!first.starts_with('-') && std::find(names.begin(), names.end(), first) == names.end()) {
    const std::string last = names.back();
    names.pop_back();
    return report_usage_error(
        fmt::format("'{}' is no verb: expected {} or {}", first, fmt::join(names, ", "), last),
        json);
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const bool asked_for_help = e.get_exit_code() == 0;
    return asked_for_help ? program.exit(e) : report_usage_error(e.what(), json);
  }
  const auto verb =
      std::find_if(verbs.begin(), verbs.end(), [](const Verb& v) { return v.command->parsed(); });
  if (verb == verbs.end()) {  // a verb that is listed, and found in another program
    return report_usage_error(fmt::format("'{}' must come first", argv[1]), json);
  }
  return run_reporting_errors(*verb, json);
}

std::string command_line(int argc, const char* const* argv) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
  std::string text = "lln";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    text += ' ';
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    text += '\'';
  }
  return text;
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.{}f} ms", seconds * 1e3, seconds < 0.1 ? 1 : 0);
  return fmt::format("{:.{}f} s", seconds, seconds < 100 ? 2 : 0);
}

std::string size_text(double bytes) {
  constexpr std::array kUnits = {"B", "KB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit > 0 && bytes < 10 ? 1 : 0, kUnits[unit]);
}

}  // namespace lln::cli
