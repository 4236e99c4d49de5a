// Reading of the inputs. A file is checked as a whole before a byte of its data is read.
// SPDX-License-Identifier: Apache-2.0
#include "attention_file.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "attention_file_check.h"

namespace lln::cli {
namespace {

DType dtype_of(std::string_view name) {
  return name == "F16" ? DType::f16 : name == "BF16" ? DType::bf16 : DType::f32;
}

const char* name_of(DType dtype) {
  return dtype == DType::f16 ? "F16" : dtype == DType::bf16 ? "BF16" : "F32";
}

// Token and head change places; the same permutation leads back.
Shape reordered(Shape shape, FileLayout layout) {
  if (layout == FileLayout::bnhd) std::swap(shape[1], shape[2]);
  return shape;
}

void set_view(FileTensor& t, const Shape& shape, FileLayout layout = FileLayout::bhnd) {
  const Stride stride = reordered(contiguous_stride(reordered(shape, layout)), layout);
  t.view = view(static_cast<void*>(t.bytes.data()), dtype_of(t.dtype), shape, stride);
}

Shape parameter_shape(const std::vector<std::int64_t>& shape) {
  return shape.size() == 1 ? Shape{1, shape[0], 1, 1} : Shape{shape[0], shape[1], 1, 1};
}

// Weights have 0 to 3 dimensions in files: one number, per head, per head and channel, per token.
Shape weight_shape(const std::vector<std::int64_t>& shape) {
  switch (shape.size()) {
    case 1:
      return {1, shape[0], 1, 1};
    case 2:
      return {1, shape[0], 1, shape[1]};
    case 3:
      return {shape[0], shape[1], shape[2], 1};
    default:
      return {1, 1, 1, 1};
  }
}

// The number of a flag for every head; nothing where there is no flag.
std::vector<float> per_head(std::optional<float> flag, std::int64_t heads) {
  if (!flag) return {};
  return std::vector<float>(static_cast<std::size_t>(heads), *flag);
}

IndexView index_view(const FileTensor* t) {
  if (t == nullptr) return {};
  const auto count = static_cast<std::size_t>(t->shape[0]);
  if (t->dtype == "I64") {
    return std::span(reinterpret_cast<const std::int64_t*>(t->bytes.data()), count);
  }
  return std::span(reinterpret_cast<const std::int32_t*>(t->bytes.data()), count);
}

}  // namespace

FileTensor make_tensor(DType dtype, const Shape& shape, FileLayout layout) {
  FileTensor t;
  t.dtype = name_of(dtype);
  const Shape in_file = reordered(shape, layout);
  t.shape.assign(in_file.begin(), in_file.end());
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes))
      throw std::bad_alloc();
  }
  t.bytes = io::Bytes(bytes);
  set_view(t, shape, layout);
  return t;
}

FileTensor make_like(const FileTensor& other) {
  FileTensor t{other.dtype, other.shape, io::Bytes(other.bytes.size()), other.view};
  t.view.data = t.bytes.data();
  return t;
}

AttentionFile::AttentionFile(const io::TensorSource& file, const FileRequest& request) {
  AttentionFileCheck check(file, request);
  warnings_ = check.warnings();
  check.check_all();
  for (const io::TensorInfo& info : file.tensors()) {
    if (!check.known(info.name) || !check.used(info.name)) continue;
    tensors_[info.name] = {info.dtype, info.shape, file.read(info), {}};
  }
  view_attention(request.layout);
  matching_ = check.matching();
  if (matching_ == Matching::frozen) {
    const CalibratedLayer* const found = request.calibrated;
    view_parameter("alpha", inputs_.alpha,
                   found != nullptr ? found->alpha : per_head(request.alpha, inputs_.q.shape[1]));
    view_parameter("beta", inputs_.beta,
                   found != nullptr ? found->beta : per_head(request.beta, inputs_.k.shape[1]));
  }
  if (check.used("mix")) view_weights(request.mix.value_or(AttentionOptions().mix));
  view_keys();
  if (matching_ && matching_ != Matching::frozen) add_scales();
}

