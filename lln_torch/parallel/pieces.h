// How a sequence is cut among the ranks of a group: rank r has the tokens that follow those of rank
// r - 1, any number of them. Made once for a batch and used by all layers of a model.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lln_torch/parallel/rank_group.h"

namespace lln_torch {

// Which tokens count; one of these, or none: all do.
struct PieceTokens {
  at::Tensor key_mask;     // bool [batch, tokens], of this piece
  at::Tensor key_lengths;  // int32 or int64 [batch], of the whole rows, the same on all ranks
  at::Tensor cu_seqlens;   // int32 or int64 [S + 1], packed sequences of the whole, likewise
};

class Pieces {
 public:
  // Every rank calls it with the number of its tokens. Throws lln::Error on all ranks where the
  // pieces do not fit together. The group outlives this object and its copies.
  Pieces(const RankGroup& group, std::int64_t tokens, const PieceTokens& which = {});
  // Where every rank knows the tokens of all, and nothing needs to be exchanged. With a key mask
  // `first_keys` are those of first_keys() below.
  Pieces(const RankGroup& group, std::vector<std::int64_t> lengths, const PieceTokens& which = {},
         std::vector<std::int64_t> first_keys = {});

  const RankGroup& group() const { return *group_; }
  std::int64_t tokens() const { return lengths_[static_cast<std::size_t>(group_->rank())]; }
  std::int64_t offset() const { return offset_; }  // tokens before this piece
  std::int64_t whole() const { return whole_; }    // tokens of all pieces

  // Of this piece, as attention takes them.
  const at::Tensor& key_mask() const { return key_mask_; }
  const at::Tensor& key_lengths() const { return key_lengths_; }
  const at::Tensor& cu_seqlens() const { return cu_seqlens_; }
  // With a key mask: the first token that counts of each row of the whole, `whole()` for none; and
  // the same in tokens of this piece, int64 [batch], where the mask of the piece does not say it.
  const std::vector<std::int64_t>& first_keys() const { return first_keys_; }
  const at::Tensor& block_origins() const { return block_origins_; }

  // Whether any state has to be exchanged, and of which packed sequences, as int64 [n]; not
  // defined: of all rows.
  bool shares() const { return shares_; }
  const at::Tensor& shared() const { return shared_; }

  // Blocks of Diag begin at the first token that counts of each sequence. Throws lln::Error, on all
  // ranks alike, where a piece begins inside of one; the text names the nearest places to cut at.
  void expect_whole_blocks(std::int64_t block) const;

 private:
  void place_lengths(std::vector<std::int64_t> lengths);
  void take_tokens(const PieceTokens& which);
  void find_shared();
  bool may_cut(std::int64_t token, std::int64_t block) const;

  const RankGroup* group_;
  std::vector<std::int64_t> lengths_;  // of all ranks
  std::int64_t offset_ = 0, whole_ = 0;
  at::Tensor key_mask_, key_lengths_, cu_seqlens_, block_origins_;
  std::vector<std::int64_t> first_keys_, borders_;  // borders: first tokens of packed sequences
  bool shares_ = false;
  at::Tensor shared_;
};

}  // namespace lln_torch
