// The metrics of tasks, as GLUE's own evaluation defines them. Where one is not defined (no
// positive prediction, no variance), it is 0.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lln_torch {

double accuracy(std::span<const std::int32_t> predicted, std::span<const std::int32_t> labels);
// Of class 1 against the rest.
double f1(std::span<const std::int32_t> predicted, std::span<const std::int32_t> labels);
// Matthews' correlation, of any number of classes.
double matthews(std::span<const std::int32_t> predicted, std::span<const std::int32_t> labels);
double pearson(std::span<const float> predicted, std::span<const float> scores);
// Pearson's of the ranks; equal values share the mean of theirs.
double spearman(std::span<const float> predicted, std::span<const float> scores);

// "accuracy", "f1", "matthews".
double class_metric(std::string_view name, std::span<const std::int32_t> predicted,
                    std::span<const std::int32_t> labels);
// "pearson", "spearman".
double score_metric(std::string_view name, std::span<const float> predicted,
                    std::span<const float> scores);

}  // namespace lln_torch