void AttentionFile::view_attention(FileLayout layout) {
  const auto set = [&](const char* name) -> ConstView {
    FileTensor* t = find(name);
    if (t == nullptr) return {};
    set_view(*t, reordered({t->shape[0], t->shape[1], t->shape[2], t->shape[3]}, layout), layout);
    return t->view;
  };
  inputs_.q = set("q");
  inputs_.k = set("k");
  inputs_.v = set("v");
  set("g");
}

void AttentionFile::view_parameter(const char* name, ConstView& input,
                                   const std::vector<float>& otherwise) {
  FileTensor* t = find(name);
  if (t == nullptr) {
    t = &add_per_head(name, otherwise);
  } else {
    set_view(*t, parameter_shape(t->shape));
  }
  input = t->view;
}

// Scales that match() sets have their memory from the start, so that the call can be checked before
// a pass over q and k is spent on it.
void AttentionFile::add_scales() {
  const std::int64_t sequences = inputs_.cu_seqlens_q.given()
                                     ? std::max<std::int64_t>(inputs_.cu_seqlens_q.count - 1, 0)
                                     : inputs_.q.shape[0];
  const auto add = [&](const char* name, std::int64_t heads) -> View {
    FileTensor t = make_tensor(DType::f32, {sequences, heads, 1, 1}, FileLayout::bhnd);
    t.shape = {sequences, heads};
    std::fill_n(static_cast<float*>(t.view.data), sequences * heads, 1.0F);
    return (tensors_[name] = std::move(t)).view;
  };
  inputs_.alpha = add("alpha", inputs_.q.shape[1]);
  inputs_.beta = add("beta", inputs_.k.shape[1]);
}

MatchingReport AttentionFile::match(const AttentionOptions& options, const Exec& exec) {
  if (!matching_ || matching_ == Matching::frozen) return {};
  return match_moments({.q = inputs_.q,
                        .k = inputs_.k,
                        .key_lengths = inputs_.key_lengths,
                        .key_mask = inputs_.key_mask,
                        .cu_seqlens_q = inputs_.cu_seqlens_q,
                        .cu_seqlens_k = inputs_.cu_seqlens_k},
                       {.alpha = find("alpha")->view, .beta = find("beta")->view},
                       {.mode = *matching_, .causal = options.causal, .feature = options.feature},
                       exec);
}

void AttentionFile::view_weights(float mix) {
  const std::pair<const char*, ConstView*> weights[] = {{"mix", &inputs_.mix},
                                                        {"lln_weight", &inputs_.lln_weight},
                                                        {"diag_weight", &inputs_.diag_weight}};
  bool any = false;
  for (const auto& [name, input] : weights) {
    FileTensor* t = find(name);
    if (t == nullptr) continue;
    set_view(*t, weight_shape(t->shape));
    *input = t->view;
    any = true;
  }
  if (!any) inputs_.mix = add_per_head("mix", per_head(mix, inputs_.q.shape[1])).view;
}

void AttentionFile::view_keys() {
  inputs_.key_lengths = index_view(find("key_lengths"));
  if (const FileTensor* mask = find("key_mask")) {
    inputs_.key_mask = mask_view(reinterpret_cast<const std::uint8_t*>(mask->bytes.data()),
                                 mask->shape[0], mask->shape[1]);
  }
  const FileTensor* both = find("cu_seqlens");
  inputs_.cu_seqlens_q = index_view(both != nullptr ? both : find("cu_seqlens_q"));
  inputs_.cu_seqlens_k = index_view(find("cu_seqlens_k"));
}

FileTensor& AttentionFile::add_per_head(const char* name, const std::vector<float>& values) {
  const std::int64_t heads = std::ssize(values);
  FileTensor t = make_tensor(DType::f32, {1, heads, 1, 1}, FileLayout::bhnd);
  t.shape = {heads};
  std::copy(values.begin(), values.end(), static_cast<float*>(t.view.data));
  return tensors_[name] = std::move(t);
}

FileTensor* AttentionFile::find(const std::string& name) noexcept {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

const FileTensor* AttentionFile::tensor(const std::string& name) const noexcept {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace lln::cli
