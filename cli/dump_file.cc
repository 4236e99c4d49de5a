// Reading of dumps. The header is checked as a whole first; data are read and checked layer by
// layer.
// SPDX-License-Identifier: Apache-2.0
#include "dump_file.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>

#include "io/safetensors.h"
#include "lln/error.h"
#include "npy_files.h"
#include "scales.h"
#include "verb.h"

namespace lln::cli {

const char* const kDumpHelp =
    "Tensors of FILE: q [B,H,N,D] and k [B,Hk,N,D], or [H,N,D], or [N,D], in F32, F16, BF16 or\n"
    "F64 (rounded to F32); H is a multiple of Hk. For several layers NAME.q and NAME.k. A layer\n"
    "may have alpha [H] or [B,H] and beta [Hk] or [B,Hk] in F32. Other tensors are left alone.\n"
    "With --layout bnhd the dimensions are [B,N,H,D] and [N,H,D].\n"
    "In place of FILE: --q and --k with as many .npy files each, the layers 0, 1, ...\n";

namespace {

// That one text names.
constexpr std::size_t kMostFaults = 12, kMostNames = 8;

std::optional<DType> dtype_of(std::string_view name) {
  if (name == "F32") return DType::f32;
  if (name == "F16") return DType::f16;
  if (name == "BF16") return DType::bf16;
  if (name == "F64") return DType::f64;
  return std::nullopt;
}

// Digits count as one number, whatever their leading zeros.
bool natural_less(std::string_view x, std::string_view y) {
  std::size_t i = 0, j = 0;
  const auto digits = [](std::string_view text, std::size_t& at) {
    while (at < text.size() && text[at] == '0') ++at;
    const std::size_t begin = at;
    while (at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0) ++at;
    return text.substr(begin, at - begin);
  };
  const auto is_digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  while (i < x.size() && j < y.size()) {
    if (is_digit(x[i]) && is_digit(y[j])) {
      const std::string_view a = digits(x, i), b = digits(y, j);
      if (a.size() != b.size()) return a.size() < b.size();
      if (a != b) return a < b;
    } else {
      if (x[i] != y[j]) return x[i] < y[j];
      ++i, ++j;
    }
  }
  if (x.size() - i != y.size() - j) return x.size() - i < y.size() - j;
  return x < y;
}

// Sizes of a tensor as [batch, head, token, channel]; missing ones in front are 1.
Shape full_shape(const std::vector<std::int64_t>& shape, FileLayout layout) {
  Shape full{1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), full.end() - static_cast<std::ptrdiff_t>(shape.size()));
  if (layout == FileLayout::bnhd && shape.size() > 2) std::swap(full[1], full[2]);
  return full;
}

// Faults of q or k by itself.
void check_rows(const io::TensorInfo& t, std::vector<std::string>& faults) {
  const std::string name = io::printable(t.name);
  if (!dtype_of(t.dtype)) {
    faults.push_back(
        fmt::format("{} is {}: expected F32, F16, BF16 or F64", name, io::printable(t.dtype)));
  }
  if (t.shape.size() < 2 || t.shape.size() > 4) {
    faults.push_back(
        fmt::format("{} is {}: expected 2 to 4 dimensions", name, io::shape_text(t.shape)));
  } else if (std::count(t.shape.begin(), t.shape.end(), 0) > 0) {
    faults.push_back(
        fmt::format("{} is {}: there is nothing in it", name, io::shape_text(t.shape)));
  }
}

// Faults of q and k together, each of which is right by itself.
void check_pair(const io::TensorInfo& q, const io::TensorInfo& k, FileLayout layout,
                bool equal_tokens, std::vector<std::string>& faults) {
  const Shape x = full_shape(q.shape, layout), y = full_shape(k.shape, layout);
  std::vector<std::string> reasons;
  if (q.dtype != k.dtype) reasons.emplace_back("one dtype");
  if (q.shape.size() != k.shape.size()) reasons.emplace_back("as many dimensions");
  if (x[0] != y[0]) reasons.emplace_back("one batch");
  if (x[1] % y[1] != 0) reasons.emplace_back("heads of q that are a multiple of those of k");
  if (equal_tokens && x[2] != y[2]) reasons.emplace_back("as many tokens");
  if (x[3] != y[3]) reasons.emplace_back("as many channels");
  if (reasons.empty()) return;
  faults.push_back(fmt::format("{} is {} {} and {} is {} {}: expected {}", io::printable(q.name),
                               q.dtype, io::shape_text(q.shape), io::printable(k.name), k.dtype,
                               io::shape_text(k.shape), fmt::join(reasons, " and ")));
}

void check_scale(const io::TensorInfo& t, std::int64_t batch, std::int64_t heads,
                 std::vector<std::string>& faults) {
  const std::vector<std::int64_t> by_head = {heads}, by_sequence = {batch, heads};
  if (t.dtype == "F32" && (t.shape == by_head || t.shape == by_sequence)) return;
  faults.push_back(fmt::format("{} is {} {}: expected F32 {} or {}", io::printable(t.name),
                               io::printable(t.dtype), io::shape_text(t.shape),
                               io::shape_text(by_head), io::shape_text(by_sequence)));
}

// "[1, 0, 17, 5]" for element `index` of a tensor of this shape.
std::string place_text(const std::vector<std::int64_t>& shape, std::size_t index) {
  std::vector<std::int64_t> place(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    const auto size = static_cast<std::size_t>(shape[i]);
    place[i] = static_cast<std::int64_t>(index % size);
    index /= size;
  }
  return io::shape_text(place);
}

// Index of the first infinity or NaN, whose exponent bits are all ones; the count where there is
// none.
template <class Bits>
std::size_t first_not_finite(const io::Bytes& bytes, Bits exponent) {
  const auto* const values = reinterpret_cast<const Bits*>(bytes.data());
  const std::size_t count = bytes.size() / sizeof(Bits);
  return static_cast<std::size_t>(
      std::find_if(values, values + count, [&](Bits x) { return (x & exponent) == exponent; }) -
      values);
}

void expect_finite(const std::string& path, const std::string& name, const FileTensor& t) {
  const std::size_t at = t.dtype == "F16" ? first_not_finite<std::uint16_t>(t.bytes, 0x7C00U)
                         : t.dtype == "BF16"
                             ? first_not_finite<std::uint16_t>(t.bytes, 0x7F80U)
                             : first_not_finite<std::uint32_t>(t.bytes, 0x7F800000U);
  if (at == t.bytes.size() / io::element_bytes(t.dtype)) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: {} holds an infinity or NaN (as {}) at {}", path,
                          io::printable(name), t.dtype, place_text(t.shape, at)));
}

