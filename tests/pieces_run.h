// A sequence cut into pieces, each with its own calls, as sequence parallelism has them between
// machines: keys of pieces become states, states merge, rows read them, and gradients take the same
// way back. Held against the sequence uncut.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention_run.h"
#include "key_states.h"

namespace lln::test {

template <class AnyView>
AnyView rows(AnyView view, std::int64_t begin, std::int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<AnyView, View>, std::byte, const std::byte>;
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  view.data = static_cast<Byte*>(view.data) + begin * view.stride[2] * size;
  view.shape[2] = count;
  return view;
}

// A case and where it is cut: piece r holds the tokens cuts[r] to cuts[r + 1]. Of packed sequences
// these are parts of one or several, and none of the others.
struct CutCase {
  Case c;
  std::vector<std::int64_t> cuts;
  std::vector<std::uint8_t> mask = {};  // [batch, tokens]: instead of the pattern of the case
};

// One case, run in pieces.
class Cut {
 public:
  enum Part { rows_alone, keys_alone, whole };

  explicit Cut(CutCase cut, Exec exec = {})
      : c_(std::move(cut.c)), cuts_(std::move(cut.cuts)), exec_(exec) {
    c_.parameter_gradients = true;
    small_ = c_.problem.dtype == DType::f64 ? DType::f64 : DType::f32;
    in_ = conformance::make_inputs(c_, c_.problem.dtype);
    if (!cut.mask.empty()) apply(cut.mask);
    uncut_ = run(as(Op::forward), in_, exec_);
    const TensorSet gradients = run(as(Op::backward), in_, exec_);
    for (const auto& entry : gradients.entries()) uncut_.add(entry.name, entry.tensor);
    for (const auto& entry : uncut_.entries()) {
      // Gradients are sums over calls and start at zero, rows of o are NaN until they are written.
      const Shape& shape = entry.tensor.shape();
      const DType dtype = entry.tensor.dtype();
      found_.add(entry.name, entry.name == "o" ? Tensor(dtype, shape) : zeros(dtype, shape));
    }
  }

  std::size_t pieces() const { return cuts_.size() - 1; }
  const Problem& problem() const { return c_.problem; }
  State empty() const { return {c_.problem, small_}; }
  State merge(const std::vector<const State*>& parts) const {
    return merged(c_.problem, small_, parts);
  }

  // Rows into o, and the state of all keys.
  State forward(std::size_t r, Part part, const State* given) {
    State saved = empty();
    AttentionOutputs out{piece(found_.at("o"), r, part != keys_alone)};
    if (c_.problem.has_lln()) out.saved = saved.write();
    attention_forward(inputs(r, part, given), out, options(part), exec_);
    return saved;
  }

  // Adds the gradients of a piece; returns that of the given state.
  State backward(std::size_t r, Part part, const State* given, const State* dsaved,
                 const State* saved = nullptr) {
    TensorSet own = conformance::make_outputs(as(Op::backward), in_, c_.problem.dtype);
    State dstate = empty();
    AttentionGradients grads;
    grads.g = rows(in_.g.view(), cuts_[r], part == keys_alone ? 0 : tokens(r));
    grads.dq = piece(own.at("dq"), r, part != keys_alone);
    grads.dk = piece(own.at("dk"), r, part != rows_alone);
    grads.dv = piece(own.at("dv"), r, part != rows_alone);
    grads.dalpha = own.view("dalpha");
    grads.dbeta = own.view("dbeta");
    if (part == whole) {
      grads.dmix = weight(own.view("dmix"), r);
      grads.dlln_weight = weight(own.view("dlln_weight"), r);
      grads.ddiag_weight = weight(own.view("ddiag_weight"), r);
    }
    if (given != nullptr) grads.dstate = dstate.write();
    if (dsaved != nullptr) grads.dsaved = dsaved->read();
    State copy = saved == nullptr ? empty() : *saved;
    if (saved != nullptr) grads.saved = copy.write();
    attention_backward(inputs(r, part, given), grads, options(part), exec_);
    add_piece(own, r, part);
    return dstate;
  }

