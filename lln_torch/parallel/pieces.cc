// Lengths and first keys of all ranks, and what follows from them.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/pieces.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lln/error.h"

namespace lln_torch {
namespace {

[[noreturn]] void refuse_pieces(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, text);
}

std::vector<std::int64_t> to_vector(const at::Tensor& x) {
  const at::Tensor host = x.to(at::kCPU, at::kLong).contiguous();
  const auto* const numbers = host.const_data_ptr<std::int64_t>();
  return {numbers, numbers + host.numel()};
}

at::Tensor to_tensor(const std::vector<std::int64_t>& numbers, const c10::Device& device) {
  return at::tensor(numbers, at::kLong).to(device);
}

// Each rank's number, on all of them.
std::vector<std::int64_t> gather_numbers(const RankGroup& group, std::int64_t own) {
  if (group.size() == 1) return {own};
  return to_vector(group.gather(to_tensor({own}, group.device())));
}

// The first token of each row that counts, `none` where there is no such.
at::Tensor first_counted(const at::Tensor& mask, std::int64_t none) {
  const at::TensorOptions options = mask.options().dtype(at::kLong);
  if (mask.size(1) == 0) return at::full({mask.size(0)}, none, options);
  return at::where(mask != 0, at::arange(mask.size(1), options), none).amin(1);
}

}  // namespace

Pieces::Pieces(const RankGroup& group, std::int64_t tokens, const PieceTokens& which)
    : group_(&group) {
  if (tokens < 0) refuse_pieces(fmt::format("a piece has {} tokens", tokens));
  place_lengths(gather_numbers(group, tokens));
  if (which.key_mask.defined()) {
    at::Tensor first = first_counted(which.key_mask, whole_ - offset_) + offset_;
    first = first.to(group.device()).contiguous();
    if (group.size() > 1) group.wait(group.begin_min(first));
    first_keys_ = to_vector(first);
  }
  take_tokens(which);
}

Pieces::Pieces(const RankGroup& group, std::vector<std::int64_t> lengths, const PieceTokens& which,
               std::vector<std::int64_t> first_keys)
    : group_(&group), first_keys_(std::move(first_keys)) {
  if (std::ssize(lengths) != group.size()) {
    refuse_pieces(fmt::format("{} lengths for {} ranks", lengths.size(), group.size()));
  }
  place_lengths(std::move(lengths));
  if (which.key_mask.defined() && std::ssize(first_keys_) != which.key_mask.size(0)) {
    refuse_pieces(fmt::format("a key mask of {} rows needs the first key of each: {} are given",
                              which.key_mask.size(0), first_keys_.size()));
  }
  take_tokens(which);
}

void Pieces::place_lengths(std::vector<std::int64_t> lengths) {
  lengths_ = std::move(lengths);
  offset_ = std::accumulate(lengths_.begin(), lengths_.begin() + group_->rank(), std::int64_t{0});
  whole_ = std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0});
}

void Pieces::take_tokens(const PieceTokens& which) {
  if (which.key_mask.defined() + which.key_lengths.defined() + which.cu_seqlens.defined() > 1) {
    refuse_pieces("of key_mask, key_lengths and cu_seqlens more than one is given");
  }
  const auto own = [&](const at::Tensor& x) { return (x - offset_).clamp(0, tokens()); };
  if (which.key_mask.defined()) {
    if (which.key_mask.dim() != 2 || which.key_mask.size(1) != tokens()) {
      refuse_pieces(
          fmt::format("key_mask has {} tokens, the piece {}", which.key_mask.size(-1), tokens()));
    }
    key_mask_ = which.key_mask;
    block_origins_ = to_tensor(first_keys_, key_mask_.device()) - offset_;
  }
  if (which.key_lengths.defined()) key_lengths_ = own(which.key_lengths);
  shares_ = group_->size() > 1;
  if (which.cu_seqlens.defined()) {
    borders_ = to_vector(which.cu_seqlens);
    if (borders_.empty() || borders_.front() != 0 || borders_.back() != whole_) {
      refuse_pieces(
          fmt::format("cu_seqlens must go from 0 to the tokens of all pieces, {}", whole_));
    }
    cu_seqlens_ = own(which.cu_seqlens);
    find_shared();
  }
}

void Pieces::find_shared() {
  if (!shares_) return;
  std::vector<std::int64_t> shared;
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths_) {
    // The sequence that goes on over the border at `begin`: it began before.
    const auto after = std::upper_bound(borders_.begin(), borders_.end(), begin);
    if (after != borders_.end() && after != borders_.begin() && *(after - 1) < begin) {
      const std::int64_t sequence = after - borders_.begin() - 1;
      if (shared.empty() || shared.back() != sequence) shared.push_back(sequence);
    }
    begin += length;
  }
  shares_ = !shared.empty();
  shared_ = to_tensor(shared, cu_seqlens_.device());
}

void Pieces::expect_whole_blocks(std::int64_t block) const {
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < lengths_.size(); begin += lengths_[rank++]) {
    if (begin == 0 || begin == whole_) continue;
    const auto expect = [&](std::int64_t first, const std::string& of) {
      const std::int64_t inside = begin > first ? (begin - first) % block : 0;
      if (inside == 0) return;
      refuse_pieces(fmt::format(
          "the piece of rank {} begins at token {}, inside of a block of {} tokens{}: cut at token "
          "{} or {}",
          rank, begin, block, of, begin - inside, begin - inside + block));
    };
    if (!borders_.empty()) {
      const auto after = std::upper_bound(borders_.begin(), borders_.end(), begin);
      expect(*(after - 1), " of a packed sequence");
    } else if (first_keys_.empty()) {
      expect(0, "");
    }
    for (std::size_t row = 0; row < first_keys_.size(); ++row) {
      expect(first_keys_[row],
             fmt::format(", as those of row {} begin at token {}", row, first_keys_[row]));
    }
  }
}

}  // namespace lln_torch
