// Gradients of alpha, beta and the weights of the two parts: sums over rows that tasks collect in
// slots of their own, added up in a fixed order, so that they do not depend on the threads either.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cpu/plan.h"
#include "cpu/rows.h"

namespace lln::cpu {

// What a caller asked for.
struct ParameterRequest {
  explicit ParameterRequest(const Call& call)
      : alpha(call.grads.dalpha.given()),
        beta(call.grads.dbeta.given()),
        lln(call.grads.dmix.given() || call.grads.dlln_weight.given()),
        diag(call.grads.dmix.given() || call.grads.ddiag_weight.given()) {}
  bool alpha, beta;
  bool lln, diag;  // the weight of that part
};

// Sums of one query head over one segment of rows.
struct RowSums {
  RowSums(Arena& arena, const Dims& dims)
      : scalars(arena.take<double>(3)),
        lln_channel(arena.take<double>(dims.dvp)),
        diag_channel(arena.take<double>(dims.dvp)) {}
  double& alpha() const { return scalars[0]; }
  double& lln() const { return scalars[1]; }   // sum of g . LLN
  double& diag() const { return scalars[2]; }  // sum of g . Diag
  void reset(const Dims& dims) const {
    std::fill(scalars, scalars + 3, 0.0);
    std::fill(lln_channel, lln_channel + dims.dvp, 0.0);
    std::fill(diag_channel, diag_channel + dims.dvp, 0.0);
  }
  double* scalars;
  double* lln_channel;  // [dvp] sums of g * LLN
  double* diag_channel;
};

// Totals over the segments, and how they become the caller's gradients.
class ParameterTotals {
 public:
  ParameterTotals(Arena& arena, const Problem& p, const Dims& dims)
      : dims_(dims),
        heads_(p.heads),
        heads_k_(p.heads_k),
        sequences_(p.sequences),
        alpha_(arena.take<double>(p.sequences * p.heads)),
        beta_(arena.take<double>(p.sequences * p.heads_k)),
        lln_(arena.take<double>(p.heads * (1 + dims.dvp))),
        diag_(arena.take<double>(p.heads * (1 + dims.dvp))) {}

  void reset() {
    std::fill(alpha_, alpha_ + sequences_ * heads_, 0.0);
    std::fill(beta_, beta_ + sequences_ * heads_k_, 0.0);
    std::fill(lln_, lln_ + heads_ * (1 + dims_.dvp), 0.0);
    std::fill(diag_, diag_ + heads_ * (1 + dims_.dvp), 0.0);
  }
  void add_rows(std::int64_t sequence, std::int64_t head, const RowSums& sums) {
    alpha_[sequence * heads_ + head] += sums.alpha();
    add(lln_ + head * (1 + dims_.dvp), sums.lln(), sums.lln_channel);
    add(diag_ + head * (1 + dims_.dvp), sums.diag(), sums.diag_channel);
  }
  void add_beta(std::int64_t sequence, std::int64_t head_k, double sum) {
    beta_[sequence * heads_k_ + head_k] += sum;
  }

  // Writes everything that was asked for, except weights per token, which the rows write.
  void write(const Call& call) const {
    write_heads(call.grads.dalpha, alpha_, heads_);
    write_heads(call.grads.dbeta, beta_, heads_k_);
    write_weight(call.grads.dmix, call, +1, -1);
    write_weight(call.grads.dlln_weight, call, +1, 0);
    write_weight(call.grads.ddiag_weight, call, 0, +1);
  }

 private:
  void add(double* total, double scalar, const double* channel) const {
    total[0] += scalar;
    for (std::int64_t c = 0; c < dims_.dv; ++c) total[1 + c] += channel[c];
  }

  // Sums over the dimensions in which the parameter broadcasts.
  void write_heads(const View& out, const double* sums, std::int64_t heads) const {
    if (!out.given()) return;
    for (std::int64_t s = 0; s < out.shape[0]; ++s) {
      for (std::int64_t h = 0; h < out.shape[1]; ++h) {
        double total = 0;
        for (std::int64_t i = out.shape[0] == 1 ? 0 : s;
             i < (out.shape[0] == 1 ? sequences_ : s + 1); ++i) {
          for (std::int64_t j = out.shape[1] == 1 ? 0 : h; j < (out.shape[1] == 1 ? heads : h + 1);
               ++j) {
            total += sums[i * heads + j];
          }
        }
        static_cast<float*>(out.data)[s * out.stride[0] + h * out.stride[1]] =
            static_cast<float>(total);
      }
    }
  }

  void write_weight(const View& out, const Call& call, double lln_sign, double diag_sign) const {
    if (!out.given()) return;
    const bool per_channel = out.shape[3] > 1;
    const bool per_token = !per_channel && PartWeight::is_per_token(call, out.shape);
    if (per_token) return;
    for (std::int64_t h = 0; h < out.shape[1]; ++h) {
      for (std::int64_t c = 0; c < out.shape[3]; ++c) {
        double total = 0;
        for (std::int64_t j = out.shape[1] == 1 ? 0 : h; j < (out.shape[1] == 1 ? heads_ : h + 1);
             ++j) {
          const std::int64_t i = j * (1 + dims_.dvp) + (per_channel ? 1 + c : 0);
          total += lln_sign * lln_[i] + diag_sign * diag_[i];
        }
        static_cast<float*>(out.data)[h * out.stride[1] + c * out.stride[3]] =
            static_cast<float>(total);
      }
    }
  }

  const Dims dims_;
  std::int64_t heads_, heads_k_, sequences_;
  double* alpha_;  // [sequences, heads]
  double* beta_;   // [sequences, heads_k]
  double* lln_;    // [heads, 1 + dvp]: per head, then per channel
  double* diag_;
};

}  // namespace lln::cpu