// As a calibration has them.
void expect_positive(const std::string& path, const std::string& name, const FileTensor& t) {
  const auto* const values = reinterpret_cast<const float*>(t.bytes.data());
  const std::size_t count = t.bytes.size() / sizeof(float);
  const auto at = static_cast<std::size_t>(
      std::find_if(values, values + count, [](float x) { return !(x > 0); }) - values);
  if (at == count) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: {} holds {} at {}: expected numbers above zero", path,
                          io::printable(name), values[at], place_text(t.shape, at)));
}

FileTensor scale_of(const std::vector<float>& values) {
  const std::int64_t heads = std::ssize(values);
  FileTensor t = {"F32", {heads}, io::Bytes(values.size() * sizeof(float)), {}};
  std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
  t.view = view(static_cast<void*>(t.bytes.data()), DType::f32, {1, heads, 1, 1});
  return t;
}

void round_to_f32(FileTensor& t) {
  const std::size_t count = t.bytes.size() / sizeof(double);
  io::Bytes rounded(count * sizeof(float));
  const auto* const from = reinterpret_cast<const double*>(t.bytes.data());
  auto* const to = reinterpret_cast<float*>(rounded.data());
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
  t.dtype = "F32";
  t.bytes = std::move(rounded);
}

}  // namespace

