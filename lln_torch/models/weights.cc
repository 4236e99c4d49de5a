// Weights of modules as safetensors files. Everything is checked before anything changes.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/models/weights.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "io/safetensors.h"
#include "lln/error.h"
#include "lln_torch/models/model.h"

namespace lln_torch {
namespace {

struct DtypeName {
  at::ScalarType type;
  const char* name;  // as safetensors spells it
};
constexpr DtypeName kWeightTypes[] = {
    {at::kFloat, "F32"}, {at::kHalf, "F16"}, {at::kBFloat16, "BF16"}, {at::kDouble, "F64"},
    {at::kLong, "I64"},  {at::kInt, "I32"},  {at::kBool, "BOOL"},     {at::kByte, "U8"},
};

const DtypeName* weight_type(std::string_view name) {
  for (const DtypeName& entry : kWeightTypes) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

const DtypeName* weight_type(at::ScalarType type) {
  for (const DtypeName& entry : kWeightTypes) {
    if (type == entry.type) return &entry;
  }
  return nullptr;
}

std::string sizes_text(at::IntArrayRef sizes) {
  return lln::io::shape_text({sizes.data(), sizes.size()});
}

}  // namespace

NamedTensors named_weights(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace(item.key(), item.value());
  return tensors;
}

void write_tensors(const NamedTensors& tensors, const std::string& path,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<Tensor> copies;
  std::vector<lln::io::TensorToWrite> entries;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    const DtypeName* type = weight_type(tensor.scalar_type());
    if (type == nullptr) {
      throw lln::Error(lln::ErrorCode::unsupported,
                       fmt::format("{}: {} has a type that is not written: {}", path, name,
                                   c10::toString(tensor.scalar_type())));
    }
    copies.push_back(tensor.detach().to(at::kCPU).contiguous());
    const Tensor& copy = copies.back();
    entries.push_back({name,
                       type->name,
                       copy.sizes().vec(),
                       {static_cast<const std::byte*>(copy.const_data_ptr()), copy.nbytes()}});
  }
  lln::io::write_safetensors(path, entries, metadata);
}

Tensor read_tensor(const lln::io::TensorSource& file, const lln::io::TensorInfo& info) {
  const DtypeName* type = weight_type(info.dtype);
  if (type == nullptr) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {} has the type {}, which is not read",
                                                     file.path(), info.name, info.dtype));
  }
  const lln::io::Bytes bytes = file.read(info);
  Tensor tensor = at::empty(info.shape, at::TensorOptions(type->type));
  std::copy_n(bytes.data(), bytes.size(), static_cast<std::byte*>(tensor.mutable_data_ptr()));
  return tensor;
}

void load_tensors(const NamedTensors& targets, const lln::io::TensorSource& file,
                  const NameInFile& name_in_file, const std::vector<std::string>& others) {
  std::vector<std::string> faults;
  std::set<std::string> used(others.begin(), others.end());
  for (const auto& [name, target] : targets) {
    if (!target.defined()) continue;
    const std::string wanted = name_in_file(name);
    used.insert(wanted);
    const lln::io::TensorInfo* info = file.find(wanted);
    if (info == nullptr) {
      faults.push_back(fmt::format("{} is missing", wanted));
    } else if (at::IntArrayRef(info->shape) != target.sizes()) {
      faults.push_back(fmt::format("{} is {}, expected {}", wanted,
                                   lln::io::shape_text(info->shape), sizes_text(target.sizes())));
    } else if (weight_type(info->dtype) == nullptr) {
      faults.push_back(fmt::format("{} has the type {}, which is not read", wanted, info->dtype));
    }
  }
  for (const lln::io::TensorInfo& info : file.tensors()) {
    if (!used.contains(info.name)) faults.push_back(fmt::format("{} is unexpected", info.name));
  }
  if (!faults.empty()) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: does not fit the model: {}", file.path(),
                                                     fmt::join(faults, "; ")));
  }
  // All are read before one is changed: a file that ends early leaves the model as it was.
  std::vector<std::pair<Tensor, Tensor>> changes;
  for (const auto& [name, target] : targets) {
    if (!target.defined()) continue;
    changes.emplace_back(target, read_tensor(file, *file.find(name_in_file(name))));
  }
  const at::NoGradGuard no_grad;
  for (auto& [target, value] : changes) target.copy_(value);
}

void save_weights(const torch::nn::Module& model, const std::string& path) {
  write_tensors(named_weights(model), path);
}

void load_weights(torch::nn::Module& model, const std::string& path) {
  const lln::io::SafetensorsReader file(path);
  load_tensors(named_weights(model), file, [](const std::string& name) { return name; });
}

void load_body(torch::nn::Module& model, const std::string& path) {
  constexpr std::string_view kBody = "body.";
  const lln::io::SafetensorsReader file(path);
  NamedTensors body = named_weights(model);
  std::erase_if(body, [&](const auto& item) { return !item.first.starts_with(kBody); });
  std::vector<std::string> heads;
  for (const lln::io::TensorInfo& info : file.tensors()) {
    if (!info.name.starts_with(kBody)) heads.push_back(info.name);
  }
  load_tensors(
      body, file, [](const std::string& name) { return name; }, heads);
}

}  // namespace lln_torch
