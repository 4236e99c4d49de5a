// Weights that are a function of q . k and have no small factors: softmax and the exact quadratic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "analysis/weights.h"

namespace lln::analysis {

class ScoreWeights : public Weights {
 public:
  ScoreWeights(const AttentionMatrix& matrix, double scale);
  bool has_mass() const final { return true; }
  Scratch make_scratch() const final;
  // Masses of all rows: the price of one apply().
  void prepare(Parallel* parallel) final;
  void load_rows(Scratch& scratch) const final;
  void load_keys(Scratch& scratch) const final;

 protected:
  std::int64_t dim() const { return q_.width; }
  const cpu::ConstRows& q() const { return q_; }
  const cpu::ConstRows& k() const { return k_; }
  double mass_of(std::int64_t row) const { return mass_[size(row)]; }  // after prepare()
  void fill_scores(Scratch& scratch) const;                            // scale q . k in p
  // Makes mass of the taken rows; scratch.mass and sums are -inf and 0 at first.
  virtual void add_mass(Scratch& scratch, double* sums) const = 0;

 private:
  void find_mass(Scratch& scratch) const;

  cpu::ConstRows q_, k_;
  double scale_;
  std::vector<double> mass_;  // [tokens] after prepare()
};

class SoftmaxWeights final : public ScoreWeights {
 public:
  explicit SoftmaxWeights(const AttentionMatrix& matrix);
  bool fill(Scratch& scratch, bool with_log) const override;

 protected:
  void add_mass(Scratch& scratch, double* sums) const override;
};

// (q . k)^2 = q^T (k k^T) q: a product with P is a quadratic form of a dim x dim matrix.
class QuadraticWeights final : public ScoreWeights {
 public:
  explicit QuadraticWeights(const AttentionMatrix& matrix);
  bool may_have_empty_rows() const override { return true; }
  void apply(ConstVectors x, Vectors y, Parallel* parallel) const override;
  void apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const override;
  bool fill(Scratch& scratch, bool with_log) const override;

 protected:
  void add_mass(Scratch& scratch, double* sums) const override;

 private:
  double weight(std::int64_t row) const;  // what a row's squares are multiplied by
};

}  // namespace lln::analysis
