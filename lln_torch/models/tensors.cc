// Batches in plain memory become tensors on the device of a model.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lln/error.h"
#include "lln_torch/models/model.h"

namespace lln_torch {
namespace {

// A copy of `values` on the device, in `type`. Values travel in their own, smaller type, and from
// pinned memory, so that the copy waits for nothing.
template <typename T>
Tensor copy_values(const std::vector<T>& values, const std::vector<std::int64_t>& shape,
                   const char* what, at::ScalarType type, const torch::Device& device) {
  if (values.empty()) return {};
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  if (static_cast<std::int64_t>(values.size()) != count) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("a batch has {} {}, expected {} for [{}]", values.size(), what,
                                 count, fmt::join(shape, ", ")));
  }
  // from_blob takes no pointer to const; nothing is written.
  const Tensor view = at::from_blob(const_cast<T*>(values.data()),  // NOLINT
                                    shape, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
  if (device.is_cuda()) return view.pin_memory().to(device, /*non_blocking=*/true).to(type);
  return view.to(device, type, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

TensorBatch to_tensors(const Batch& batch, const torch::Device& device) {
  const std::int64_t rows = batch.rows;
  const auto ids_of = [&](const TextRows& text, const char* what) {
    return copy_values(text.ids, {rows, text.tokens}, what, at::kLong, device);
  };
  const auto mask_of = [&](const TextRows& text, const char* what) {
    return copy_values(text.mask, {rows, text.tokens}, what, at::kBool, device);
  };
  TensorBatch tensors;
  tensors.ids = ids_of(batch.text, "ids");
  tensors.mask = mask_of(batch.text, "mask values");
  tensors.segments =
      copy_values(batch.text.segments, {rows, batch.text.tokens}, "segments", at::kLong, device);
  tensors.second_ids = ids_of(batch.second, "ids of second texts");
  tensors.second_mask = mask_of(batch.second, "mask values of second texts");
  const std::int64_t per_row =
      static_cast<std::int64_t>(batch.pixels.size()) / std::max(rows, std::int64_t{1});
  tensors.pixels = copy_values(batch.pixels, {rows, per_row}, "pixels", at::kFloat, device);
  const bool by_row = static_cast<std::int64_t>(batch.labels.size()) == rows;
  const std::vector<std::int64_t> label_shape =
      by_row ? std::vector<std::int64_t>{rows} : std::vector<std::int64_t>{rows, batch.text.tokens};
  tensors.labels = copy_values(batch.labels, label_shape, "labels", at::kLong, device);
  tensors.scores = copy_values(batch.scores, {rows}, "scores", at::kFloat, device);
  return tensors;
}

}  // namespace lln_torch
