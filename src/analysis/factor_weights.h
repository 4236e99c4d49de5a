// Linear attentions, P = L R^T: products with P and its spectrum cost O(tokens width^2) at most.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "analysis/exponents.h"

namespace lln::analysis {

// Knows how to use factors, not what they are.
class FactorWeights : public Weights {
 public:
  FactorWeights(std::int64_t tokens, std::int64_t width, bool causal)
      : Weights(tokens, causal), width_(width) {}
  bool has_factors() const final { return !causal(); }
  void apply(ConstVectors x, Vectors y, Parallel* parallel) const final;
  void apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const final;
  std::vector<double> factor_product(Parallel* parallel) const final;
  bool fill(Scratch& scratch, bool with_log) const final;

 protected:
  std::int64_t width() const { return width_; }

 private:
  template <class Body>
  std::vector<double> sum_parts(std::int64_t rows, std::int64_t columns, Parallel* parallel,
                                Body&& body) const;
  template <class Body>
  void each_block(ConstVectors x, Vectors y, Parallel* parallel, Body&& body) const;

  std::int64_t width_;
};

// Positive features: L = W = softmax over channels of a + c, R = K = softmax over tokens of u.
class FeatureWeights final : public FactorWeights {
 public:
  FeatureWeights(std::int64_t tokens, std::unique_ptr<Exponents> q, std::unique_ptr<Exponents> k,
                 Parallel* parallel);
  bool has_mass() const override { return true; }
  Scratch make_scratch() const override;
  void load_rows(Scratch& scratch) const override;
  void load_keys(Scratch& scratch) const override;

 private:
  void sum_keys(Parallel* parallel);

  std::unique_ptr<Exponents> q_, k_;
  std::vector<double> c_;  // [padded width]
};

// Causal positive features. Each row has a c of its own, so that there are no factors: every weight
// is sum_l e^(a_l + u_l - Z), with the row's log mass Z from the prefix of keys.
class CausalFeatureWeights final : public Weights {
 public:
  CausalFeatureWeights(std::int64_t tokens, std::unique_ptr<Exponents> q,
                       std::unique_ptr<Exponents> k);
  bool has_mass() const override { return true; }
  Scratch make_scratch() const override;
  void load_rows(Scratch& scratch) const override;
  void load_keys(Scratch& scratch) const override;
  bool fill(Scratch& scratch, bool with_log) const override;

 private:
  std::unique_ptr<Exponents> q_, k_;
  std::vector<double> mass_;  // [tokens]
};

// q . k / (tokens sqrt(dim)): signed.
class LinearWeights final : public FactorWeights {
 public:
  explicit LinearWeights(const AttentionMatrix& matrix);
  bool may_have_empty_rows() const override { return true; }
  bool is_signed() const override { return true; }
  Scratch make_scratch() const override;
  void load_rows(Scratch& scratch) const override;
  void load_keys(Scratch& scratch) const override;

 private:
  cpu::ConstRows q_, k_;
  double scale_;
};

}  // namespace lln::analysis
