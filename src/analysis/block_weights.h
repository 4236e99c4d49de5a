// Diag, softmax inside blocks; its mixture with LLN; and a matrix that is given.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "analysis/weights.h"

namespace lln::analysis {

// left holds the whole rows of P inside their blocks, [block, ld]: there is nothing else in them.
class DiagWeights final : public Weights {
 public:
  explicit DiagWeights(const AttentionMatrix& matrix);
  std::int64_t blocks() const override { return pieces(tokens(), block_); }
  Scratch make_scratch() const override;
  void apply(ConstVectors x, Vectors y, Parallel* parallel) const override;
  void apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const override;
  void load_rows(Scratch& scratch) const override;
  void load_keys(Scratch&) const override {}
  bool fill(Scratch& scratch, bool with_log) const override;

 private:
  Range block_of(std::int64_t row) const;
  void load_run(Range rows, std::int64_t at, Scratch& scratch) const;

  cpu::ConstRows q_, k_;
  std::int64_t block_;
};

// mix * first + (1 - mix) * second.
class MixedWeights final : public Weights {
 public:
  MixedWeights(std::unique_ptr<Weights> first, std::unique_ptr<Weights> second, double mix);
  Scratch make_scratch() const override;
  void prepare(Parallel* parallel) override;
  void apply(ConstVectors x, Vectors y, Parallel* parallel) const override;
  void apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const override;
  void load_rows(Scratch& scratch) const override;
  void load_keys(Scratch& scratch) const override;
  bool fill(Scratch& scratch, bool with_log) const override;

 private:
  void mix_in(const std::vector<double>& other, Vectors y) const;

  std::unique_ptr<Weights> first_, second_;
  double mix_;
};

class GivenWeights final : public Weights {
 public:
  explicit GivenWeights(const AttentionMatrix& matrix);
  Scratch make_scratch() const override;
  void load_rows(Scratch&) const override {}
  void load_keys(Scratch&) const override {}
  bool fill(Scratch& scratch, bool with_log) const override;

 private:
  ConstView p_;
};

}  // namespace lln::analysis
