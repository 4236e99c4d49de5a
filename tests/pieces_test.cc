// A sequence that is cut into pieces, uneven and empty ones among them, gives what it gives uncut:
// keys of pieces become states, states merge, rows read them, and gradients take the same way back.
// This is what sequence parallelism does between machines, here in one process.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention_run.h"
#include "expect_error.h"

namespace lln::test {
namespace {

using conformance::InputStyle;
using conformance::KeyPattern;
using conformance::ParameterForm;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

template <class AnyView>
AnyView rows(AnyView view, std::int64_t begin, std::int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<AnyView, View>, std::byte, const std::byte>;
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  view.data = static_cast<Byte*>(view.data) + begin * view.stride[2] * size;
  view.shape[2] = count;
  return view;
}

// Every element plus that of another tensor of the same shape.
void add(const Tensor& x, Tensor& sum) {
  x.for_each([&](auto b, auto h, auto n, auto c) {
    sum.set(b, h, n, c, sum.get(b, h, n, c) + x.get(b, h, n, c));
  });
}

Tensor zeros(DType dtype, const Shape& shape) {
  Tensor tensor(dtype, shape);
  tensor.for_each([&](auto b, auto h, auto n, auto c) { tensor.set(b, h, n, c, 0); });
  return tensor;
}

// A state, or the gradient of one.
struct State {
  State(const Problem& p, DType dtype)
      : lse(zeros(dtype, {p.sequences, p.heads_k, 1, p.dim})),
        values(zeros(dtype, {p.sequences, p.heads_k, p.dim, p.dim_v})) {}
  AttentionState read() const { return {lse.view(), values.view()}; }
  AttentionSaved write() { return {lse.view(), values.view()}; }
  Tensor lse, values;
};

// exp(c1 - c), 0 for the empty set.
double share(double part, double whole) {
  return part == kMinusInfinity ? 0 : std::exp(part - whole);
}

State merged(const Problem& p, DType dtype, const std::vector<const State*>& parts) {
  State all(p, dtype);
  all.lse.for_each([&](auto s, auto h, auto, auto l) {
    double largest = kMinusInfinity;
    for (const State* part : parts) largest = std::max(largest, part->lse.get(s, h, 0, l));
    double sum = 0;
    for (const State* part : parts) sum += share(part->lse.get(s, h, 0, l), largest);
    const double c = sum == 0 ? kMinusInfinity : largest + std::log(sum);
    all.lse.set(s, h, 0, l, c);
    for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
      double value = 0;
      for (const State* part : parts) {
        value += share(part->lse.get(s, h, 0, l), largest) * part->values.get(s, h, l, ch);
      }
      all.values.set(s, h, l, ch, sum == 0 ? 0 : value / sum);
    }
  });
  return all;
}

// Adds to the gradient of a part what that of the merged state sends there.
void add_part_gradient(const Problem& p, const State& part, const State& all, const State& dall,
                       State& dpart) {
  part.lse.for_each([&](auto s, auto h, auto, auto l) {
    const double e = share(part.lse.get(s, h, 0, l), all.lse.get(s, h, 0, l));
    double dc = dall.lse.get(s, h, 0, l);
    for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
      const double d = dall.values.get(s, h, l, ch);
      dc += d * (part.values.get(s, h, l, ch) - all.values.get(s, h, l, ch));
      dpart.values.set(s, h, l, ch, dpart.values.get(s, h, l, ch) + e * d);
    }
    dpart.lse.set(s, h, 0, l, dpart.lse.get(s, h, 0, l) + e * dc);
  });
}

// One case, run in pieces: piece r holds the tokens cuts[r] to cuts[r + 1].
class Cut {
 public:
  Cut(Case c, std::vector<std::int64_t> cuts, Exec exec = {})
      : c_(std::move(c)), cuts_(std::move(cuts)), exec_(exec) {
    c_.parameter_gradients = true;
    Case forward = as(Op::forward);
    in_ = conformance::make_inputs(c_, c_.problem.dtype);
    small_ = c_.problem.dtype == DType::f64 ? DType::f64 : DType::f32;
    uncut_ = run(forward, in_, exec_);
    const TensorSet gradients = run(as(Op::backward), in_, exec_);
    for (const auto& entry : gradients.entries()) {
      uncut_.add(entry.name, entry.tensor);
    }
    for (const auto& entry : uncut_.entries()) {
      // Sums over pieces start at zero, rows are NaN until they are written.
      const bool sum = entry.name == "dalpha" || entry.name == "dbeta";
      const Shape& shape = entry.tensor.shape();
      found_.add(entry.name, sum ? zeros(small_, shape) : Tensor(entry.tensor.dtype(), shape));
    }
  }

