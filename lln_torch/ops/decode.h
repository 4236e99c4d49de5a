// Decoding on tensors: causal LLN and LLN+Diag, token after token, with a state whose size does not
// grow with the tokens. Appending tokens in any pieces gives the rows of the causal attention(), to
// rounding. There are no gradients.
//
// On a CUDA device append, step, read, reset and fork put their work into the current stream and
// return, and can be captured in a CUDA graph; the others wait.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lln_torch {

struct DecodeOptions {
  std::int64_t batch = 1;  // sequences that are decoded together
  std::int64_t heads = 1;
  std::int64_t dim = 0;                 // channels of queries and keys
  std::optional<std::int64_t> heads_k;  // as many as query heads where not given
  std::optional<std::int64_t> dim_v;    // `dim` where not given
  std::int64_t diag_block = 0;          // of the block-diagonal part; 0 for LLN alone
  std::string feature = "exp";
  // Scales of queries and keys: [], [heads] or [batch, heads] of the queries or the keys.
  at::Tensor alpha, beta;
  double fixed_alpha = 1, fixed_beta = 1;  // where no tensor is given
  at::Tensor mix;                          // share of LLN: [], [heads] or [heads, dim_v]
  double fixed_mix = 0.5;                  // where mix is not given
  at::Device device = at::kCPU;
};

class DecodeState {
 public:
  // Empty. Throws lln::Error naming every fault of the options.
  explicit DecodeState(const DecodeOptions& options);
  // Two states never share memory: a copy is a fork.
  DecodeState(const DecodeState&) = delete;
  DecodeState& operator=(const DecodeState&) = delete;
  DecodeState(DecodeState&&) = default;
  DecodeState& operator=(DecodeState&&) = default;

  // Adds tokens, k [batch, heads_k, tokens, dim] and v [.., dim_v]; with queries [batch, heads,
  // tokens, dim] also their rows [batch, heads, tokens, dim_v], row i seeing token i and all before
  // it. A `q` that is not defined asks for no rows, and the result is not defined. `mix`, in place
  // of the state's, is [heads], [heads, dim_v] or [batch, heads, tokens]. With `lengths`, int32 or
  // int64 [batch], sequence b adds its first so many tokens, and its rows after them are zero.
  at::Tensor append(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& mix = {}, const at::Tensor& lengths = {});
  // One token: append of [batch, heads, 1, dim] in one pass over the state.
  at::Tensor step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& mix = {});
  // Rows that see all tokens so far, each as if it stood at the place of the last one; nothing
  // changes. Zero for a sequence without a token.
  at::Tensor read(const at::Tensor& q, const at::Tensor& mix = {}) const;

  // Forgets everything, or one sequence, whose place another may then take.
  void reset();
  void reset(std::int64_t sequence);
  // Adds the tokens of a state that was filled from nothing with the same options and beta, and
  // that follow those of this one. With LLN+Diag this state must end at a block border in every
  // sequence where `later` has tokens.
  void merge(const DecodeState& later);
  // A copy that goes its own way: prefix sharing, and the way back to a saved point.
  DecodeState fork() const;
  // A state of these sequences, int64 [batch'], in this order, any of them more than once or not at
  // all: beam search, or a batch that shrinks or grows.
  DecodeState select(const at::Tensor& sequences) const;

  // Bytes that any machine, device and language of the library reads back. load() refuses bytes
  // that are cut, corrupt, of another version or configuration; alpha and beta are not among them.
  std::string save() const;
  void load(std::string_view bytes);

  at::Tensor tokens() const;   // that each sequence has seen: int64 [batch] in host memory
  std::int64_t bytes() const;  // of memory, for any number of tokens
  at::Device device() const;
  std::int64_t batch() const { return sizes_[0]; }

 private:
  struct Uninitialised {};
  DecodeState(Uninitialised, const DecodeState& like);
  // `mix`, or the state's.
  at::Tensor weight(const at::Tensor& mix) const;

  std::vector<std::int64_t> sizes_;  // batch, heads, heads_k, dim, dim_v
  std::string kind_;
  std::string feature_;
  double fixed_mix_;
  at::Tensor mix_, alpha_, beta_;
  at::Tensor memory_;
  at::Tensor counts_;  // of tokens, in host memory; none of a state on a device
};

}  // namespace lln_torch
