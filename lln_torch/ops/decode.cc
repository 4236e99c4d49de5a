// A state owns its tensors; the binding's calls work on them.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/decode.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "lln/error.h"
#include "lln_torch/binding/decode.h"
#include "lln_torch/ops/handles.h"

namespace lln_torch {
namespace {

[[noreturn]] void refuse_decoding(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, text);
}

void refuse_decode_gradients(const at::Tensor& x) {
  if (x.defined() && at::GradMode::is_enabled() && x.requires_grad()) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     "decoding has no gradients: call it under a NoGradGuard, or use the causal "
                     "attention() to train");
  }
}

at::Tensor row(const at::Tensor& x) {
  refuse_decode_gradients(x);
  if (x.defined() && x.scalar_type() == at::kDouble) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     "decoding takes float32, bfloat16 and float16, found float64");
  }
  return with_contiguous_channels(in_autocast_type(x));
}

at::Tensor state_scale(const at::Tensor& x, double number, at::Device device) {
  if (!x.defined()) return at::full({}, number, at::TensorOptions(at::kFloat).device(device));
  return x.detach().to(device, at::kFloat);
}

std::string scale_text(const at::Tensor& x) {
  const at::Tensor host = x.cpu().contiguous();
  const auto* number = host.const_data_ptr<float>();
  return fmt::format("[{}]", fmt::join(number, number + host.numel(), ", "));
}

}  // namespace

DecodeState::DecodeState(const DecodeOptions& options)
    : sizes_{options.batch, options.heads, options.heads_k.value_or(options.heads), options.dim,
             options.dim_v.value_or(options.dim)},
      kind_(options.diag_block == 0 ? "lln" : "lln+diag" + std::to_string(options.diag_block)),
      feature_(options.feature),
      fixed_mix_(options.fixed_mix) {
  const at::Device device = options.device;
  if (!device.is_cpu() && !device.is_cuda()) {
    refuse_decoding("a decode state on device " + device.str() + ": expected cpu or cuda");
  }
  if (options.mix.defined()) {
    if (options.diag_block == 0) {
      refuse_decoding("mix is given, and LLN alone (diag_block 0) has nothing to mix");
    }
    mix_ = options.mix.detach().to(device, at::kFloat);
  }
  alpha_ = state_scale(options.alpha, options.fixed_alpha, device);
  beta_ = state_scale(options.beta, options.fixed_beta, device);
  const std::int64_t size = binding::decode_bytes(sizes_, kind_, feature_, !device.is_cpu());
  memory_ = at::empty({size}, at::TensorOptions(at::kByte).device(device));
  counts_ = at::zeros({device.is_cpu() ? options.batch : 0}, at::kLong);
  reset();
}

DecodeState::DecodeState(Uninitialised, const DecodeState& like)
    : sizes_(like.sizes_),
      kind_(like.kind_),
      feature_(like.feature_),
      fixed_mix_(like.fixed_mix_),
      mix_(like.mix_),
      alpha_(like.alpha_),
      beta_(like.beta_) {}

at::Tensor DecodeState::weight(const at::Tensor& mix) const {
  if (!mix.defined()) return mix_;
  if (kind_ == "lln") {
    refuse_decoding("mix is given, and LLN alone (diag_block 0) has nothing to mix");
  }
  refuse_decode_gradients(mix);
  return mix.to(at::kFloat);
}

at::Tensor DecodeState::append(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& mix, const at::Tensor& lengths) {
  const binding::Tensor rows = binding::decode_append(
      to_binding("memory", memory_), to_binding("tokens", counts_),
      to_binding_optional("q", row(q)), to_binding("k", row(k)), to_binding("v", row(v)),
      to_binding("alpha", alpha_), to_binding("beta", beta_),
      to_binding_optional("mix", weight(mix)), {}, to_binding_optional("lengths", lengths), sizes_,
      kind_, fixed_mix_, feature_);
  return q.defined() ? from_binding(rows) : at::Tensor();
}

at::Tensor DecodeState::step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& mix) {
  return from_binding(binding::decode_step(
      to_binding("memory", memory_), to_binding("tokens", counts_), to_binding("q", row(q)),
      to_binding("k", row(k)), to_binding("v", row(v)), to_binding("alpha", alpha_),
      to_binding("beta", beta_), to_binding_optional("mix", weight(mix)), {}, sizes_, kind_,
      fixed_mix_, feature_));
}

at::Tensor DecodeState::read(const at::Tensor& q, const at::Tensor& mix) const {
  return from_binding(binding::decode_read(
      to_binding("memory", memory_), to_binding("tokens", counts_), to_binding("q", row(q)),
      to_binding("alpha", alpha_), to_binding_optional("mix", weight(mix)), {}, sizes_, kind_,
      fixed_mix_, feature_));
}

