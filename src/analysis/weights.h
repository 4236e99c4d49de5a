// An attention matrix as something that can be read by tiles and multiplied with, whatever makes
// its weights. Instruments see this and nothing of q and k; N x N numbers are never in memory.
//
// A tile holds some keys of a block of rows, p[key, row]: rows lie side by side, so that every sum
// over keys runs down the columns of vectors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cpu/tiles_f64.h"
#include "lln/instruments.h"

namespace lln::analysis {

// Rows share the work of loading a tile of keys, and a tile with its operands stays in the
// second-level cache: 128 x 64 numbers are 64 KiB.
inline constexpr std::int64_t kRowBlock = 64;
inline constexpr std::int64_t kKeyTile = 128;
// Sums over all tokens are cut into at most so many parts, by the number of tokens alone, and
// joined in order.
inline constexpr std::int64_t kParts = 64;

struct Range {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Range number `part` of tokens cut into pieces of `step`.
inline Range piece(std::int64_t tokens, std::int64_t step, std::int64_t part) {
  const std::int64_t first = part * step;
  return {first, std::min(step, tokens - first)};
}
inline std::int64_t pieces(std::int64_t tokens, std::int64_t step) {
  return (tokens + step - 1) / step;
}

// What one worker computes a tile with. All of it is allocated before work is split, because tasks
// must not throw.
struct Scratch {
  std::vector<std::int64_t> rows;  // the block of rows: their numbers, rising
  std::int64_t ld = 0;             // rows.size() rounded up
  std::vector<double> left;        // [width, ld]
  std::vector<double> mass;        // [ld]: ln of what the row was divided by
  Range keys;                      // the tile of keys
  std::vector<double> right;       // [keys.count, padded width]
  std::vector<double> p, log_p;    // [keys.count, ld]
  std::vector<double> spare;
  std::unique_ptr<Scratch> second;  // of the second part of a mixture
};

// `count` vectors of `tokens` numbers, one after another.
struct Vectors {
  double* data;
  std::int64_t count;
};
struct ConstVectors {
  const double* data;
  std::int64_t count;
};

class Weights {
 public:
  Weights(std::int64_t tokens, bool causal) : tokens_(tokens), causal_(causal) {}
  virtual ~Weights() = default;
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  std::int64_t tokens() const { return tokens_; }
  bool causal() const { return causal_; }
  std::int64_t visible(std::int64_t row) const { return causal_ ? row + 1 : tokens_; }

  // Weights may be negative and rows need not sum to one.
  virtual bool is_signed() const { return false; }
  // P = L R^T with L, R [tokens, width]: its nonzero eigenvalues are those of R^T L.
  virtual bool has_factors() const { return false; }
  // mass is ln of the sum of the row's weights before they were normalised.
  virtual bool has_mass() const { return false; }
  // A query may have no weight for any key.
  virtual bool may_have_empty_rows() const { return false; }
  // Blocks that never exchange anything.
  virtual std::int64_t blocks() const { return 1; }

  virtual Scratch make_scratch() const;

  // Whatever is needed of all rows, so that load_rows() of each is cheap: before apply().
  virtual void prepare(Parallel*) {}

  // Sets scratch.rows from the list (at most kRowBlock, rising), left and mass.
  void take_rows(std::span<const std::int64_t> rows, Scratch& scratch) const;
  void take_rows(Range rows, Scratch& scratch) const;
  // Sets scratch.keys (at most kKeyTile) and right.
  void take_keys(Range keys, Scratch& scratch) const;
  // p, and ln p where asked, of the taken rows and keys. Keys that a row does not see are 0.
  void make_tile(Scratch& scratch, bool with_log) const;

  // y = P x and y = P^T x; prepare() first. By tiles where a kind knows no better way.
  virtual void apply(ConstVectors x, Vectors y, Parallel* parallel) const;
  virtual void apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const;
  // R^T L [width, width], row after row; of matrices with factors.
  virtual std::vector<double> factor_product(Parallel* parallel) const;

  // The first row without weights; prepare() first. A row is done with once a weight is found.
  std::optional<std::int64_t> first_empty_row(Parallel* parallel) const;

  // What a kind has to say: left and mass of scratch.rows, right of scratch.keys, and the tile of
  // both without the mask. fill() returns true where it set log_p as well.
  virtual void load_rows(Scratch& scratch) const = 0;
  virtual void load_keys(Scratch& scratch) const = 0;
  virtual bool fill(Scratch& scratch, bool with_log) const = 0;

 protected:
  // A scratch for left of `width` and `spare` more numbers.
  Scratch scratch_of(std::int64_t width, std::int64_t spare) const;

 private:
  std::int64_t tokens_;
  bool causal_;
};

// One scratch per worker.
std::vector<Scratch> make_scratches(const Weights& weights, const Parallel* parallel);

// Arguments are assumed to be right (src/api).
std::unique_ptr<Weights> make_weights(const AttentionMatrix& matrix, Parallel* parallel);

// Rows of P as they are, to p [rows.count, tokens].
void copy_rows(const Weights& weights, Range rows, double* p);

// Pieces of x as the right operand of a product: packed[i, v] = x[v, first + i], padded.
void pack(ConstVectors x, std::int64_t tokens, Range range, double* packed);
void unpack(const double* packed, std::int64_t tokens, Range range, Vectors y);

}  // namespace lln::analysis
