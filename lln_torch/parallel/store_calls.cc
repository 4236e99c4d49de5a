// Signs of life are keys of the store, one for each rank; so is the fault that ends the job.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/store_calls.h"

#include <fmt/format.h>

namespace lln_torch {
namespace {

constexpr const char* kFaultKey = "fault";

std::string sign_key(int rank) { return fmt::format("sign/{}", rank); }

std::vector<std::string> read_signs(c10d::Store& store, const std::vector<int>& ranks) {
  if (ranks.empty()) return {};
  std::vector<std::string> keys, signs;
  keys.reserve(ranks.size());
  for (const int rank : ranks) keys.push_back(sign_key(rank));
  if (store.check(keys)) return stored_texts(store, keys);
  // When a job starts: to ask for a key that is missing would be to wait for it.
  signs.reserve(ranks.size());
  for (const std::string& key : keys) {
    signs.push_back(store.check({key}) ? store.get_to_str(key) : std::string());
  }
  return signs;
}

SignAnswer ask_store(c10d::Store& store, const SignRequest& request) {
  SignAnswer answer;
  // First, so that nobody sees that this rank has left and not why.
  if (!request.fault.empty()) answer.fault = store.compareSet(kFaultKey, "", request.fault);
  store.set(sign_key(request.rank), request.sign);
  answer.signs = read_signs(store, request.asked);
  if (request.fault.empty() && store.check({kFaultKey})) {
    answer.fault = store.get_to_str(kFaultKey);
  }
  return answer;
}

}  // namespace

std::vector<std::string> stored_texts(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<std::string> texts;
  for (const std::vector<std::uint8_t>& bytes : store.multiGet(keys)) {
    texts.emplace_back(bytes.begin(), bytes.end());
  }
  return texts;
}

std::future<SignAnswer> exchange_signs(const Store& store, SignRequest request) {
  return run_apart([store, request = std::move(request)] { return ask_store(*store, request); });
}

}  // namespace lln_torch