  std::size_t pieces() const { return cuts_.size() - 1; }
  const Problem& problem() const { return c_.problem; }
  State empty() const { return {c_.problem, small_}; }
  State merge(const std::vector<const State*>& parts) const {
    return merged(c_.problem, small_, parts);
  }

  enum Part { rows_alone, keys_alone, whole };

  // Rows into o, and the state of all keys.
  State forward(std::size_t r, Part part, const State* given) {
    State saved = empty();
    attention_forward(inputs(r, part, given), {rows_of("o", r, part != keys_alone), saved.write()},
                      options(part), exec_);
    return saved;
  }

  // Gradients of rows and keys, and that of the given state.
  State backward(std::size_t r, Part part, const State* given, const State* dsaved,
                 const State* saved = nullptr) {
    State dstate = empty();
    Tensor dalpha(small_, in_.alpha.shape());
    Tensor dbeta(small_, in_.beta.shape());
    AttentionGradients grads;
    grads.g = rows(in_.g.view(), cuts_[r], part == keys_alone ? 0 : tokens(r));
    grads.dq = rows_of("dq", r, part != keys_alone);
    grads.dk = rows_of("dk", r, part != rows_alone);
    grads.dv = rows_of("dv", r, part != rows_alone);
    grads.dalpha = dalpha.view();
    grads.dbeta = dbeta.view();
    if (given != nullptr) grads.dstate = dstate.write();
    if (dsaved != nullptr) grads.dsaved = dsaved->read();
    State copy = saved == nullptr ? empty() : *saved;
    if (saved != nullptr) grads.saved = copy.write();
    attention_backward(inputs(r, part, given), grads, options(part), exec_);
    add(dalpha, found_.at("dalpha"));
    add(dbeta, found_.at("dbeta"));
    return dstate;
  }

  void forget_sums() {
    for (const char* name : {"dalpha", "dbeta"}) {
      found_.at(name) = zeros(small_, found_.at(name).shape());
    }
  }

  // Relative to the largest element; tensors in 16 bits may be rounded to the neighbouring number.
  // Gradients of alpha and beta are sums over tokens of terms as large as q or k, which may cancel,
  // and so may those of a key that outweighs all others.
  void expect_uncut(double tolerance, std::initializer_list<const char*> names) {
    for (const std::string name : names) {
      const Tensor& expected = uncut_.at(name);
      const bool spike = c_.style == InputStyle::spike;
      const bool sum = name == "dalpha" || name == "dbeta";
      double largest = sum ? (spike ? 200 : 1) : (spike ? 1 : 1e-3);
      expected.for_each([&](auto b, auto h, auto n, auto ch) {
        largest = std::max(largest, std::abs(expected.get(b, h, n, ch)));
      });
      const DType dtype = expected.dtype();
      const double rounding = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 0;
      EXPECT_EQ(first_difference(found_.at(name), (tolerance + rounding) * largest, expected), "")
          << name << " of " << to_string(c_);
    }
  }

 private:
  Case as(Op op) const {
    Case c = c_;
    c.problem.op = op;
    return c;
  }
  // Rows and keys by themselves know no order.
  AttentionOptions options(Part part) const {
    AttentionOptions options = conformance::options(c_);
    options.causal = options.causal && part == whole;
    return options;
  }
  std::int64_t tokens(std::size_t r) const { return cuts_[r + 1] - cuts_[r]; }

  View rows_of(const char* name, std::size_t r, bool some) {
    return rows(found_.at(name).view(), cuts_[r], some ? tokens(r) : 0);
  }

