// How concentrated one attention head is, from some of its rows against all of its keys: the
// variance of ln P and the mean entropy of rows. What lln fit tabulates and verifies.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <cstdint>

namespace lln::cli {

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // [token, dim]

struct Concentration {
  double log_variance = 0;  // of ln P over all entries
  double entropy = 0;       // mean over rows, in nats
};

// P = W Kn^T of docs/theory.md, whose factors are probabilities. Unbiased for a head of which these
// rows are a sample.
Concentration lln_concentration(const Rows& q, const Rows& k, double alpha, double beta);

// softmax(q k^T / sqrt(D)) for q and k that are scaled by any numbers: the product of queries and
// keys is made once.
class SoftmaxScores {
 public:
  SoftmaxScores(const Rows& q, const Rows& k);
  double entropy(double scale) const;  // mean over rows, in nats; scale of q times scale of k

 private:
  Rows scores_;  // [row, key]
};

// Standard normal numbers that depend on nothing but the arguments.
Rows normal_rows(std::uint64_t stream, std::int64_t tokens, std::int64_t dim);

}  // namespace lln::cli
