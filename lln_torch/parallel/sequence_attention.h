// Attention over a sequence that lies in pieces on the ranks of a group. Ranks exchange states, of
// which the size does not depend on the number of tokens; outputs and gradients are those of the
// uncut sequence, up to rounding.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lln_torch/ops/attention.h"
#include "lln_torch/parallel/pieces.h"

namespace lln_torch {

// As attention() of ops/attention.h with q, k and v of this rank's piece; every rank of the group
// calls it with the same options, in the same order, also where its piece has no tokens. Which
// tokens count is said by `pieces`: masks, lengths and cu_seqlens of the call must not be given.
// mix and weights per token are those of the piece. Blocks of Diag may not be cut by a border.
//
// Batch, heads and channels must be the same on all ranks: c10d ends the process where sizes of an
// exchange differ.
//
// Gradients of alpha, beta, mix and weights are this rank's part of them, as those of all
// parameters of a model whose tokens are spread: the sum over ranks is the gradient. Every rank has
// to run its backward pass.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionCall& call, const Pieces& pieces);

// Moments of q and k joined over all pieces, f64 [S, heads, 3] and [S, heads_k, 3] in host memory.
struct PieceMoments {
  at::Tensor q, k;
};
PieceMoments join_moments(const at::Tensor& q, const at::Tensor& k, const Pieces& pieces);

}  // namespace lln_torch