  AttentionInputs inputs(std::size_t r, Part part, const State* given) {
    const std::int64_t queries = part == keys_alone ? 0 : tokens(r);
    const std::int64_t keys = part == rows_alone ? 0 : tokens(r);
    AttentionInputs in = in_.views();
    in.q = rows(in.q, cuts_[r], queries);
    in.k = rows(in.k, cuts_[r], keys);
    in.v = rows(in.v, cuts_[r], keys);
    if (in.key_mask.given()) {
      in.key_mask.data += cuts_[r] * in.key_mask.stride[1];
      in.key_mask.shape[1] = keys;
    }
    if (in.key_lengths.given()) {
      lengths_.clear();
      for (const std::int64_t length : in_.key_lengths) {
        lengths_.push_back(std::clamp<std::int64_t>(length - cuts_[r], 0, keys));
      }
      in.key_lengths = IndexView(std::span<const std::int64_t>(lengths_));
    }
    if (given != nullptr) in.state = given->read();
    return in;
  }

  Case c_;
  std::vector<std::int64_t> cuts_;
  Exec exec_;
  DType small_ = DType::f32;
  Inputs in_;
  TensorSet uncut_, found_;
  std::vector<std::int64_t> lengths_;
};

std::vector<const State*> pointers(const std::vector<State>& states) {
  std::vector<const State*> list;
  for (const State& state : states) list.push_back(&state);
  return list;
}

// Bidirectional: states of all pieces, merged; rows of each piece read the whole. Backward: the
// rows' gradients of that state, summed, go to the keys of every piece.
void expect_bidirectional(const Case& c, const std::vector<std::int64_t>& cuts, double tolerance,
                          const Exec& exec = {}) {
  Cut cut(c, cuts, exec);
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
  cut.expect_uncut(tolerance, {"o", "dq", "dk", "dv", "dalpha", "dbeta"});

  // The other way: every piece with its own keys and the state of all others.
  Cut other(c, cuts, exec);
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    std::vector<const State*> rest = pointers(states);
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(r));
    const State given = other.merge(rest);
    other.forward(r, Cut::whole, &given);
  }
  other.expect_uncut(tolerance, {"o"});
}

// Causal: every piece starts from the state of those before it. Backward: the gradient of that
// state goes to the piece before.
void expect_causal_chain(const Case& c, const std::vector<std::int64_t>& cuts, double tolerance,
                         const Exec& exec = {}) {
  Cut cut(c, cuts, exec);
  std::vector<State> before;  // each piece
  before.push_back(cut.merge({}));
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    before.push_back(cut.forward(r, Cut::whole, &before[r]));
  }
  State later = cut.empty();
  for (std::size_t r = cut.pieces(); r-- > 0;) {
    later = cut.backward(r, Cut::whole, &before[r], &later);
  }
  cut.expect_uncut(tolerance, {"o", "dq", "dk", "dv", "dalpha", "dbeta"});
}

// Causal, all pieces at once: states by themselves, merged to those before each piece; the
// gradients of these go to every piece before.
void expect_causal_scan(const Case& c, const std::vector<std::int64_t>& cuts, double tolerance) {
  Cut cut(c, cuts);
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
  cut.forget_sums();
  for (std::size_t r = 0; r < cut.pieces(); ++r) {
    State dafter = cut.empty();
    for (std::size_t s = r + 1; s < cut.pieces(); ++s) {
      add_part_gradient(cut.problem(), after[r], before[s], dbefore[s], dafter);
    }
    cut.backward(r, Cut::whole, &before[r], &dafter);
  }
  cut.expect_uncut(tolerance, {"o", "dq", "dk", "dv", "dalpha", "dbeta"});
}

const std::vector<std::int64_t> kCuts = {0, 0, 1, 64, 64, 131, 150, 150};
const std::vector<std::int64_t> kShortCuts = {0, 3, 3, 4, 20, 20};
const char* const kFeatures[] = {"exp", "elu", "relu", "softplus", "power2"};
const KeyPattern kPatterns[] = {KeyPattern::all, KeyPattern::lengths, KeyPattern::left_padding,
                                KeyPattern::holes};

Case pattern_case(std::string problem, KeyPattern keys) {
  Case c = make_case(problem + (keys == KeyPattern::all ? "" : ":masked"));
  c.keys = keys;
  c.parameters = ParameterForm::sequence;
  return c;
}

