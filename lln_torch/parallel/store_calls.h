// What is asked of the store that ranks share. TCPStore waits for ever for the answer of a server
// that is stopped, so calls of it run in threads that can be left behind.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <future>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "lln_torch/parallel/backend.h"

namespace lln_torch {

// `call` in a thread of its own. Whoever gives up drops the future, which waits for nothing: the
// call must own all that it uses.
template <typename Call>
std::future<std::invoke_result_t<Call>> run_apart(Call call) {
  std::packaged_task<std::invoke_result_t<Call>()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

// What a rank tells the others and asks of them, at once.
struct SignRequest {
  int rank = 0;
  std::string sign;        // of `rank`: written
  std::vector<int> asked;  // ranks whose signs are read
  std::string fault;       // why the job fails: told, unless another was before; empty: it does not
};

struct SignAnswer {
  std::vector<std::string> signs;  // of those asked; empty where a rank has written none yet
  std::string fault;               // the one that was told first; empty: none
};

// A few requests to the store, however many ranks there are.
std::future<SignAnswer> exchange_signs(const Store& store, SignRequest request);

// Values of keys that are all there.
std::vector<std::string> stored_texts(c10d::Store& store, const std::vector<std::string>& keys);

}  // namespace lln_torch
