// How an attention concentrates: entropy, spectral gap, log-normality and the rest, measured on
// real q and k and set beside what the theory of log-normal attention predicts
// (docs/instruments.md).
//
// An attention matrix P [tokens, tokens] is described, never stored: rows are made in blocks as
// they are needed, and P = W K^T of a linear attention is used through its factors
// (docs/theory.md). All sums are f64, and results are the same bits for every number of threads.
// Tensors are in host memory. Every call throws one Error that names all faults of its arguments.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <complex>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lln/exec.h"
#include "lln/moments.h"
#include "lln/problem.h"
#include "lln/tensor.h"

namespace lln {

// What makes the weights of one head.
enum class MatrixKind : std::uint8_t {
  softmax,    // softmax of q . k / sqrt(dim)
  lln,        // <phi(alpha q), phi(beta k)>, rows normalised; phi = feature
  diag,       // softmax inside blocks of diag_block tokens
  lln_diag,   // mix * lln + (1 - mix) * diag
  quadratic,  // (q . k)^2, rows normalised
  performer,  // FAVOR+: positive random features of softmax
  linear,     // q . k / (tokens sqrt(dim)), signed, rows not normalised
  given,      // the matrix p itself
};

// One head of one sequence. Views are [1, 1, tokens, dim]; see head_view().
struct AttentionMatrix {
  MatrixKind kind = MatrixKind::lln;
  ConstView q = {};  // of all kinds but `given`; finite
  ConstView k = {};  // as many tokens as q, same dim and dtype
  ConstView p = {};  // kind given: [1, 1, tokens, tokens], not negative, rows sum to one
  // Row i sees keys j <= i. Of a given matrix: its entries above the diagonal are zero.
  bool causal = false;
  // Kinds lln and lln_diag. The maps other than exp are used with alpha = beta = 1.
  double alpha = 1, beta = 1;
  Feature feature = Feature::exp;
  double power = 2;  // of Feature::power
  // Kinds diag and lln_diag.
  std::int64_t diag_block = 64;
  double mix = 0.5;
  // Kind performer.
  std::int64_t features = 256;
  std::uint64_t seed = 0;
};

// The head (sequence, head) of a tensor [batch, heads, tokens, dim], as the matrix wants it.
ConstView head_view(const ConstView& x, std::int64_t sequence, std::int64_t head) noexcept;

// The kind as text: softmax, lln, lln+diag64, diag64, elu, relu, softplus, power2 (or any other
// power), elu+diag64 and so on, quadratic, performer or performer256, linear. Sets the fields that
// the text speaks of. Throws Error naming what is known.
void parse_matrix(std::string_view text, AttentionMatrix& matrix);
std::string to_string(const AttentionMatrix& matrix);  // the text; "given" for a given matrix

// What is being done, and how much of it. Called on the thread of the caller, between two pieces of
// work; an exception that it throws passes through the call, which is how to cancel one.
struct InstrumentProgress {
  std::string_view stage;  // "rows", "spectrum", "stationary", "mixing", "norm"
  std::int64_t done = 0;   // blocks of rows, or applications of P
  std::int64_t total = 0;  // at most; iterations may need fewer
};

struct InstrumentOptions {
  // Rows that are looked at: drawn without replacement by `seed`, evenly spread; 0: all of them.
  // A row costs O(tokens * dim).
  std::int64_t rows = 0;
  std::uint64_t seed = 0;
  std::vector<std::int64_t> top_k = {1, 4, 16, 64};  // sizes for the mass of the largest weights
  std::int64_t bins = 64;                            // of the histogram of ln P
  std::int64_t qq_points = 99;  // of the Q-Q plot, at probabilities i / (qq_points + 1)
  std::int64_t positions = 64;  // of entropy against position, at most
  // Spectrum.
  std::int64_t eigenvalues = 8;         // leading ones, the first is 1
  double tolerance = 0.02;              // Arnoldi: residual over |lambda_2| at which it stops
  std::int64_t max_applications = 400;  // of P; the first 50 are always made
  // The chain, which costs more products with P than all else: examine() measures it where asked
  // to.
  bool chain = true;
  // Steps of P until rows agree within this total variation distance.
  double mixing_distance = 0.25;
  std::int64_t max_steps = 200;
  std::int64_t starts = 32;  // rows from which mixing is measured
  // The line that predicts Var(ln P) of LLN; not given: matching_constants(dim).
  std::optional<MatchingConstants> constants = {};
  std::function<void(const InstrumentProgress&)> progress = {};
};

// ---- Products with P. x and y hold `count` vectors of `tokens` numbers one after another. -------
// O(tokens dim) for linear attentions and Diag, O(tokens dim^2) for quadratic, O(tokens^2 dim) for
// softmax; O(tokens) memory.
void matrix_rows(const AttentionMatrix& matrix, std::int64_t first, std::int64_t count,
                 std::span<double> p, const Exec& exec = {});  // p [count, tokens]
void matrix_apply(const AttentionMatrix& matrix, std::span<const double> x, std::span<double> y,
                  const Exec& exec = {});  // y = P x
void matrix_apply_transposed(const AttentionMatrix& matrix, std::span<const double> x,
                             std::span<double> y, const Exec& exec = {});  // y = P^T x

// ---- The inputs -------------------------------------------------------------------------------

// How far numbers are from the Gaussian that the theory assumes.
struct Distribution {
  double mean = 0;
  double sigma = 0;
  double skewness = 0;
  double excess_kurtosis = 0;  // 0 for a Gaussian
  double ks = 0;               // Kolmogorov-Smirnov distance to the normal of this mean and sigma
};

struct InputStatistics {
  Distribution q, k;
  double covariance = 0;  // Cov(q, k) over entries with the same token and channel
  double c_cross = 0;     // Cov(q^2, k^2) - Cov(q, k)^2
  // sigma_q^2 sigma_k^2 + c_cross: the variance of softmax's ln P in theory.
  double target() const noexcept { return q.sigma * q.sigma * k.sigma * k.sigma + c_cross; }
};

InputStatistics input_statistics(const ConstView& q, const ConstView& k, const Exec& exec = {});

// ---- Rows: one pass over P --------------------------------------------------------------------

// Of the rows that were looked at, in nats: divide by ln 2 for bits.
struct EntropyStatistics {
  std::int64_t rows = 0;
  double mean = 0;
  double standard_error = 0;  // of the mean, as an estimate for all rows; 0 when all were seen
  double min = 0, max = 0;
  double p05 = 0, p25 = 0, p50 = 0, p75 = 0, p95 = 0;  // quantiles
};

// Mean entropy of the rows in [first, last], and the most that it could be: ln of the visible keys.
struct PositionEntropy {
  std::int64_t first = 0, last = 0;
  double mean = 0;
  double limit = 0;
};

struct QuantilePair {
  double normal = 0;    // quantile of the standard normal
  double measured = 0;  // quantile of (ln P - mean) / sigma
};

struct Histogram {
  double lower = 0, upper = 0;  // ends of the bins, all equally wide
  std::vector<double> share;    // of the entries, sums to 1 less what lies outside
};

// ln of the positive weights. Zeros (outside the blocks of Diag, underflow, zeros of a given
// matrix) are counted and left out.
struct LogNormality {
  double entries = 0;
  double zeros = 0;  // share of all entries
  double mean = 0, variance = 0;
  double skewness = 0, excess_kurtosis = 0;
  double ks = 0;  // distance to the normal of this mean and variance
  // Var(ln A) of the weights before their rows are normalised; 0 for kinds without such: diag,
  // lln_diag, linear, given.
  double unnormalised_variance = 0;
  Histogram histogram;
  std::vector<QuantilePair> qq;
};

struct TopMass {
  std::int64_t k = 0;
  double mass = 0;  // of the k largest weights of a row, mean over rows
};

struct RowStatistics {
  // Rows without any weight, as `quadratic` and `linear` have where a query is zero (padding) or
  // orthogonal to all its keys. They are counted here and left out of everything else.
  std::int64_t empty_rows = 0;
  EntropyStatistics entropy;
  std::vector<PositionEntropy> by_position;  // causal matrices only
  std::optional<LogNormality> log;           // not of causal matrices: ln P drifts with position
  double variance = 0;                       // of the entries of P
  double squares = 0;                        // sum of P_ij^2 over a row, mean over rows
  std::vector<TopMass> top;
  double column_entropy = 0;  // of the column means: ln tokens when every key is read alike
};

// Rows of a signed matrix count by their absolute values, scaled to sum to one.
RowStatistics row_statistics(const AttentionMatrix& matrix, const InstrumentOptions& options = {},
                             const Exec& exec = {});

// ---- Spectrum and chain -----------------------------------------------------------------------

enum class SpectrumMethod : std::uint8_t {
  features,  // exact: the D x D matrix K^T W has the nonzero eigenvalues of P
  blocks,    // exact: every block of Diag has an eigenvalue 1
  dense,     // exact: few tokens, all eigenvalues of P
  arnoldi,   // iterated: implicitly restarted Arnoldi on P with the eigenvector of ones taken out
};
const char* to_string(SpectrumMethod method) noexcept;

struct Spectrum {
  std::vector<std::complex<double>> eigenvalues;  // by falling modulus
  double lambda_2 = 0;  // |lambda_2|; of signed matrices |lambda_2| / |lambda_1|
  double gap = 0;       // 1 - lambda_2
  bool is_signed = false;
  SpectrumMethod method = SpectrumMethod::features;
  bool converged = true;
  std::int64_t applications = 0;  // of P; 0 for exact methods
  std::int64_t restarts = 0;
  double residual = 0;  // estimate of |P x - lambda_2 x| / |x|, an error bar for lambda_2
};

// O(tokens dim^2) for linear attentions, and no more memory than D x D: a million tokens in under a
// second. Refuses causal matrices: P is triangular, so its eigenvalues are its diagonal and say
// nothing of how rows mix; row_statistics() gives entropy against position instead. Refuses
// matrices with a row that has no weights: P is then no transition matrix, and 1 no eigenvalue.
Spectrum spectrum(const AttentionMatrix& matrix, const InstrumentOptions& options = {},
                  const Exec& exec = {});

// P as the transition matrix of a Markov chain. Bidirectional, not signed, no row without weights.
struct ChainStatistics {
  // Where the chain ends up when it starts anywhere: pi = pi P. Where several are (a chain of
  // separate blocks) the one that the uniform start leads to.
  std::vector<double> stationary;
  double stationary_entropy = 0;   // nats
  double stationary_residual = 0;  // total variation distance between pi and pi P
  bool stationary_converged = true;
  // Steps t until the rows of P^t are within `mixing_distance` of pi. From the gap: the least t
  // with |lambda_2|^t <= mixing_distance. Infinite where |lambda_2| = 1.
  double mixing_time_from_gap = 0;
  // Measured from `starts` rows: a lower bound where these are not all. Nothing: not in max_steps.
  std::optional<std::int64_t> mixing_time;
  std::vector<double> distance;  // the largest total variation distance to pi after steps 1, 2, ...
  // |P|_2, the largest singular value: to 1e-6 of it, unless max_steps came first.
  double spectral_norm = 0;
};

ChainStatistics chain_statistics(const AttentionMatrix& matrix, const Spectrum& spectrum,
                                 const InstrumentOptions& options = {}, const Exec& exec = {});

// ---- Theory beside measurement ------------------------------------------------------------------

struct Prediction {
  double predicted = 0;
  double measured = 0;
  double error() const noexcept { return predicted - measured; }
  double relative_error() const noexcept { return error() / measured; }
};

// What log-normal theory says of softmax and LLN from sigma_q, sigma_k, c_cross, tokens and dim
// alone; nothing where it says nothing. s is the predicted Var(ln P): sigma_q^2 sigma_k^2 + c_cross
// for softmax, a t + b for LLN with t = alpha^2 sigma_q^2 + beta^2 sigma_k^2. Where s is negative
// (q and k with means, one falling as the other rises; LLN with t below the range of the line) what
// follows from s is left out.
struct Theory {
  double t = 0;                            // LLN only
  std::optional<Prediction> log_mean;      // -ln N - s/2
  std::optional<Prediction> log_variance;  // s
  std::optional<Prediction> entropy;       // ln N - s/2
  std::optional<Prediction> variance;      // (e^s - 1) / N^2
  // Circular law: sqrt((e^s - 1) / N) for softmax, sqrt((e^tq - 1) (e^tk - 1) / (N D)) for LLN.
  std::optional<Prediction> lambda_2;
  // Fenton-Wilkinson, LLN only: Var(ln A) = ln(1 + (e^t - 1) / D), before rows are normalised.
  std::optional<Prediction> fenton_wilkinson;
};

// Of what was measured; parts that were not measured stay empty.
Theory theory(const AttentionMatrix& matrix, const InputStatistics& inputs,
              const RowStatistics* rows, const Spectrum* spectrum,
              const InstrumentOptions& options = {});

// ---- Verdict ------------------------------------------------------------------------------------

enum class Verdict : std::uint8_t {
  diffuse,   // rows are spread over most keys
  biased,    // concentrated, and all rows on the same keys
  unbiased,  // concentrated, each row on its own keys
};
const char* to_string(Verdict verdict) noexcept;

// The rule. With the deficit d = ln(tokens) - entropy: diffuse where d < ln 2, that is, where a row
// reads more than half of the keys. Otherwise |lambda_2| is compared with what rows that
// concentrate as much, each on its own keys, would have: r = min(1, sqrt((e^2d - 1) / tokens)), the
// circular law. unbiased where |lambda_2| >= r / 4, otherwise biased: the gap is large for so
// little entropy.
Verdict concentration_verdict(double entropy, double lambda_2, std::int64_t tokens) noexcept;

// ---- All of it ----------------------------------------------------------------------------------

struct Examination {
  std::int64_t tokens = 0, dim = 0;
  std::optional<InputStatistics> inputs;  // not of a given matrix
  RowStatistics rows;
  // Not of causal matrices nor of such with rows that have no weights; `why_no_spectrum` says why.
  std::optional<Spectrum> spectrum;
  std::optional<ChainStatistics> chain;  // not of signed ones either, nor without options.chain
  std::string why_no_spectrum;
  // softmax: 1 / sqrt(sigma_q^2 sigma_k^2 + c_cross), none where that sum is negative. Others:
  // 1 / sqrt(Var(ln P)) as measured over positive weights; none where rows are causal, where half
  // of the weights or more are 0 (outside the blocks of Diag there are none to count), and where
  // there are zeros and all other weights are equal. Infinite where all weights are equal.
  std::optional<double> temperature;
  // |P|_F^2 / |P|_2^2, the stable rank: 1 when all rows are equal, tokens for a permutation. Where
  // there is a chain.
  std::optional<double> effective_rank;
  Theory theory;
  // Kind performer: the share of its features that are smaller than the 1e-4 added to each, of q or
  // of k, whichever is larger. Above a half P shows the constant rather than the inputs.
  std::optional<double> floored_features;
  // Where there is a spectrum; none of a performer with more than half of its features floored.
  std::optional<Verdict> verdict;
};

// Everything about one head, in one pass over the rows besides the products that spectrum and chain
// need.
Examination examine(const AttentionMatrix& matrix, const InstrumentOptions& options = {},
                    const Exec& exec = {});

}  // namespace lln
