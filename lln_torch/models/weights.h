// Tensors by name, to and from safetensors files, with names that may differ between the two.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "io/tensor_source.h"

namespace torch::nn {
class Module;
}

namespace lln_torch {

using NamedTensors = std::map<std::string, at::Tensor>;
using NameInFile = std::function<std::string(const std::string& name)>;

// Parameters and buffers.
NamedTensors named_weights(const torch::nn::Module& module);

// All or nothing; undefined tensors are left out.
void write_tensors(const NamedTensors& tensors, const std::string& path,
                   const std::map<std::string, std::string>& metadata = {});

// On the CPU, in the type of the file.
at::Tensor read_tensor(const lln::io::TensorSource& file, const lln::io::TensorInfo& info);

// Copies tensors of the file into `targets`. Missing, misshapen and unexpected tensors are named in
// one lln::Error before anything is changed; `others` may be in the file and are not read.
void load_tensors(const NamedTensors& targets, const lln::io::TensorSource& file,
                  const NameInFile& name_in_file, const std::vector<std::string>& others = {});

}  // namespace lln_torch
