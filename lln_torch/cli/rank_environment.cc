// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/cli/rank_environment.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

#include "lln/error.h"

namespace lln::cli {
namespace {

std::optional<std::string> rank_variable(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets it
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::string needed_variable(const char* name, const char* why) {
  if (auto value = rank_variable(name)) return *value;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is not set in the environment, but {} is: torchrun sets RANK, "
                          "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; to train in one "
                          "process unset RANK and WORLD_SIZE",
                          name, why));
}

int number_of(const char* name, const std::string& text, int least, int most) {
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, fault] = std::from_chars(text.data(), end, value);
  if (fault != std::errc() || stop != end || value < least || value > most) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}={} in the environment: expected a whole number from {} to {}", name,
                            text, least, most));
  }
  return value;
}

}  // namespace

std::optional<lln_torch::RankPlace> rank_from_environment() {
  const bool ranked = rank_variable("RANK").has_value();
  if (!ranked && !rank_variable("WORLD_SIZE")) return std::nullopt;
  constexpr int kManyRanks = 1 << 20;
  const char* const other = ranked ? "RANK" : "WORLD_SIZE";
  lln_torch::RankPlace place;
  place.size = number_of("WORLD_SIZE", needed_variable("WORLD_SIZE", other), 1, kManyRanks);
  place.rank = number_of("RANK", needed_variable("RANK", other), 0, place.size - 1);
  place.local_rank = place.rank;
  if (const auto local = rank_variable("LOCAL_RANK")) {
    place.local_rank = number_of("LOCAL_RANK", *local, 0, kManyRanks);
  }
  place.host = needed_variable("MASTER_ADDR", "RANK");
  place.port = number_of("MASTER_PORT", needed_variable("MASTER_PORT", "RANK"), 1, 65535);
  // torchrun has a store of its own there, and starts a job again after a failure.
  place.store_is_there = rank_variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  place.store_prefix = "lln/" + rank_variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return place;
}

}  // namespace lln::cli