TEST(Pieces, BidirectionalInF64) {
  for (const KeyPattern keys : kPatterns) {
    expect_bidirectional(pattern_case("forward:f64:cpu:b3h4k2n20d5v3:lln", keys), kShortCuts,
                         1e-12);
  }
  for (const std::string feature : kFeatures) {
    expect_bidirectional(make_case("forward:f64:cpu:b1h2n20d5v3:lln:feature=" + feature),
                         kShortCuts, 1e-12);
  }
}

TEST(Pieces, CausalInF64) {
  for (const KeyPattern keys : kPatterns) {
    const Case c = pattern_case("forward:f64:cpu:b3h4k2n20d5v3:lln:causal", keys);
    expect_causal_chain(c, kShortCuts, 1e-12);
    expect_causal_scan(c, kShortCuts, 1e-12);
  }
  for (const std::string feature : kFeatures) {
    const Case c = make_case("forward:f64:cpu:b1h2n20d5v3:lln:causal:feature=" + feature);
    expect_causal_chain(c, kShortCuts, 1e-12);
  }
}

TEST(Pieces, Bidirectional) {
  for (const std::string type : {"f32", "f16", "bf16"}) {
    const double tolerance = 1e-5;
    for (const KeyPattern keys : kPatterns) {
      expect_bidirectional(pattern_case("forward:" + type + ":cpu:b3h4k2n150d24v16:lln", keys),
                           kCuts, tolerance);
    }
    for (const std::string feature : kFeatures) {
      expect_bidirectional(make_case("forward:" + type + ":cpu:b1h2n150d16:lln:feature=" + feature),
                           kCuts, tolerance);
    }
  }
  expect_bidirectional(make_case("forward:f32:cpu:b1h2k1n3000d8:lln"), {0, 2000, 2001, 3000}, 1e-5);
}

TEST(Pieces, Causal) {
  for (const std::string type : {"f32", "f16", "bf16"}) {
    const double tolerance = 1e-5;
    for (const KeyPattern keys : kPatterns) {
      const Case c = pattern_case("forward:" + type + ":cpu:b3h4k2n150d24v16:lln:causal", keys);
      expect_causal_chain(c, kCuts, tolerance);
      expect_causal_scan(c, kCuts, tolerance);
    }
    for (const std::string feature : kFeatures) {
      expect_causal_chain(
          make_case("forward:" + type + ":cpu:b1h2n150d16:lln:causal:feature=" + feature), kCuts,
          tolerance);
    }
  }
  expect_causal_chain(make_case("forward:f32:cpu:b1h2k1n3000d8:lln:causal"), {0, 2000, 2001, 3000},
                      1e-5);
}

// Blocks of Diag begin anew at the border of a piece, so that pieces of whole blocks change
// nothing.
TEST(Pieces, CausalWithBlocks) {
  const std::vector<std::int64_t> cuts = {0, 16, 16, 64, 144, 150};
  expect_causal_chain(make_case("forward:f64:cpu:b2h2n150d8:lln+diag16:causal"), cuts, 1e-12);
  expect_causal_chain(make_case("forward:f32:cpu:b2h4k2n150d16:lln+diag16:causal"), cuts, 1e-5);
}

// A key that is 200 larger, in exponent, erases neither earlier pieces nor earlier rows.
TEST(Pieces, LargeKeys) {
  for (const std::int64_t at : {0, 1, 63, 64, 130, 149}) {
    for (const std::string type : {"f64", "f32"}) {
      const double tolerance = type == "f64" ? 1e-11 : 1e-4;
      Case c = make_case("forward:" + type + ":cpu:b1h2n150d8:lln");
      c.style = InputStyle::spike;
      c.spike_at = at;
      expect_bidirectional(c, kCuts, tolerance);
      c.problem.causal = true;
      expect_causal_chain(c, kCuts, tolerance);
      expect_causal_scan(c, kCuts, tolerance);
    }
  }
}

