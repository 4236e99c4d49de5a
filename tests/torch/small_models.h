// Small models for tests, with random weights that are large enough to make every part count.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "lln_torch/models/model.h"

namespace lln_torch {

constexpr std::int64_t kVocabulary = 40;

// `model` and `attention` are lines of TOML.
inline std::shared_ptr<Model> small_model(const Task& task, const std::string& model,
                                          const std::string& attention) {
  at::manual_seed(7);
  const Settings settings =
      Settings::from_toml("[model]\nlayers = 2\ndim = 24\nheads = 3\ninit_std = 0.3\n" + model +
                              "\n[attention]\n" + attention + "\n",
                          "test");
  auto made = make_model(settings.table("model"), settings.table("attention"), task);
  settings.finish();
  return made;
}

inline Tensor random_ids(std::int64_t rows, std::int64_t tokens) {
  return at::randint(4, kVocabulary, {rows, tokens}, at::kLong);
}

inline void expect_near(const Tensor& found, const Tensor& expected, double most) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  const double scale = std::max(1.0, expected.abs().max().item<double>());
  const double error = (found - expected).abs().max().item<double>();
  EXPECT_LE(error, most * scale);
}

}  // namespace lln_torch
