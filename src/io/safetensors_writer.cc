// Writing of safetensors files: header and data in one order, everything or nothing.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "io/output_file.h"
#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "lln/error.h"

namespace lln::io {
namespace {

constexpr std::size_t kAlignment = 8;  // of the start of the data

void check_tensors(const std::string& path, std::span<const TensorToWrite> tensors) {
  std::set<std::string_view> names;
  for (const TensorToWrite& t : tensors) {
    const auto fail = [&](const std::string& text) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{}: tensor {}: {}", path, printable(t.name), text));
    };
    if (t.name == kMetadataName) fail("the name is reserved");
    if (!names.insert(t.name).second) fail("occurs twice");
    const std::size_t element = element_bytes(t.dtype);
    if (element == 0) fail(fmt::format("the dtype {} is not known", printable(t.dtype)));
    std::uint64_t expected = 0;
    if (!tensor_bytes(t.shape, element, expected) || expected != t.data.size()) {
      fail(fmt::format("{} of shape {} does not have {} bytes", t.dtype, shape_text(t.shape),
                       t.data.size()));
    }
  }
}

std::string header_text(const std::string& path, std::span<const TensorToWrite* const> order,
                        const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadataName)] = metadata;
  std::uint64_t offset = 0;
  for (const TensorToWrite* t : order) {
    header[t->name] = {{"dtype", t->dtype},
                       {"shape", t->shape},
                       {"data_offsets", {offset, offset + t->data.size()}}};
    offset += t->data.size();
  }
  try {
    std::string text = header.dump();
    text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
    return text;
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: a name or metadata is not UTF-8: {}", path, e.what()));
  }
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const Metadata& metadata, const std::function<bool()>& interrupted) {
  check_tensors(path, tensors);
  // Large elements first: then every tensor is aligned to its element without holes.
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return element_bytes(a->dtype) > element_bytes(b->dtype);
  });
  const std::string header = header_text(path, order, metadata);
  const std::uint64_t length = header.size();

  OutputFile file(path, interrupted);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(header)));
  for (const TensorToWrite* t : order) file.write(t->data);
  file.rename_to_target();
}

}  // namespace lln::io
