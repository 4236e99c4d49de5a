// Gloo out of the torch wheel.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/gloo_types.h"
// The header above stands for those that this one includes.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lln_torch/parallel/backend.h"

namespace lln_torch {

Backend make_gloo(const Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  constexpr auto kNoLimit = std::chrono::hours(24 * 365);
  auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  Backend backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  backend->setTimeout(kNoLimit);
  return backend;
}

std::string text_of(const std::exception& e) {
  std::string text = e.what();
  if (const auto* error = dynamic_cast<const c10::Error*>(&e)) {
    text = error->what_without_backtrace();
  }
  text = text.substr(0, text.find("\nException raised from"));
  return text.substr(0, text.find('\n'));
}

}  // namespace lln_torch