  void forget_gradients() {
    for (const auto& entry : uncut_.entries()) {
      if (entry.name == "o") continue;
      found_.at(entry.name) = zeros(entry.tensor.dtype(), entry.tensor.shape());
    }
  }

  // All that the uncut call gives, relative to its largest element; tensors in 16 bits may be
  // rounded to the neighbouring number, and so may the operands of products in bf16. Gradients of
  // alpha and beta are sums over tokens of terms as large as q or k, which may cancel, and so may
  // those of a key that outweighs all others.
  void expect_uncut(double tolerance) const {
    const bool spike = c_.style == conformance::InputStyle::spike;
    for (const TensorSet::Entry& entry : uncut_.entries()) {
      const Tensor& expected = entry.tensor;
      const bool sum = entry.name == "dalpha" || entry.name == "dbeta";
      double largest = sum ? (spike ? 200 : 1) : (spike ? 1 : 1e-3);
      expected.for_each([&](auto b, auto h, auto n, auto ch) {
        largest = std::max(largest, std::abs(expected.get(b, h, n, ch)));
      });
      const DType dtype = expected.dtype();
      const bool narrow = c_.problem.dtype == DType::bf16;
      const double rounding = dtype == DType::bf16  ? 0x1p-7
                              : dtype == DType::f16 ? 0x1p-10
                              : sum && narrow       ? 0x1p-9
                                                    : 0;
      EXPECT_EQ(first_difference(found_.at(entry.name), (tolerance + rounding) * largest, expected),
                "")
          << entry.name << " of " << to_string(c_) << " cut at "
          << fmt::format("{}", fmt::join(cuts_, ", "));
    }
  }

 private:
  Case as(Op op) const {
    Case c = c_;
    c.problem.op = op;
    return c;
  }

  // Keys that do not count hold NaN.
  void apply(const std::vector<std::uint8_t>& mask) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    in_.key_mask = mask;
    for (Tensor* tensor : {&in_.k, &in_.v}) {
      tensor->for_each([&](auto b, auto h, auto n, auto ch) {
        if (!valid(b, n)) tensor->set(b, h, n, ch, nan);
      });
    }
    for (conformance::SequenceRows& seq : in_.sequences) {
      seq.first_valid = 0;
      while (seq.first_valid < seq.k_tokens && !valid(seq.batch, seq.first_valid)) {
        ++seq.first_valid;
      }
    }
  }
  bool valid(std::int64_t batch, std::int64_t token) const {
    return in_.key_mask[static_cast<std::size_t>(batch * c_.problem.tokens + token)] != 0;
  }

  // Rows and keys by themselves are of LLN and know no order.
  AttentionOptions options(Part part) const {
    AttentionOptions options = conformance::options(c_);
    if (part == whole) return options;
    options.kind = Kind::lln;
    options.causal = false;
    return options;
  }

  std::int64_t tokens(std::size_t r) const { return cuts_[r + 1] - cuts_[r]; }

  View piece(Tensor& tensor, std::size_t r, bool some) const {
    return rows(tensor.view(), cuts_[r], some ? tokens(r) : 0);
  }
  // A weight of LLN+Diag or its gradient, of which a piece has a part if it is one for each token.
  template <class AnyView>
  AnyView weight(const AnyView& view, std::size_t r) const {
    const bool per_token = c_.weights == conformance::WeightForm::token;
    return per_token && view.given() ? rows(view, cuts_[r], tokens(r)) : view;
  }

