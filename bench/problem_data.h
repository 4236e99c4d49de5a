// Tensors for a problem text: Gaussian inputs, outputs whose pages exist, and the call itself. All
// memory is allocated and touched here, so that a call does nothing but compute.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "io/bytes.h"
#include "lln/attention.h"
#include "lln/decode.h"

namespace lln::bench {

class ProblemData {
 public:
  // The keys of `masked` are all but a few at the
  // end and the sequences of `packed` equally long: the problem's cost is then that of the data.
  ProblemData(const Problem& problem, Parallel& threads);
  ProblemData(const ProblemData&) = delete;
  ProblemData& operator=(const ProblemData&) = delete;

  // One call of the problem; for train, forward and then backward with what the forward saved; an
  // append is to an empty state, a step to what the steps before it left.
  void run();

  std::size_t workspace_bytes() const { return workspace_.size(); }

 private:
  ConstView gaussian(const Shape& shape);
  View zeros(DType dtype, const Shape& shape);
  void make_inputs();
  void make_lengths();
  void make_outputs();
  void make_state();
  void forward();
  void backward();
  void decode();
  Exec exec();

  Problem problem_;
  Parallel& threads_;
  AttentionOptions options_;
  std::vector<io::Bytes> memory_;
  std::vector<std::int64_t> key_lengths_, cu_seqlens_q_, cu_seqlens_k_;
  AttentionInputs in_;
  AttentionOutputs out_;
  AttentionGradients grads_;
  std::optional<DecodeState> state_;
  io::Bytes workspace_;
};

}  // namespace lln::bench