void DecodeState::reset() {
  binding::decode_reset(to_binding("memory", memory_), to_binding("tokens", counts_), -1, sizes_,
                        kind_, fixed_mix_, feature_);
}

void DecodeState::reset(std::int64_t sequence) {
  if (sequence < 0 || sequence >= sizes_[0]) {
    refuse_decoding(fmt::format("sequence {}: expected 0 to {}", sequence, sizes_[0] - 1));
  }
  binding::decode_reset(to_binding("memory", memory_), to_binding("tokens", counts_), sequence,
                        sizes_, kind_, fixed_mix_, feature_);
}

void DecodeState::merge(const DecodeState& later) {
  const auto text = [](const DecodeState& s) {
    return fmt::format("batch {}, heads {}, key heads {}, dim {}, dim_v {}, {}, {}, mix {}",
                       s.sizes_[0], s.sizes_[1], s.sizes_[2], s.sizes_[3], s.sizes_[4], s.kind_,
                       s.feature_, s.fixed_mix_);
  };
  if (text(*this) != text(later)) {
    refuse_decoding(fmt::format("a state of ({}) and one of ({}): expected the same configuration",
                                text(*this), text(later)));
  }
  // Sums are of exp(beta k); alpha and mix belong to the reader.
  const std::vector<std::int64_t> keys{sizes_[0], sizes_[2]};
  if (!at::equal(beta_.expand(keys), later.beta_.to(device()).expand(keys))) {
    refuse_decoding(fmt::format(
        "a state of beta {} and one of {}: their sums are of different features of the keys and "
        "cannot be added",
        scale_text(beta_), scale_text(later.beta_)));
  }
  binding::decode_merge(to_binding("memory", memory_), to_binding("tokens", counts_),
                        to_binding("memory", later.memory_), to_binding("tokens", later.counts_),
                        sizes_, kind_, fixed_mix_, feature_);
}

DecodeState DecodeState::fork() const {
  DecodeState copy(Uninitialised{}, *this);
  copy.memory_ = memory_.clone();
  copy.counts_ = counts_.clone();
  return copy;
}

DecodeState DecodeState::select(const at::Tensor& sequences) const {
  if (!sequences.defined() || sequences.dim() != 1 || sequences.scalar_type() != at::kLong) {
    refuse_decoding("sequences must be int64 [batch]");
  }
  const std::int64_t batch = sizes_[0];
  // Those on a device are checked there, by torch.
  if (sequences.is_cpu() && sequences.numel() > 0 &&
      (sequences.min().item<std::int64_t>() < 0 || sequences.max().item<std::int64_t>() >= batch)) {
    refuse_decoding(fmt::format("sequences from {} to {}: expected 0 to {}",
                                sequences.min().item<std::int64_t>(),
                                sequences.max().item<std::int64_t>(), batch - 1));
  }
  DecodeState chosen(Uninitialised{}, *this);
  chosen.sizes_[0] = sequences.size(0);
  const at::Tensor places = sequences.to(device());
  std::vector<at::Tensor> parts{memory_};
  if (device().is_cpu()) {
    chosen.counts_ = counts_.index_select(0, places);
  } else {
    // Behind the sums of all sequences lie the counts, 8 bytes for each of their key heads.
    const std::int64_t sums = memory_.numel() - 8 * batch * sizes_[2];
    parts = {memory_.narrow(0, 0, sums), memory_.narrow(0, sums, memory_.numel() - sums)};
    chosen.counts_ = counts_;
  }
  for (at::Tensor& part : parts) {
    part = part.view({batch, -1}).index_select(0, places).flatten();
  }
  chosen.memory_ = at::cat(parts);
  for (at::Tensor* scale : {&chosen.alpha_, &chosen.beta_}) {
    if (scale->dim() == 2 && scale->size(0) == batch) *scale = scale->index_select(0, places);
  }
  return chosen;
}

std::string DecodeState::save() const {
  const at::Tensor bytes = from_binding(binding::decode_save(to_binding("memory", memory_),
                                                             to_binding("tokens", counts_), sizes_,
                                                             kind_, fixed_mix_, feature_));
  return {static_cast<const char*>(bytes.const_data_ptr()),
          static_cast<std::size_t>(bytes.numel())};
}

void DecodeState::load(std::string_view bytes) {
  at::Tensor copy = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  binding::decode_load(to_binding("memory", memory_), to_binding("tokens", counts_),
                       to_binding("bytes", copy), sizes_, kind_, fixed_mix_, feature_);
}

at::Tensor DecodeState::tokens() const {
  return from_binding(binding::decode_tokens(to_binding("memory", memory_),
                                             to_binding("tokens", counts_), sizes_, kind_,
                                             fixed_mix_, feature_));
}

std::int64_t DecodeState::bytes() const { return memory_.numel(); }

at::Device DecodeState::device() const { return memory_.device(); }

}  // namespace lln_torch