void add_dump_options(CLI::App& command, DumpOptions& options) {
  command.add_option("FILE", options.file, "Safetensors file with q and k, or NAME.q and NAME.k");
  command.add_option("--q", options.q_files, ".npy files with q, in place of FILE");
  command.add_option("--k", options.k_files, ".npy files with k");
  command.add_option("--q-name", options.q_name, "What tensors of queries are called in FILE")
      ->capture_default_str();
  command.add_option("--k-name", options.k_name, "What tensors of keys are called in FILE")
      ->capture_default_str();
  command.add_option("--layout", options.layout, "Order of dimensions")
      ->check(CLI::IsMember({"bhnd", "bnhd"}))
      ->capture_default_str();
}

std::unique_ptr<io::TensorSource> open_dump(const DumpOptions& options) {
  if (options.q_name == options.k_name) {
    throw UsageError(fmt::format("--q-name and --k-name are both {}", options.q_name));
  }
  const bool separate = !options.q_files.empty() || !options.k_files.empty();
  if (separate == !options.file.empty()) throw UsageError("expected either FILE or --q and --k");
  if (options.file.ends_with(".npy")) {
    throw UsageError(fmt::format(
        "{}: FILE is a safetensors file; .npy files are given as --q and --k", options.file));
  }
  if (!separate) return std::make_unique<io::SafetensorsReader>(options.file);
  if (options.q_files.size() != options.k_files.size()) {
    throw UsageError(fmt::format("--q has {} files and --k {}: expected as many",
                                 options.q_files.size(), options.k_files.size()));
  }
  std::vector<std::pair<std::string, std::string>> files;
  for (std::size_t i = 0; i < options.q_files.size(); ++i) {
    const std::string layer = options.q_files.size() == 1 ? "" : fmt::format("{}.", i);
    files.emplace_back(layer + options.q_name, options.q_files[i]);
    files.emplace_back(layer + options.k_name, options.k_files[i]);
  }
  return std::make_unique<NpyFiles>(files);
}

std::vector<std::string> input_paths(const DumpOptions& options) {
  std::vector<std::string> paths = {options.file};
  paths.insert(paths.end(), options.q_files.begin(), options.q_files.end());
  paths.insert(paths.end(), options.k_files.begin(), options.k_files.end());
  return paths;
}

DumpFile::DumpFile(const io::TensorSource& file, const DumpOptions& options, const DumpNeeds& needs)
    : file_(file),
      q_name_(options.q_name),
      k_name_(options.k_name),
      layout_(options.layout == "bnhd" ? FileLayout::bnhd : FileLayout::bhnd),
      needs_(needs) {
  find_layers();
  std::vector<std::string> faults;
  if (layers_.empty()) faults.push_back(no_layers_text());
  for (const std::string& layer : layers_) check_layer(layer, faults);
  if (faults.empty()) return;
  const std::size_t count = faults.size();
  if (count > kMostFaults) {
    faults.resize(kMostFaults);
    faults.push_back(fmt::format("and {} more", count - kMostFaults));
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: {} fault{}: {}", path(), count, count == 1 ? "" : "s",
                          fmt::join(faults, "; ")));
}

std::string DumpFile::tensor_name(const std::string& layer, const std::string& part) const {
  return layer.empty() ? part : layer + "." + part;
}

void DumpFile::find_layers() {
  for (const io::TensorInfo& t : file_.tensors()) {
    for (const std::string& part : {q_name_, k_name_}) {
      if (t.name == part) layers_.emplace_back();
      if (t.name.ends_with("." + part)) {
        layers_.push_back(t.name.substr(0, t.name.size() - part.size() - 1));
      }
    }
  }
  std::sort(layers_.begin(), layers_.end(), natural_less);
  layers_.erase(std::unique(layers_.begin(), layers_.end()), layers_.end());
}

std::string DumpFile::no_layers_text() const {
  std::vector<std::string> names;
  for (const io::TensorInfo& t : file_.tensors()) {
    names.push_back(names.size() < kMostNames ? io::printable(t.name) : "...");
    if (names.size() > kMostNames) break;
  }
  return fmt::format("no tensors are named {} and {}, or end in .{} and .{}: found {}", q_name_,
                     k_name_, q_name_, k_name_,
                     names.empty() ? "none at all" : fmt::format("{}", fmt::join(names, ", ")));
}

