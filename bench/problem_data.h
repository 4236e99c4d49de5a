// Tensors for a problem text, and the call itself. All memory is there before the first call, so
// that a call does nothing but compute.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "bench/tensor_memory.h"
#include "lln/attention.h"
#include "lln/decode.h"
#include "lln/moments.h"

namespace lln::bench {

// How a problem is called.
struct Manner {
  bool matched = false;     // alpha and beta are matched to q and k before every forward
  bool parameters = false;  // backward passes give the gradients of alpha, beta and mix, too
  bool graph = false;       // on a device: inside a CUDA graph
  std::string kernel;       // this one; empty: the first that takes the problem
};

class ProblemData {
 public:
  // The keys of `masked` are all but a few at the end and the sequences of `packed` equally long:
  // the problem's cost is then that of the data. Calls are carried out as `exec` says, whose
  // workspace is large enough, or with one that is given later.
  ProblemData(const Problem& problem, TensorMemory& memory, const Exec& exec,
              const Manner& manner = {});
  ProblemData(const ProblemData&) = delete;
  ProblemData& operator=(const ProblemData&) = delete;

  // One call of the problem; for train, forward and then backward with what the forward saved; an
  // append is to an empty state, a step to what the steps before it left.
  void run();

  // Of these calls; other calls of the problem may need more.
  std::size_t needed_workspace() const;
  void use_workspace(std::span<std::byte> workspace) { exec_.workspace = workspace; }

 private:
  void make_inputs(TensorMemory& memory);
  void make_lengths(TensorMemory& memory);
  void make_outputs(TensorMemory& memory);
  void make_parameter_gradients(TensorMemory& memory);
  void make_state(TensorMemory& memory);
  void make_matching(TensorMemory& memory);
  void forward();
  void backward();
  void decode();

  Problem problem_;
  Exec exec_;
  AttentionOptions options_;
  AttentionInputs in_;
  AttentionOutputs out_;
  AttentionGradients grads_;
  std::optional<DecodeState> state_;
  MatchingInputs pair_;  // q and k, where alpha and beta are matched to them
  MatchingOutputs scales_;
  Exec matching_exec_;
};

}  // namespace lln::bench
