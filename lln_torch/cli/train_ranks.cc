// Meeting the other ranks, and ending with them.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/cli/train_ranks.h"

#include <c10/util/Logging.h>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "lln_torch/cli/rank_environment.h"
#include "lln_torch/train/checkpoint.h"
#include "verb.h"

namespace lln::cli {
namespace {

// May be called by two threads at once. Threads of c10d can wait for the lost rank for ever, so
// nothing is cleaned up: what a run needs to be resumed is on the disk.
[[noreturn]] void end_without_rank(const std::string& lost, const ResumeHint& hint, bool json) {
  static std::atomic_flag told;
  if (!told.test_and_set()) {
    const std::string text = lost + hint.text();
    if (json) {
      print_json({{"error", {{"code", "rank_lost"}, {"text", text}}}});
    } else {
      fmt::print(stderr, "lln: {}\n", text);
    }
    std::fflush(nullptr);
    std::_Exit(kRankLost);
  }
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace

void ResumeHint::set_checkpoints(const std::string& folder) {
  const std::lock_guard lock(mutex_);
  folder_ = folder;
}

std::string ResumeHint::text() const {
  const std::lock_guard lock(mutex_);
  if (folder_.empty() || lln_torch::checkpoint_steps(folder_).empty()) return "";
  return "; --resume goes on from the newest checkpoint";
}

int train_among_ranks(double timeout_seconds, bool json,
                      const std::function<int(lln_torch::Ranks*, ResumeHint&)>& train) {
  ResumeHint hint;
  const auto place = rank_from_environment();
  if (!place) return train(nullptr, hint);
  // c10d logs, with stacks, what the messages of the program say in a sentence.
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;
  // A rank that is lost closes its sockets: what is written to them then is an error like others.
  std::signal(SIGPIPE, SIG_IGN);
  lln_torch::RanksOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000));
  options.lost = [&](const std::string& text) { end_without_rank(text, hint, json); };
  lln_torch::Ranks ranks(*place, options);
  try {
    const int code = train(&ranks, hint);
    // torchrun sends one as soon as the first of all has ended with a code.
    std::signal(SIGTERM, SIG_IGN);
    if (const auto fault = ranks.leave()) end_without_rank(*fault, hint, json);
    return code;
  } catch (const lln_torch::RankLost& e) {
    end_without_rank(e.what(), hint, json);
  } catch (const std::exception& e) {
    ranks.watch().fail(e.what());
    throw;
  }
}

}  // namespace lln::cli