  void add_piece(const TensorSet& own, std::size_t r, Part part) {
    for (const TensorSet::Entry& entry : own.entries()) {
      const bool of_keys = entry.name == "dk" || entry.name == "dv";
      const bool of_weights = entry.name.ends_with("_weight") || entry.name == "dmix";
      if (entry.name == "dq" ? part == keys_alone
          : of_keys          ? part == rows_alone
                             : of_weights && part != whole) {
        continue;
      }
      const bool per_token = entry.name == "dq" || of_keys ||
                             (of_weights && c_.weights == conformance::WeightForm::token);
      Tensor& sum = found_.at(entry.name);
      sum.for_each([&](auto b, auto h, auto n, auto ch) {
        if (per_token && (n < cuts_[r] || n >= cuts_[r + 1])) return;
        sum.set(b, h, n, ch, sum.get(b, h, n, ch) + entry.tensor.get(b, h, n, ch));
      });
    }
  }

  AttentionInputs inputs(std::size_t r, Part part, const State* given) {
    const std::int64_t queries = part == keys_alone ? 0 : tokens(r);
    const std::int64_t keys = part == rows_alone ? 0 : tokens(r);
    AttentionInputs in = in_.views();
    in.q = rows(in.q, cuts_[r], queries);
    in.k = rows(in.k, cuts_[r], keys);
    in.v = rows(in.v, cuts_[r], keys);
    in.mix = weight(in.mix, r);
    in.lln_weight = weight(in.lln_weight, r);
    in.diag_weight = weight(in.diag_weight, r);
    if (in.key_mask.given()) {
      in.key_mask.data += cuts_[r] * in.key_mask.stride[1];
      in.key_mask.shape[1] = keys;
    }
    const auto list = [](const std::vector<std::int64_t>& x) { return IndexView(std::span(x)); };
    if (in.key_lengths.given()) {
      lengths_.clear();
      for (const std::int64_t length : in_.key_lengths) {
        lengths_.push_back(std::clamp<std::int64_t>(length - cuts_[r], 0, keys));
      }
      in.key_lengths = list(lengths_);
    }
    if (c_.problem.packed) {
      in.cu_seqlens_q = list(cu_q_ = piece_ends(r, queries));
      in.cu_seqlens_k = list(cu_k_ = piece_ends(r, keys));
    }
    if (c_.problem.has_diag() && part == whole) in.block_origins = list(origins_ = origins(r));
    if (given != nullptr) in.state = given->read();
    return in;
  }

  // The ends of packed sequences in a piece of so many tokens.
  std::vector<std::int64_t> piece_ends(std::size_t r, std::int64_t count) const {
    std::vector<std::int64_t> ends = in_.cu_seqlens_q;
    for (std::int64_t& end : ends) end = std::clamp<std::int64_t>(end - cuts_[r], 0, count);
    return ends;
  }

  // The first valid key of each uncut sequence, counted from its first token in the piece.
  std::vector<std::int64_t> origins(std::size_t r) const {
    std::vector<std::int64_t> origins;
    for (const conformance::SequenceRows& seq : in_.sequences) {
      const std::int64_t end = seq.k_begin + seq.k_tokens;
      const std::int64_t begin = std::clamp(cuts_[r], seq.k_begin, end);
      origins.push_back(seq.k_begin + seq.first_valid - begin);
    }
    return origins;
  }

  Case c_;
  std::vector<std::int64_t> cuts_;
  Exec exec_;
  DType small_ = DType::f32;
  Inputs in_;
  TensorSet uncut_, found_;
  std::vector<std::int64_t> lengths_, cu_q_, cu_k_, origins_;
};

// Bidirectional LLN: states of all pieces, merged; rows of each piece read the whole. Backward: the
// rows' gradients of that state, summed, go to the keys of every piece.
inline void expect_bidirectional(const CutCase& c, double tolerance, const Exec& exec = {}) {
  Cut cut(c, exec);
  std::vector<State> states;
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    states.push_back(cut.forward(r, Cut::keys_alone, nullptr));
  }
  const State all = cut.merge(pointers(states));
  State dall = cut.empty();
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    cut.forward(r, Cut::rows_alone, &all);
    const State own = cut.backward(r, Cut::rows_alone, &all, nullptr, r % 2 == 0 ? &all : nullptr);
    add(own.lse, dall.lse);
    add(own.values, dall.values);
  }
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    State dstate = cut.empty();
    add_part_gradient(cut.problem(), states[r], all, dall, dstate);
    cut.backward(r, Cut::keys_alone, nullptr, &dstate, r % 2 == 0 ? &states[r] : nullptr);
  }
  cut.expect_uncut(tolerance);
}

