// Decoding against the causal forward, for lln demo.
// SPDX-License-Identifier: Apache-2.0
#include "demo_decode.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/percentile.h"
#include "io/bytes.h"
#include "lln/decode.h"

namespace lln::cli {
namespace {

constexpr std::int64_t kSteps = 128;   // timed before each position, the median counts
constexpr std::int64_t kPiece = 4096;  // tokens of one append
constexpr std::int64_t kFirstPosition = 512;
constexpr std::int64_t kPositionsApart = 4;  // times
constexpr int kSoftmaxCalls = 5;

// Tokens [first, first + count) of an f32 tensor.
View rows(const View& x, std::int64_t first, std::int64_t count) {
  View part = x;
  part.data = static_cast<float*>(x.data) + first * x.stride[2];
  part.shape[2] = count;
  return part;
}

ConstView rows(const ConstView& x, std::int64_t first, std::int64_t count) {
  ConstView part = x;
  part.data = static_cast<const float*>(x.data) + first * x.stride[2];
  part.shape[2] = count;
  return part;
}

template <class Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Decoding {
 public:
  Decoding(const AttentionInputs& in, const View& causal, std::int64_t diag_block, const Exec& exec)
      : in_(in),
        causal_(causal),
        exec_(exec),
        config_{.heads = in.q.shape[1],
                .heads_k = in.k.shape[1],
                .dim = in.q.shape[3],
                .dim_v = in.v.shape[3],
                .kind = Kind::lln_diag,
                .diag_block = diag_block},
        memory_(decode_state_bytes(config_)),
        state_(config_, {memory_.data(), memory_.size()}),
        piece_(static_cast<std::size_t>(config_.heads * kPiece * config_.dim_v)) {}

  std::size_t state_bytes() const { return memory_.size(); }
  double difference() const { return difference_ / largest_; }

  void append_until(std::int64_t end) {
    while (state_.tokens() < end) {
      const std::int64_t first = state_.tokens(), count = std::min(kPiece, end - first);
      const View o = output(count);
      state_.append(tokens(first, count), o, exec_);
      compare(o, first);
    }
  }

  // Seconds of one step.
  double step() {
    const std::int64_t at = state_.tokens();
    const AttentionInputs in = tokens(at, 1);
    const View o = output(1);
    const double seconds = seconds_of([&] { state_.step(in, o, exec_); });
    compare(o, at);
    return seconds;
  }

  // One row of softmax attention over the tokens so far.
  double softmax_step() {
    const std::int64_t seen = state_.tokens();
    const AttentionInputs in{
        .q = rows(in_.q, seen - 1, 1), .k = rows(in_.k, 0, seen), .v = rows(in_.v, 0, seen)};
    const AttentionOutputs out{.o = output(1)};
    return seconds_of([&] { attention_forward(in, out, {.kind = Kind::softmax}, exec_); });
  }

 private:
  AttentionInputs tokens(std::int64_t first, std::int64_t count) const {
    return {.q = rows(in_.q, first, count),
            .k = rows(in_.k, first, count),
            .v = rows(in_.v, first, count),
            .alpha = in_.alpha,
            .beta = in_.beta};
  }

  View output(std::int64_t count) {
    return view(piece_.data(), {1, config_.heads, count, config_.dim_v});
  }

  void compare(const View& found, std::int64_t first) {
    const View expected = rows(causal_, first, found.shape[2]);
    for (std::int64_t h = 0; h < found.shape[1]; ++h) {
      for (std::int64_t n = 0; n < found.shape[2]; ++n) {
        const auto at = [&](const View& x) {
          return static_cast<const float*>(x.data) + h * x.stride[1] + n * x.stride[2];
        };
        for (std::int64_t c = 0; c < found.shape[3]; ++c) {
          const double value = at(expected)[c];
          const double difference = std::abs(at(found)[c] - value);
          // A NaN would never be the larger one.
          if (!(difference <= difference_))
            difference_ = std::isnan(difference) ? HUGE_VAL : difference;
          largest_ = std::max(largest_, std::abs(value));
        }
      }
    }
  }

  AttentionInputs in_;
  View causal_;
  Exec exec_;
  DecodeConfig config_;
  io::Bytes memory_;
  DecodeState state_;
  std::vector<float> piece_;
  double difference_ = 0, largest_ = 0;
};

}  // namespace

DecodeFindings measure_decoding(const AttentionInputs& in, const View& out, std::int64_t diag_block,
                                const Exec& exec) {
  attention_forward(in, {.o = out},
                    {.kind = Kind::lln_diag, .diag_block = diag_block, .causal = true}, exec);
  Decoding decoding(in, out, diag_block, exec);
  DecodeFindings found;
  for (std::int64_t position = kFirstPosition; position <= in.q.shape[2];
       position *= kPositionsApart) {
    decoding.append_until(position - kSteps);
    std::vector<double> steps, softmax;
    for (std::int64_t i = 0; i < kSteps; ++i) steps.push_back(decoding.step());
    for (int i = 0; i < kSoftmaxCalls; ++i) softmax.push_back(decoding.softmax_step());
    const auto channels =
        static_cast<double>(in.k.shape[1] * (in.k.shape[3] + in.v.shape[3]) * sizeof(float));
    found.rows.push_back({.position = position,
                          .seconds = bench::percentile(steps, 50),
                          .softmax_seconds = bench::percentile(softmax, 50),
                          .cache_bytes = static_cast<double>(position) * channels});
  }
  found.state_bytes = static_cast<double>(decoding.state_bytes());
  found.difference = decoding.difference();
  return found;
}

std::string to_text(const DecodeFindings& found) {
  std::string text =
      "Decoding: a prompt appended to a state, then one token at a time. The state of LLN+Diag\n"
      "does not grow; the library's softmax attends to a cache of all keys and values.\n\n"
      "              time of one token           memory of the past\n"
      "   tokens    LLN+Diag    softmax       LLN+Diag    softmax\n";
  for (const DecodeRow& row : found.rows) {
    text += fmt::format("  {:>7} {:>11} {:>10} {:>14} {:>10}\n", row.position,
                        time_text(row.seconds), time_text(row.softmax_seconds),
                        size_text(found.state_bytes), size_text(row.cache_bytes));
  }
  return text +
         fmt::format(
             "\nLargest difference from the causal forward over all tokens, relative to the\n"
             "largest output: {:.1e}.\n",
             found.difference);
}

Json to_json(const DecodeFindings& found) {
  Json list = Json::array();
  for (const DecodeRow& row : found.rows) {
    list.push_back({{"tokens", row.position},
                    {"step_seconds", row.seconds},
                    {"softmax_seconds", row.softmax_seconds},
                    {"cache_bytes", row.cache_bytes}});
  }
  return {{"state_bytes", found.state_bytes},
          {"relative_difference", found.difference},
          {"rows", list}};
}

}  // namespace lln::cli