const CalibratedLayer* DumpFile::calibrated(const std::string& layer) const {
  const std::vector<CalibratedLayer>& all = needs_.calibration->layers;
  const auto it = std::find_if(all.begin(), all.end(),
                               [&](const CalibratedLayer& c) { return c.name == layer; });
  return it == all.end() ? nullptr : &*it;
}

void DumpFile::check_layer(const std::string& layer, std::vector<std::string>& faults) const {
  const std::size_t before = faults.size();
  const auto find = [&](const std::string& part, bool needed) {
    const std::string name = tensor_name(layer, part);
    const io::TensorInfo* t = file_.find(name);
    if (t == nullptr && needed) faults.push_back(io::printable(name) + " is missing");
    return t;
  };
  const io::TensorInfo *q = find(q_name_, true), *k = find(k_name_, true),
                       *alpha = find("alpha", needs_.scales), *beta = find("beta", needs_.scales);
  if (q != nullptr) check_rows(*q, faults);
  if (k != nullptr) check_rows(*k, faults);
  if (faults.size() != before) return;
  check_pair(*q, *k, layout_, needs_.equal_tokens, faults);
  const Shape of_q = full_shape(q->shape, layout_), of_k = full_shape(k->shape, layout_);
  if (needs_.calibration != nullptr) {
    const CalibratedLayer* found = calibrated(layer);
    const std::string obstacle =
        found == nullptr ? fmt::format("the calibration has no layer {}", io::printable(layer))
                         : calibration_obstacle(*found, of_q[1], of_k[1], of_q[3]);
    if (!obstacle.empty()) faults.push_back(obstacle);
    return;
  }
  if (alpha != nullptr) check_scale(*alpha, of_q[0], of_q[1], faults);
  if (beta != nullptr) check_scale(*beta, of_k[0], of_k[1], faults);
}

FileTensor DumpFile::read_rows(const std::string& name) const {
  const io::TensorInfo& info = *file_.find(name);
  FileTensor t{info.dtype, info.shape, file_.read(info), {}};
  if (t.dtype == "F64") round_to_f32(t);
  expect_finite(path(), name, t);
  const Shape shape = full_shape(t.shape, layout_);
  Stride stride = contiguous_stride(shape);
  if (layout_ == FileLayout::bnhd && t.shape.size() > 2) {
    stride = {shape[2] * shape[1] * shape[3], shape[3], shape[1] * shape[3], 1};
  }
  t.view = view(static_cast<void*>(t.bytes.data()), *dtype_of(t.dtype), shape, stride);
  return t;
}

FileTensor DumpFile::read_scale(const std::string& name) const {
  const io::TensorInfo* info = file_.find(name);
  if (info == nullptr) return {};
  FileTensor t{info->dtype, info->shape, file_.read(*info), {}};
  expect_finite(path(), name, t);
  if (needs_.scales) expect_positive(path(), name, t);
  const Shape shape =
      t.shape.size() == 1 ? Shape{1, t.shape[0], 1, 1} : Shape{t.shape[0], t.shape[1], 1, 1};
  t.view = view(static_cast<void*>(t.bytes.data()), DType::f32, shape);
  return t;
}

DumpLayer DumpFile::read(std::size_t layer) const {
  const std::string& name = layers_[layer];
  DumpLayer read = {
      name, read_rows(tensor_name(name, q_name_)), read_rows(tensor_name(name, k_name_)), {}, {}};
  if (needs_.calibration != nullptr) {
    const CalibratedLayer& found = *calibrated(name);
    read.alpha = scale_of(found.alpha);
    read.beta = scale_of(found.beta);
  } else {
    read.alpha = read_scale(tensor_name(name, "alpha"));
    read.beta = read_scale(tensor_name(name, "beta"));
  }
  return read;
}

}  // namespace lln::cli
