// Where alpha and beta come from: moments of q and k, and the rules that turn them into scales. LLN
// attention with these scales has about the concentration of softmax attention on the same q and
// k: the variance of ln P is matched, or the entropy of its rows (docs/matching.md). No gradient
// flows through alpha and beta.
//
// On a CUDA device match_moments and update_moments put their work into Exec::stream and return;
// with the attention that follows they can be captured in one graph.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lln/exec.h"
#include "lln/problem.h"
#include "lln/tensor.h"

namespace lln {

// Count, mean and sum of squared deviations of a set of numbers.
struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;                      // sum of (x - mean)^2
  double variance() const noexcept {  // unbiased; 0 for fewer than two numbers
    return count > 1 ? m2 / (count - 1) : 0;
  }
  bool operator==(const Moments&) const = default;
};

// Moments of the union of two disjoint sets: exact up to f64 rounding, the empty set is neutral.
Moments merge(const Moments& first, const Moments& second) noexcept;

struct MomentsInputs {
  ConstView x = {};           // [batch, heads, tokens, dim]
  IndexView lengths = {};     // [batch]: the first so many tokens count
  MaskView mask = {};         // [batch, tokens]: those with a nonzero byte count
  IndexView cu_seqlens = {};  // [S + 1]: packed sequences, batch 1
};

// Moments of every (sequence, head) over all channels of the tokens that count, in one pass:
// out[s * heads + h], S * heads entries. Tokens that do not count are not read. Sums are f64 and
// joined in an order that depends on the length of the sequence alone. Exec::workspace is not used.
// `out` is in host memory: with tensors on a device this call waits for it.
void head_moments(const MomentsInputs& in, std::span<Moments> out, const Exec& exec = {});

// How alpha and beta are set.
enum class Matching : std::uint8_t {
  none,      // alpha = beta = 1
  paper,     // one standard deviation over all of q, one over all of k, the authors' constants
  per_head,  // moments of each (sequence, key head), constants for this dim
  frozen,    // the alpha and beta that are given
  ema,       // running moments of each key head, from the steps before this one
  exact,     // as per_head, but Var(ln P) by simulated tables in place of the line
  entropy,   // as exact, but the mean entropy of rows is matched
};

const char* to_string(Matching mode) noexcept;
Matching parse_matching(std::string_view text);  // throws Error naming the modes

// The line Var(ln P) = a t + b, t = alpha^2 sigma_q^2 + beta^2 sigma_k^2, that LLN follows in its
// working range on Gaussian q and k; `lln fit` estimates it.
struct MatchingConstants {
  double a = 0;
  double b = 0;
  bool operator==(const MatchingConstants&) const = default;
};

// Those of the paper's authors, who use one pair for every dim.
inline constexpr MatchingConstants kAuthorsConstants{0.14855178144710912, -0.35487039130661086};

// From a table over dim: linear in ln(dim) between its entries, constant beyond them.
MatchingConstants matching_constants(std::int64_t dim) noexcept;

// Running mean and variance of each key head, averaged over steps with weights that decay; the
// batch and the query heads that share a key head are pooled. A plain value: copy it, store it
// with the model. Empty before the first step.
struct RunningMoments {
  struct Head {
    double weight = 0;  // total weight of the steps seen, tends to 1; 0: none
    double mean = 0;
    double variance = 0;
    bool operator==(const Head&) const = default;
  };
  double decay = 0.99;
  std::vector<Head> q = {}, k = {};  // one per key head
  bool operator==(const RunningMoments&) const = default;
};

// The same in memory of the device of q and k, for which the host never waits.
struct DeviceRunningMoments {
  double decay = 0.99;
  // f64 [1, 2, heads_k, 3], contiguous: weight, mean and variance of each key head, of q and then
  // of k. All zero before the first step.
  View heads = {};
};

// Below, S is the number of sequences: the batch, or when packed the number of packed sequences.
struct MatchingInputs {
  ConstView q = {};  // [batch, heads, tokens, dim]
  ConstView k = {};  // [batch, heads_k, tokens_k, dim]

  // Mode frozen, and only there: [S or 1, heads or 1, 1, 1] and [S or 1, heads_k or 1, 1, 1].
  ConstView alpha = {};
  ConstView beta = {};

