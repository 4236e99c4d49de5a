// Lists of tensors: collected, copied, written and read.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/named_tensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <bit>
#include <cstring>
#include <memory>

#include "io/safetensors.h"
#include "lln/error.h"

namespace lln_torch {
namespace {

struct FileType {
  const char* name;
  at::ScalarType type;
};
constexpr std::array kFileTypes = {FileType{"F32", at::kFloat}, FileType{"F64", at::kDouble},
                                   FileType{"F16", at::kHalf},  FileType{"BF16", at::kBFloat16},
                                   FileType{"I64", at::kLong},  FileType{"I32", at::kInt},
                                   FileType{"U8", at::kByte},   FileType{"BOOL", at::kBool}};

const char* file_type_of(const std::string& name, at::ScalarType type) {
  for (const FileType& known : kFileTypes) {
    if (known.type == type) return known.name;
  }
  throw lln::Error(lln::ErrorCode::unsupported,
                   fmt::format("{}: a tensor of {} cannot be saved", name, c10::toString(type)));
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

constexpr std::uint64_t kFirstHash = 0xCBF29CE484222325U;

std::uint64_t mix_bytes(std::uint64_t hash, std::span<const std::byte> bytes) {
  while (bytes.size() >= sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    // The rotation carries high bits, which a product alone never moves down.
    hash = std::rotl((hash ^ word) * 0x9E3779B97F4A7C15U, 29);
    bytes = bytes.subspan(sizeof(word));
  }
  std::uint64_t rest = bytes.size();
  for (const std::byte b : bytes) rest = rest << 8 | std::to_integer<std::uint64_t>(b);
  return std::rotl((hash ^ rest) * 0x9E3779B97F4A7C15U, 29);
}

std::string form_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes().vec(), ", "));
}

}  // namespace

NamedTensors to_host(const NamedTensors& tensors) {
  NamedTensors host;
  for (const auto& [name, tensor] : tensors) {
    host.emplace(name, tensor.detach().to(at::kCPU).contiguous());
  }
  return host;
}

void copy_tensors(const NamedTensors& from, const NamedTensors& to, const std::string& what) {
  std::vector<std::string> faults;
  for (const auto& [name, target] : to) {
    const auto source = from.find(name);
    if (source == from.end()) {
      faults.push_back(fmt::format("{} is missing", name));
    } else if (source->second.sizes() != target.sizes() ||
               source->second.scalar_type() != target.scalar_type()) {
      faults.push_back(
          fmt::format("{} is {}: expected {}", name, form_of(source->second), form_of(target)));
    }
  }
  for (const auto& [name, tensor] : from) {
    if (!to.contains(name)) faults.push_back(fmt::format("{} was not expected", name));
  }
  if (!faults.empty()) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}", what, fmt::join(faults, "; ")));
  }
  const at::NoGradGuard no_gradients;
  for (const auto& [name, target] : to) {
    at::Tensor written = target;
    written.copy_(from.at(name));
  }
}

std::vector<lln::io::TensorToWrite> to_write(const NamedTensors& tensors) {
  std::vector<lln::io::TensorToWrite> list;
  list.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    list.push_back(
        {name, file_type_of(name, tensor.scalar_type()), tensor.sizes().vec(), bytes_of(tensor)});
  }
  return list;
}

NamedTensors read_tensors(const std::string& path) {
  const lln::io::SafetensorsReader file(path);
  NamedTensors found;
  for (const lln::io::TensorInfo& info : file.tensors()) {
    const FileType* type = nullptr;
    for (const FileType& known : kFileTypes) {
      if (info.dtype == known.name) type = &known;
    }
    if (type == nullptr) {
      throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {} is {}, which is not read here", path,
                                                       info.name, info.dtype));
    }
    const lln::io::Bytes bytes = file.read(info);
    at::Tensor tensor = at::empty(info.shape, at::TensorOptions().dtype(type->type));
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    found.emplace(info.name, tensor);
  }
  return found;
}

std::uint64_t checksum_of_text(std::string_view text) {
  return mix_bytes(kFirstHash, std::as_bytes(std::span(text)));
}

std::uint64_t checksum(const NamedTensors& host_tensors) {
  std::uint64_t hash = kFirstHash;
  for (const auto& [name, tensor] : host_tensors) {
    const std::string head = name + " " + form_of(tensor);
    hash = mix_bytes(hash, std::as_bytes(std::span(head)));
    hash = mix_bytes(hash, bytes_of(tensor));
  }
  return hash;
}

}  // namespace lln_torch