// Results of threads are those of one, to the last bit, with states too.
TEST(Pieces, ThreadsChangeNothing) {
  ThreadPool pool(3);
  for (const std::string kind : {"lln", "lln:causal", "lln+diag16:causal"}) {
    for (const std::string op : {"forward", "backward"}) {
      Case c = make_case(op + ":f32:cpu:b1h2k1n2500d8:" + kind + ":masked:state");
      c.keys = KeyPattern::left_padding;
      c.parameter_gradients = true;
      c.saved = op == "forward";
      const TensorSet alone = run(c);
      const TensorSet together = run(c, {.parallel = &pool});
      for (const TensorSet::Entry& entry : alone.entries()) {
        EXPECT_EQ(first_difference(together.at(entry.name), 0, entry.tensor), "")
            << entry.name << " of " << to_string(c);
      }
    }
  }
}

// No keys anywhere: rows and gradients of zero, whatever the empty state holds beside -inf.
TEST(Pieces, NothingAtAll) {
  for (const std::string type : {"f64", "f32", "bf16"}) {
    for (const std::string form : {"n5m0d4:lln:state", "n0d4:lln:causal:state"}) {
      Case c = make_case("backward:" + type + ":cpu:b1h2k1" + form);
      Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const double nan = std::numeric_limits<double>::quiet_NaN();
      for (Tensor* tensor : {&in.state_lse, &in.state_values, &in.dsaved_lse, &in.dsaved_values}) {
        tensor->for_each([&](auto s, auto h, auto n, auto ch) {
          tensor->set(s, h, n, ch, tensor == &in.state_lse ? kMinusInfinity : nan);
        });
      }
      const TensorSet gradients = run(c, in);
      for (const TensorSet::Entry& entry : gradients.entries()) {
        EXPECT_EQ(first_difference(entry.tensor, 0, zeros(DType::f64, entry.tensor.shape())), "")
            << entry.name << " of " << to_string(c);
      }
      c.problem.op = Op::forward;
      c.saved = true;
      const TensorSet out = run(c, in);
      EXPECT_EQ(first_difference(out.at("o"), 0, zeros(DType::f64, out.at("o").shape())), "");
      EXPECT_EQ(out.at("key_lse").get(0, 0, 0, 0), kMinusInfinity);
      EXPECT_EQ(out.at("channel_values").get(0, 0, 0, 0), 0);
    }
  }
}

// Keys, but none in the given state: as if it were not given.
TEST(Pieces, EmptyGivenState) {
  for (const std::string kind : {"lln", "lln:causal"}) {
    Case with = make_case("backward:f32:cpu:b1h2n70d8:" + kind + ":state");
    Inputs in = conformance::make_inputs(with, DType::f32);
    in.state_lse.for_each(
        [&](auto s, auto h, auto n, auto ch) { in.state_lse.set(s, h, n, ch, kMinusInfinity); });
    in.dsaved_lse = zeros(DType::f32, in.dsaved_lse.shape());
    in.dsaved_values = zeros(DType::f32, in.dsaved_values.shape());
    const TensorSet found = run(with, in);
    const TensorSet plain = run(make_case("backward:f32:cpu:b1h2n70d8:" + kind));
    for (const TensorSet::Entry& entry : plain.entries()) {
      EXPECT_EQ(first_difference(found.at(entry.name), 0, entry.tensor), "") << entry.name;
    }
    for (const char* name : {"dstate_lse", "dstate_values"}) {
      const Tensor& gradient = found.at(name);
      EXPECT_EQ(first_difference(gradient, 0, zeros(DType::f32, gradient.shape())), "") << name;
    }
  }
}

TEST(Pieces, KernelsThatTakeNoStateSaySo) {
  const Problem problem = parse_problem("forward:f32:cuda:b1h1n8d8:lln:state");
  const Explanation on_device = explain(problem);
  for (const auto& candidate : on_device.candidates) {
    EXPECT_NE(candidate.refusal, "") << candidate.kernel;
  }
  // Kernels of decoding stand for any that did not say that they take one.
  Problem append = parse_problem("append:f32:cpu:b1h1n8d8:lln");
  append.state = true;
  const Explanation decoding = explain(append);
  ASSERT_FALSE(decoding.candidates.empty());
  for (const auto& candidate : decoding.candidates) {
    if (candidate.kernel.starts_with("cpu-")) {
      EXPECT_NE(candidate.refusal.find("takes no state of other keys"), std::string::npos)
          << candidate.kernel << ": " << candidate.refusal;
    }
  }
}

}  // namespace
}  // namespace lln::test