// Bidirectional, with blocks or without: every piece with its own keys and the state of all others.
// Backward: what the rows of the others want of the piece's keys is added by a call of its own.
inline void expect_own_keys(const CutCase& c, double tolerance, const Exec& exec = {}) {
  Cut cut(c, exec);
  std::vector<State> states, others, dothers;
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    states.push_back(cut.forward(r, Cut::keys_alone, nullptr));
  }
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    std::vector<const State*> rest = pointers(states);
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(r));
    others.push_back(cut.merge(rest));
    const State saved = cut.forward(r, Cut::whole, &others[r]);
    dothers.push_back(
        cut.backward(r, Cut::whole, &others[r], nullptr, r % 2 == 0 ? &saved : nullptr));
  }
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    State dstate = cut.empty();
    for (std::size_t s = 0; s < cut.pieces(); ++s) {
      if (s != r) add_part_gradient(cut.problem(), states[r], others[s], dothers[s], dstate);
    }
    cut.backward(r, Cut::keys_alone, nullptr, &dstate);
  }
  cut.expect_uncut(tolerance);
}

// Causal: every piece starts from the state of those before it. Backward: the gradient of that
// state goes to the piece before.
inline void expect_causal_chain(const CutCase& c, double tolerance, const Exec& exec = {}) {
  Cut cut(c, exec);
  std::vector<State> before;  // each piece
  before.push_back(cut.merge({}));
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    before.push_back(cut.forward(r, Cut::whole, &before[r]));
  }
  State later = cut.empty();
  for (std::size_t r = cut.pieces(); r-- > 0;) {
    later = cut.backward(r, Cut::whole, &before[r], &later);
  }
  cut.expect_uncut(tolerance);
}

// Causal, all pieces at once: states by themselves, merged to those before each piece; the
// gradients of these go to every piece before.
inline void expect_causal_scan(const CutCase& c, double tolerance, const Exec& exec = {}) {
  Cut cut(c, exec);
  std::vector<State> own, before, after;
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    before.push_back(cut.merge(pointers(own)));
    own.push_back(cut.forward(r, Cut::keys_alone, nullptr));
    after.push_back(cut.merge(pointers(own)));
  }
  std::vector<State> dbefore;
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    cut.forward(r, Cut::whole, &before[r]);
    dbefore.push_back(cut.backward(r, Cut::whole, &before[r], nullptr));
  }
  cut.forget_gradients();
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    State dafter = cut.empty();
    for (std::size_t s = r + 1; s < cut.pieces(); ++s) {
      add_part_gradient(cut.problem(), after[r], before[s], dbefore[s], dafter);
    }
    cut.backward(r, Cut::whole, &before[r], &dafter);
  }
  cut.expect_uncut(tolerance);
}

// Diag alone: no piece needs to know of any other.
inline void expect_separate(const CutCase& c, double tolerance, const Exec& exec = {}) {
  Cut cut(c, exec);
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    cut.forward(r, Cut::whole, nullptr);
    cut.backward(r, Cut::whole, nullptr, nullptr);
  }
  cut.expect_uncut(tolerance);
}

// The way of a case's kind.
inline void expect_pieces(const CutCase& c, double tolerance, const Exec& exec = {}) {
  const Problem& p = c.c.problem;
  if (!p.has_lln()) return expect_separate(c, tolerance, exec);
  if (p.causal) {
    expect_causal_chain(c, tolerance, exec);
    return expect_causal_scan(c, tolerance, exec);
  }
  if (p.kind == Kind::lln) expect_bidirectional(c, tolerance, exec);
  expect_own_keys(c, tolerance, exec);
}

}  // namespace lln::test
