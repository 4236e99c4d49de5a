// How concentrated one attention head is, from some of its rows against all of its keys: the
// variance of ln P and the mean entropy of rows. What lln fit tabulates and verifies.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <cstdint>

namespace lln::cli {

using Tokens = Eigen::MatrixXf;  // [token, channel], the tokens of a channel one after another

struct Concentration {
  double log_variance = 0;  // of ln P over all entries
  double entropy = 0;       // mean over rows, in nats
};

// Of P = W Kn^T as in docs/theory.md, whose factors are probabilities; unbiased for a head of which
// the queries are a sample.
Concentration lln_concentration(const Tokens& q, const Tokens& k, double alpha, double beta);

// softmax(q k^T / sqrt(D)) for q and k that are scaled by any numbers: the product of queries and
// keys is made once.
class SoftmaxScores {
 public:
  SoftmaxScores(const Tokens& q, const Tokens& k);
  double entropy(double scale) const;  // mean over rows, in nats; scale of q times scale of k

 private:
  Eigen::MatrixXf scores_;  // [key, query]
};

// Standard normal numbers that depend on the arguments alone.
Tokens normal_tokens(std::uint64_t stream, std::int64_t tokens, std::int64_t dim);

}  // namespace lln::cli
