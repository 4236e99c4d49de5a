// States of pieces of a sequence on their way between ranks. What travels is of the size of a
// state, whatever the number of tokens: docs/scale_model.md counts it. Each exchange is begun in
// one call and finished in another, so that a rank computes meanwhile.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lln_torch/ops/pieces.h"
#include "lln_torch/parallel/pieces.h"

namespace lln_torch {

// exp(part - whole), 0 where the part is empty (-inf).
at::Tensor share_of_mass(const at::Tensor& part, const at::Tensor& whole);

// The state of all keys, from each rank's own: a maximum and a sum over all ranks.
class StateMerge {
 public:
  // Begins the maximum.
  StateMerge(const Pieces& pieces, TensorState own);
  void begin_sum();
  struct Merged {
    TensorState all;   // the same on all ranks, for sequences that are shared
    at::Tensor share;  // of this rank's keys in the mass of each channel, as all.lse
  };
  Merged finish();

 private:
  const Pieces& pieces_;
  TensorState own_;
  at::Tensor largest_, own_mass_, sums_;
  RankGroup::Work work_;
};

// Gradients of a state that all ranks read, summed over them.
class StateGradientSum {
 public:
  StateGradientSum(const Pieces& pieces, TensorState own);
  TensorState finish();

 private:
  const Pieces& pieces_;
  TensorState own_;
  at::Tensor sums_;
  RankGroup::Work work_;
};

// The state of the keys on all ranks before this one, in ceil(log2 ranks) rounds: in each a rank
// passes what it knows to the rank twice as far.
class StateScan {
 public:
  // Begins the first round. Scans that are under way at once have tags of their own.
  StateScan(const Pieces& pieces, TensorState own, int tag);
  TensorState finish();  // c = -inf where there are no keys before

 private:
  void begin_round();

  const Pieces& pieces_;
  TensorState own_;
  int tag_, distance_ = 1;
  at::Tensor known_, before_, arriving_;
  RankGroup::Passed passed_;
};

// What the rows on all ranks after this one say of the keys on it. A rank gives the gradient of the
// state before it, as the linear form G = dC, T = C . dC - dc with the reference c: where the state
// is part of a larger one, with mass e^c, both only shrink by exp(c of the part - c of the whole).
class GradientScan {
 public:
  GradientScan(const Pieces& pieces, const TensorState& before, const TensorState& dbefore,
               int tag);
  // dL/d of the state of this rank's own keys; not defined where no rows are after it.
  TensorState finish(const TensorState& own);

 private:
  void begin_round();

  const Pieces& pieces_;
  std::int64_t dim_v_;
  int tag_, distance_ = 1;
  at::Tensor known_, after_, arriving_;
  RankGroup::Passed passed_;
};

}  // namespace lln_torch
