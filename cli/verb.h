// What all verbs share: how they are registered, how they end, and how they speak. A verb is one
// file; main.cc only lists them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): named by its library
class App;
}

namespace lln::cli {

using Json = nlohmann::ordered_json;

// Exit codes; the same for every verb and part of its help.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kUsage = 2;
inline constexpr int kInput = 3;
inline constexpr int kUnsupported = 4;
inline constexpr int kDevice = 5;

// A command line that contradicts itself; everything else that goes wrong is an lln::Error.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Verb {
  CLI::App* command = nullptr;
  std::function<int()> run;  // after parsing; returns an exit code
};

Verb add_info(CLI::App& program);
Verb add_check(CLI::App& program);
Verb add_explain(CLI::App& program);
Verb add_bench(CLI::App& program);
Verb add_run(CLI::App& program);
Verb add_fit(CLI::App& program);
Verb add_calibrate(CLI::App& program);
// `command_line` is what the report says that it was made by.
Verb add_analyze(CLI::App& program, const std::string& command_line);
Verb add_demo(CLI::App& program, const std::string& program_path, const std::string& command_line);

// Options with one meaning in all verbs.
void add_json_option(CLI::App& command, bool& json);
void add_threads_option(CLI::App& command, int& threads);

// The end of a help text: examples, then exit codes and the form of errors.
std::string help_footer(const std::string& examples);

// For a file that `flag` asks to be written: an Error where it cannot be, a UsageError where it is
// one of the inputs, of which those that are empty stand for none.
void check_output(const char* flag, const std::string& path,
                  const std::vector<std::string>& inputs);

// With --json this is all that a verb writes to stdout.
void print_json(const Json& result);

// Runs the verb; an exception becomes one message and an exit code: on stderr as text, or with
// --json on stdout as {"error": {"code": ..., "text": ...}}.
int run_reporting_errors(const Verb& verb, bool json);
int report_usage_error(const std::string& text, bool json);

// All of main() but the list of verbs: parses the command line and runs the verb that it names.
int run_program(CLI::App& program, std::span<const Verb> verbs, int argc, const char* const* argv);

// The command line as a shell reads it, the program called lln.
std::string command_line(int argc, const char* const* argv);

std::string time_text(double seconds);  // "12.3 ms"
std::string size_text(double bytes);    // "1.2 GB"

}  // namespace lln::cli