  // Which tokens count, as in AttentionInputs. In self-attention (as many queries as keys, and not
  // `cross`) the keys' lengths and mask hold for q as well, unless a query mask is given.
  IndexView key_lengths = {};   // [batch]
  MaskView key_mask = {};       // [batch, tokens_k]
  MaskView query_mask = {};     // [batch, tokens]
  IndexView cu_seqlens_q = {};  // [S + 1]
  IndexView cu_seqlens_k = {};  // [S + 1]
  bool cross = false;           // q and k are different tokens even where there are as many
};

struct MatchingOptions {
  Matching mode = Matching::per_head;
  bool causal = false;             // of the attention: refuses modes that read the whole sequence
  Feature feature = Feature::exp;  // of the attention: the other maps allow none and frozen
  // Modes per_head and ema: instead of matching_constants(dim).
  std::optional<MatchingConstants> constants = {};
  // Mode ema: the one with tensors in host memory, the other with tensors on a device.
  const RunningMoments* running = nullptr;
  const DeviceRunningMoments* running_on_device = nullptr;
};

// f32 (f64 with f64 tensors), written for every sequence and head.
struct MatchingOutputs {
  View alpha = {};  // [S, heads, 1, 1]
  View beta = {};   // [S, heads_k, 1, 1]
};

// A pair (sequence, key head) that a limit was applied to; -1 stands for all of them.
struct ClampedHead {
  std::int64_t sequence = 0;
  std::int64_t head_k = 0;
  bool sigma_q = false;  // below 1e-4, counts as 1e-4
  bool sigma_k = false;
  // sigma_q^2 sigma_k^2 is not above b: alpha sigma_q counts as 1e-4. Modes exact and entropy: it
  // is not between 1/64 and 16, and counts as the nearest of them.
  bool target = false;
  // Modes exact and entropy: dim is not between 8 and 256, or the number of keys that count not
  // between 16 and 65536; the nearest counts.
  bool size = false;
};

struct MatchingReport {
  MatchingConstants constants = {};  // that were used; zero in modes without a line
  std::vector<ClampedHead> clamped =
      {};  // empty with tensors on a device, where it is not known yet
};

// alpha = st / sigma_q and beta = st / sigma_k with st = sqrt((sigma_q^2 sigma_k^2 - b) / (2 a)),
// or in modes exact and entropy with st from a table over dim, the number of keys that count and
// sigma_q^2 sigma_k^2. sigma_q is pooled over the query heads that share a key head. Where q or k
// has no token that counts, and in mode ema before the first step, alpha = beta = 1. Throws one
// Error naming every fault, and one where q or k holds an infinity or NaN in a token that counts;
// on a device alpha and beta are NaN instead, for the sequence and key head that holds it, or for
// all in mode paper. On the CPU Exec::workspace is not used; on a device it is, of
// matching_workspace_bytes().
MatchingReport match_moments(const MatchingInputs& in, const MatchingOutputs& out,
                             const MatchingOptions& options, const Exec& exec = {});

// Moments that were taken in parts, as of a sequence that lies in pieces: head_moments() of each
// part, joined by merge().
struct JoinedMoments {
  std::int64_t heads = 0;           // of q
  std::int64_t heads_k = 0;         // divides heads
  std::int64_t dim = 0;             // channels of a head
  std::span<const Moments> q = {};  // [S, heads]
  std::span<const Moments> k = {};  // [S, heads_k]
};

// The same from them, in modes none, paper, per_head, exact and entropy; outputs in host memory.
MatchingReport match_moments(const JoinedMoments& moments, const MatchingOutputs& out,
                             const MatchingOptions& options);

// Takes one step of training into the running moments; a batch without tokens changes nothing.
// Call it after match_moments(), so that a step uses the steps before it; at evaluation do not
// call it. alpha and beta of the inputs are not used.
void update_moments(RunningMoments& running, const MatchingInputs& in, const Exec& exec = {});
// On a device an infinity or NaN makes the running moments of its key head NaN.
void update_moments(const DeviceRunningMoments& running, const MatchingInputs& in,
                    const Exec& exec = {});

// The same with moments that were taken in parts.
void update_moments(RunningMoments& running, const JoinedMoments& moments);

// Scratch memory of match_moments in modes that take moments of the call, and of update_moments; 0
// on the CPU.
std::size_t matching_workspace_bytes(const MatchingInputs& in);

}  // namespace lln
