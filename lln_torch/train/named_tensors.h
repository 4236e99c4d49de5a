// Tensors by name: what a checkpoint holds of a model and of its optimiser, and how they get in and
// out of safetensors files.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace lln_torch {

using NamedTensors = std::map<std::string, at::Tensor>;

// Copies in host memory, contiguous.
NamedTensors to_host(const NamedTensors& tensors);

// `from` into the tensors of `to`. Throws lln::Error that names every tensor that is missing, too
// many, or of another shape or type; `what` begins it. Nothing is copied then.
void copy_tensors(const NamedTensors& from, const NamedTensors& to, const std::string& what);

// What io/safetensors.h writes; refers to the memory of `tensors`, which are of to_host().
std::vector<lln::io::TensorToWrite> to_write(const NamedTensors& tensors);
NamedTensors read_tensors(const std::string& path);

// Of names, types, shapes and bytes. Every step is one to one, so that no change of a single word
// of the data goes unseen.
std::uint64_t checksum(const NamedTensors& host_tensors);
std::uint64_t checksum_of_text(std::string_view text);

}  // namespace lln_torch
