// Lengths and first keys of all ranks, and what follows from them.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/pieces.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <span>

#include "lln/error.h"
#include "math/fnv.h"

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

// What each rank says of its arguments, in one exchange: those that one rank alone finds wrong, or
// that differ, are refused by all, so that none waits for another.
struct PieceRecord {
  std::int64_t tokens = 0, refused = 0;
  struct Same {  // on all ranks
    std::int64_t which = 0, entries = 0, checksum = 0;
    bool operator==(const Same&) const = default;
  } same;

  std::string text() const {
    if (same.which == 0) return "no key_mask, key_lengths or cu_seqlens";
    constexpr std::array kWhich = {"key_mask", "key_lengths", "cu_seqlens"};
    return fmt::format(
        "{} with {} entries{}", kWhich[static_cast<std::size_t>(same.which - 1)], same.entries,
        same.checksum != 0 ? fmt::format(" and the checksum {:x}", same.checksum) : "");
  }
};
constexpr std::int64_t kRecordNumbers = sizeof(PieceRecord) / sizeof(std::int64_t);

std::string fault_of_arguments(std::int64_t tokens, const PieceTokens& which) {
  if (tokens < 0) return fmt::format("a piece has {} tokens", tokens);
  if (which.key_mask.defined() + which.key_lengths.defined() + which.cu_seqlens.defined() > 1) {
    return "of key_mask, key_lengths and cu_seqlens more than one is given";
  }
  const at::Tensor& mask = which.key_mask;
  if (mask.defined() && (mask.dim() != 2 || mask.size(1) != tokens)) {
    return fmt::format("key_mask has shape [{}]: expected [batch, {}]",
                       fmt::join(mask.sizes(), ", "), tokens);
  }
  for (const at::Tensor* numbers : {&which.key_lengths, &which.cu_seqlens}) {
    if (numbers->defined() && (numbers->dim() != 1 || numbers->is_floating_point())) {
      return "key_lengths and cu_seqlens must be integers, [batch] and [sequences + 1]";
    }
  }
  return {};
}

PieceRecord record_of(std::int64_t tokens, const PieceTokens& which, bool refused) {
  if (refused) return {.refused = 1};
  PieceRecord record{.tokens = tokens};
  if (which.key_mask.defined()) record.same = {1, which.key_mask.size(0), 0};
  for (const auto& [number, x] : {std::pair{2, which.key_lengths}, {3, which.cu_seqlens}}) {
    if (!x.defined()) continue;
    const std::vector<std::int64_t> numbers = to_vector(x);
    // Without its last bit: never negative.
    const std::uint64_t checksum = lln::fnv1a(std::as_bytes(std::span(numbers))) >> 1;
    record.same = {number, x.size(0), static_cast<std::int64_t>(checksum)};
  }
  return record;
}

std::vector<PieceRecord> gather_records(const RankGroup& group, const PieceRecord& own) {
  std::vector<PieceRecord> records = {own};
  if (group.size() == 1) return records;
  std::vector<std::int64_t> numbers(kRecordNumbers);
  std::memcpy(numbers.data(), &own, sizeof(own));
  numbers = to_vector(group.gather(to_tensor(numbers, group.device())));
  records.resize(static_cast<std::size_t>(group.size()));
  std::memcpy(static_cast<void*>(records.data()), numbers.data(),
              numbers.size() * sizeof(std::int64_t));
  return records;
}

// Tokens of each rank.
std::vector<std::int64_t> agree_on_pieces(const RankGroup& group, std::int64_t tokens,
                                          const PieceTokens& which) {
  const std::string fault = fault_of_arguments(tokens, which);
  const auto records = gather_records(group, record_of(tokens, which, !fault.empty()));
  if (!fault.empty()) refuse_pieces(fault);
  std::vector<std::int64_t> lengths;
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    const PieceRecord& record = records[rank];
    if (record.refused != 0) {
      refuse_pieces(fmt::format("rank {} has arguments that are refused there", rank));
    }
    if (record.same != records[0].same) {
      refuse_pieces(fmt::format("rank {} has {} and rank 0 has {}: expected the same", rank,
                                record.text(), records[0].text()));
    }
    lengths.push_back(record.tokens);
  }
  return lengths;
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
  place_lengths(agree_on_pieces(group, tokens, which));
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
  for (const std::int64_t length : lengths) {
    if (length < 0) refuse_pieces(fmt::format("a piece has {} tokens", length));
  }
  if (std::ssize(lengths) != group.size()) {
    refuse_pieces(fmt::format("{} lengths for {} ranks", lengths.size(), group.size()));
  }
  place_lengths(std::move(lengths));
  const std::string fault = fault_of_arguments(tokens(), which);
  if (!fault.empty()) refuse_pieces(fault);
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
  const auto own = [&](const at::Tensor& x) {
    return (x - offset_).clamp(0, tokens()).to(group_->device());
  };
  if (which.key_mask.defined()) {
    key_mask_ = which.key_mask.to(group_->device());
    // Where a piece has keys and its first token counts, or the row begins in it, blocks are
    // counted right without being told.
    const at::Tensor origins = to_tensor(first_keys_, key_mask_.device()) - offset_;
    const at::Tensor first = first_counted(key_mask_, tokens());
    if (((first < tokens()) & (first != origins.clamp_min(0))).any().item<bool>()) {
      block_origins_ = origins;
    }
  }
  if (which.key_lengths.defined()) {
    for (const std::int64_t length : to_vector(which.key_lengths)) {
      if (length >= 0 && length <= whole_) continue;
      refuse_pieces(fmt::format("key_lengths has {}: expected 0 to {}", length, whole_));
    }
    key_lengths_ = own(which.key_lengths);
  }
  shares_ = group_->size() > 1;
  if (which.cu_seqlens.defined()) {
    borders_ = to_vector(which.cu_seqlens);
    if (borders_.empty() || borders_.front() != 0 || borders_.back() != whole_ ||
        !std::is_sorted(borders_.begin(), borders_.end())) {
      refuse_pieces(
          fmt::format("cu_seqlens must rise from 0 to the tokens of all pieces, {}", whole_));
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

// Whether a piece may begin there.
bool Pieces::may_cut(std::int64_t token, std::int64_t block) const {
  if (token == 0 || token == whole_) return true;
  const auto whole_blocks = [&](std::int64_t first) {
    return token <= first || (token - first) % block == 0;
  };
  if (!borders_.empty()) {
    return whole_blocks(*(std::upper_bound(borders_.begin(), borders_.end(), token) - 1));
  }
  if (first_keys_.empty()) return whole_blocks(0);
  return std::all_of(first_keys_.begin(), first_keys_.end(), whole_blocks);
}

void Pieces::expect_whole_blocks(std::int64_t block) const {
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < lengths_.size(); begin += lengths_[rank++]) {
    if (may_cut(begin, block)) continue;
    std::int64_t below = begin, above = begin;
    while (!may_cut(below, block)) --below;
    while (!may_cut(above, block)) ++above;
    refuse_pieces(fmt::format(
        "the piece of rank {} begins at token {} of {}, inside of a block of {} tokens: "
        "the nearest places to cut are {} and {}",
        rank, begin, whole_, block, below, above));
  }
}

}  // namespace lln_torch
