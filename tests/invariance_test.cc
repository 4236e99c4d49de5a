// What must not change a result: packing, padding, batch neighbours, the number of threads, the
// layout, what the scratch memory held before. Equal bits wherever the arithmetic is the same.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention_run.h"
#include "lln/error.h"

namespace lln::test {
namespace {

using conformance::KeyPattern;
using conformance::Layout;
using conformance::ParameterForm;

const char* const kKinds[] = {"lln",
                              "lln:causal",
                              "lln+diag16",
                              "lln+diag16:causal",
                              "diag16",
                              "diag16:causal",
                              "softmax",
                              "softmax:causal",
                              "lln:state",
                              "lln:causal:state",
                              "lln+diag16:state:block_origins",
                              "lln+diag16:causal:state:block_origins",
                              "diag16:block_origins"};
// Causal sequences are cut into segments of 2048 tokens.
const char* const kSegmentedKinds[] = {"lln:causal", "lln+diag16:causal", "diag16:causal",
                                       "lln+diag16:causal:state:block_origins"};
const char* const kOps[] = {"forward", "backward"};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Sums of f32 in another order may differ by this, in parts of the largest number.
double other_order(const Tensor& x) {
  double largest = 1;
  x.for_each([&](auto b, auto h, auto n, auto c) {
    largest = std::max(largest, std::abs(x.get(b, h, n, c)));
  });
  return 1e-5 * largest;
}

// Rows y_from to y_from + count of y, as what is expected of x from row x_from on.
void expect_rows(const Tensor& x, std::int64_t x_batch, std::int64_t x_from, const Tensor& y,
                 std::int64_t y_batch, std::int64_t y_from, std::int64_t count, double tolerance,
                 const std::string& what) {
  const auto expected = [&](auto b, auto h, auto n, auto c) -> std::optional<double> {
    if (b != x_batch || n < x_from || n >= x_from + count) return std::nullopt;
    return y.get(y_batch, h, n - x_from + y_from, c);
  };
  EXPECT_EQ(first_difference(x, tolerance, expected), "") << what;
}

void copy_rows(const Tensor& from, std::int64_t from_batch, std::int64_t from_row, Tensor& to,
               std::int64_t to_batch, std::int64_t to_row, std::int64_t count) {
  for (std::int64_t h = 0; h < to.shape()[1]; ++h) {
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t c = 0; c < to.shape()[3]; ++c) {
        to.set(to_batch, h, to_row + n, c, from.get(from_batch, h, from_row + n, c));
      }
    }
  }
}

void copy_token_rows(const Inputs& from, std::int64_t from_batch, std::int64_t from_row, Inputs& to,
                     std::int64_t to_batch, std::int64_t to_row, std::int64_t count) {
  const std::pair<const Tensor*, Tensor*> tensors[] = {
      {&from.q, &to.q}, {&from.k, &to.k}, {&from.v, &to.v}, {&from.g, &to.g}};
  for (const auto& [source, target] : tensors) {
    copy_rows(*source, from_batch, from_row, *target, to_batch, to_row, count);
  }
}

// What belongs to a sequence as a whole, where it is a piece of a longer one.
void copy_sequence(const Inputs& from, std::int64_t sequence, Inputs& to) {
  const std::pair<const Tensor*, Tensor*> tensors[] = {{&from.state_lse, &to.state_lse},
                                                       {&from.state_values, &to.state_values},
                                                       {&from.dsaved_lse, &to.dsaved_lse},
                                                       {&from.dsaved_values, &to.dsaved_values}};
  for (const auto& [source, target] : tensors) {
    if (source->given()) copy_rows(*source, sequence, 0, *target, 0, 0, source->shape()[2]);
  }
  if (from.block_origins.empty()) return;
  to.block_origins = {from.block_origins[static_cast<std::size_t>(sequence)]};
}

bool of_sequence(const TensorSet::Entry& entry) { return entry.name.starts_with("dstate"); }

void expect_same(const TensorSet& found, const TensorSet& expected, const std::string& what) {
  for (const TensorSet::Entry& entry : found.entries()) {
    EXPECT_EQ(first_difference(entry.tensor, 0, expected.at(entry.name)), "")
        << entry.name << " of " << what;
  }
}

TEST(Invariance, PackedEqualsSeparateCalls) {
  const std::vector<std::int64_t> lengths = {70, 0, 1, 129};
  for (const std::string kind : kKinds) {
    for (const std::string op : kOps) {
      Case packed = make_case(op + ":f32:cpu:b1h4k2n200d24v16:" + kind + ":packed=4");
      packed.lengths = lengths;
      packed.parameters = ParameterForm::one;
      const Inputs in = conformance::make_inputs(packed, DType::f32);
      const TensorSet together = run(packed, in);
      std::int64_t begin = 0;
      for (std::int64_t s = 0; s < std::ssize(lengths); ++s) {
        const std::int64_t length = lengths[static_cast<std::size_t>(s)];
        Case alone = make_case(op + ":f32:cpu:b1h4k2n" + std::to_string(length) + "d24v16:" + kind);
        alone.parameters = ParameterForm::one;
        Inputs own = conformance::make_inputs(alone, DType::f32);
        copy_token_rows(in, 0, begin, own, 0, 0, length);
        copy_sequence(in, s, own);
        const TensorSet separate = run(alone, own);
        for (const TensorSet::Entry& entry : separate.entries()) {
          const bool whole = of_sequence(entry);
          expect_rows(together.at(entry.name), whole ? s : 0, whole ? 0 : begin, entry.tensor, 0, 0,
                      entry.tensor.shape()[2], 0,
                      entry.name + " of " + to_string(packed) + " against " + to_string(alone));
        }
        begin += length;
      }
    }
  }
}

// A sequence of 100 tokens alone, and inside 160 rows with padding before and behind it that holds
// NaN in k and v. Causal rows see the padding before them, so the sequence keeps its order.
TEST(Invariance, PaddingChangesNothing) {
  const std::int64_t tokens = 100;
  for (const std::string kind : kKinds) {
    for (const std::string op : kOps) {
      const Case alone = make_case(op + ":f32:cpu:b1h2k1n100d24:" + kind);
      const Inputs in = conformance::make_inputs(alone, DType::f32);
      const TensorSet expected = run(alone, in);
      for (const std::int64_t left : {0, 1, 37, 60}) {
        Case padded = make_case(op + ":f32:cpu:b1h2k1n160d24:" + kind + ":masked");
        padded.keys = KeyPattern::left_padding;
        Inputs wide = conformance::make_inputs(padded, DType::f32);
        for (Tensor* t : {&wide.k, &wide.v}) {
          t->for_each([&](auto b, auto h, auto n, auto c) { t->set(b, h, n, c, kNaN); });
        }
        // Rows of padding are queries like all others, but nobody asks for their results.
        wide.g.for_each([&](auto b, auto h, auto n, auto c) { wide.g.set(b, h, n, c, 0); });
        copy_token_rows(in, 0, 0, wide, 0, left, tokens);
        copy_sequence(in, 0, wide);
        for (std::int64_t& origin : wide.block_origins) origin += left;
        for (std::int64_t n = 0; n < 160; ++n) {
          wide.key_mask[static_cast<std::size_t>(n)] = n >= left && n < left + tokens ? 1 : 0;
        }
        const TensorSet found = run(padded, wide);
        for (const TensorSet::Entry& entry : expected.entries()) {
          expect_rows(found.at(entry.name), 0, of_sequence(entry) ? 0 : left, entry.tensor, 0, 0,
                      entry.tensor.shape()[2], other_order(entry.tensor),
                      entry.name + " with " + std::to_string(left) + " rows before it, " +
                          to_string(padded));
        }
      }
    }
  }
}

// Every third key is padding: the same as the sequence without them. (Blocks of Diag count
// positions, so holes do change its result.)
TEST(Invariance, HolesChangeNothing) {
  for (const std::string kind :
       {"lln", "lln:causal", "lln:state", "lln:causal:state", "softmax", "softmax:causal"}) {
    for (const std::string op : kOps) {
      const Case alone = make_case(op + ":f32:cpu:b1h2k1n100d24:" + kind);
      const Inputs in = conformance::make_inputs(alone, DType::f32);
      Case padded = make_case(op + ":f32:cpu:b1h2k1n150d24:" + kind + ":masked");
      padded.keys = KeyPattern::holes;
      Inputs wide = conformance::make_inputs(padded, DType::f32);
      for (Tensor* t : {&wide.k, &wide.v}) {
        t->for_each([&](auto b, auto h, auto n, auto c) { t->set(b, h, n, c, kNaN); });
      }
      wide.g.for_each([&](auto b, auto h, auto n, auto c) { wide.g.set(b, h, n, c, 0); });
      const auto place = [](std::int64_t n) { return n / 2 * 3 + n % 2; };
      wide.key_mask.assign(150, 0);
      for (std::int64_t n = 0; n < 100; ++n) {
        copy_token_rows(in, 0, n, wide, 0, place(n), 1);
        wide.key_mask[static_cast<std::size_t>(place(n))] = 1;
      }
      const TensorSet expected = run(alone, in);
      const TensorSet found = run(padded, wide);
      for (const TensorSet::Entry& entry : expected.entries()) {
        for (std::int64_t n = 0; n < entry.tensor.shape()[2]; ++n) {
          const std::int64_t at = of_sequence(entry) ? n : place(n);
          expect_rows(found.at(entry.name), 0, at, entry.tensor, 0, n, 1, other_order(entry.tensor),
                      entry.name + " row " + std::to_string(n) + " of " + to_string(padded));
        }
      }
    }
  }
}

// The middle of three batch elements becomes NaN everywhere: the others keep their bits, and are
// those of a batch of one.
void expect_no_batch_neighbours(const std::string& op, const std::string& shape,
                                const std::string& kind, const std::string& type = "f32") {
  const Case three = make_case(op + ":" + type + ":cpu:b3" + shape + ":" + kind);
  const Case one = make_case(op + ":" + type + ":cpu:b1" + shape + ":" + kind);
  const std::int64_t tokens = one.problem.tokens;
  Inputs in = conformance::make_inputs(three, three.problem.dtype);
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.state_lse, &in.state_values, &in.dsaved_lse,
                    &in.dsaved_values}) {
    t->for_each([&](auto b, auto h, auto n, auto c) {
      if (b == 1) t->set(b, h, n, c, kNaN);
    });
  }
  const TensorSet together = run(three, in);
  for (const std::int64_t batch : {0, 2}) {
    Inputs own = conformance::make_inputs(one, one.problem.dtype);
    copy_token_rows(in, batch, 0, own, 0, 0, tokens);
    copy_sequence(in, batch, own);
    const TensorSet alone = run(one, own);
    for (const TensorSet::Entry& entry : alone.entries()) {
      expect_rows(
          together.at(entry.name), batch, 0, entry.tensor, 0, 0, entry.tensor.shape()[2], 0,
          entry.name + " of batch element " + std::to_string(batch) + " in " + to_string(three));
    }
  }
}

TEST(Invariance, BatchNeighboursChangeNothing) {
  for (const std::string kind : kKinds) {
    for (const std::string op : kOps) expect_no_batch_neighbours(op, "h2n130d24", kind);
  }
  for (const std::string kind : kSegmentedKinds) {
    for (const std::string op : kOps) expect_no_batch_neighbours(op, "h2k1n5000d8", kind);
  }
}

TEST(Invariance, NaNInOnePackedSequenceStaysThere) {
  for (const std::string kind : kKinds) {
    for (const std::string op : kOps) {
      Case c = make_case(op + ":f32:cpu:b1h2n150d24:" + kind + ":packed=3");
      c.lengths = {50, 30, 70};
      Inputs in = conformance::make_inputs(c, DType::f32);
      const TensorSet before = run(c, in);
      for (Tensor* t : {&in.q, &in.k, &in.v, &in.g}) {
        t->for_each([&](auto b, auto h, auto n, auto ch) {
          if (n >= 50 && n < 80) t->set(b, h, n, ch, kNaN);
        });
      }
      const TensorSet after = run(c, in);
      for (const TensorSet::Entry& entry : after.entries()) {
        expect_rows(entry.tensor, 0, 0, before.at(entry.name), 0, 0, 50, 0, to_string(c));
        expect_rows(entry.tensor, 0, 80, before.at(entry.name), 0, 80, 70, 0, to_string(c));
      }
    }
  }
}

void expect_same_on_any_threads(const std::string& problem) {
  Case c = make_case(problem);
  c.parameter_gradients = true;
  const Inputs in = conformance::make_inputs(c, DType::f32);
  const TensorSet expected = run(c, in);
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    expect_same(run(c, in, {.parallel = &pool}), expected,
                to_string(c) + " with " + std::to_string(threads) + " threads");
  }
}

TEST(Invariance, NumberOfThreads) {
  for (const std::string op : kOps) {
    for (const std::string kind : kKinds) {
      for (const std::string shape : {"b2h4k2n150d24", "b1h1n1500d16"}) {
        const bool quadratic = kind.starts_with("softmax");
        expect_same_on_any_threads(op + ":f32:cpu:" + (quadratic ? "b1h2n300d16" : shape) + ":" +
                                   kind);
      }
    }
    for (const std::string kind : kSegmentedKinds) {
      for (const std::string shape : {"b1h1n5000d8", "b2h2k1n5000d8"}) {
        expect_same_on_any_threads(op + ":f32:cpu:" + shape + ":" + kind);
      }
    }
  }
}

// bf16 in whole vectors, which kernels may take two keys, rows or channels of at once; without
// gradients of alpha and beta, which they do not.
TEST(Invariance, PairsOfBf16) {
  for (const std::string kind : {"lln", "diag64", "lln+diag48"}) {
    for (const std::string op : kOps) {
      expect_no_batch_neighbours(op, "h2k1n131d64v48", kind, "bf16");
      Case c = make_case(op + ":bf16:cpu:b2h2k1n1301d32:" + kind);
      const TensorSet expected = run(c);
      for (const int threads : {2, 3, 5}) {
        ThreadPool pool(threads);
        expect_same(run(c, {.parallel = &pool}), expected, to_string(c));
      }
      for (const Layout layout : {Layout::bnhd, Layout::gaps}) {
        c.layout = layout;
        expect_same(run(c), expected, to_string(c));
      }
    }
  }
}

TEST(Invariance, Layout) {
  for (const std::string kind : kKinds) {
    for (const std::string op : kOps) {
      Case c = make_case(op + ":f32:cpu:b2h4k2n130d24v20:" + kind);
      const TensorSet contiguous = run(c);
      for (const Layout layout : {Layout::bnhd, Layout::gaps}) {
        c.layout = layout;
        expect_same(run(c), contiguous, to_string(c));
      }
    }
  }
}

// Exactly the bytes that were asked for, full of NaN or of zeros, with guards on both sides.
TEST(Invariance, Workspace) {
  constexpr std::size_t kGuard = 256;
  constexpr std::byte kGuardByte{0xA5};
  ThreadPool pool(3);
  for (const std::string kind : kKinds) {
    for (const std::string op : kOps) {
      const Case c = make_case(op + ":f32:cpu:b2h2n200d24:" + kind);
      const Inputs in = conformance::make_inputs(c, DType::f32);
      Exec exec{.parallel = &pool};
      const TensorSet expected = run(c, in, exec);
      const std::size_t bytes = workspace_bytes(c.problem, exec);
      for (const std::byte fill : {std::byte{0xFF}, std::byte{0}}) {
        std::vector<std::byte> storage(bytes + 2 * kGuard + 64, kGuardByte);
        void* begin = storage.data() + kGuard;
        std::size_t space = bytes + 64;
        std::align(64, bytes, begin, space);
        exec.workspace = {static_cast<std::byte*>(begin), bytes};
        std::fill(exec.workspace.begin(), exec.workspace.end(), fill);
        expect_same(run(c, in, exec), expected, to_string(c));
        const auto offset = static_cast<std::size_t>(exec.workspace.data() - storage.data());
        for (std::size_t i = 0; i < storage.size(); ++i) {
          if (i >= offset && i < offset + bytes) continue;
          ASSERT_EQ(storage[i], kGuardByte) << "byte " << i << " outside of the workspace of "
                                            << bytes << " bytes, " << to_string(c);
        }
      }
    }
  }
}

// Long sequences are cut into a bounded number of pieces, so the need levels off: it is some states
// of [dim, dim_v] for each head and worker, and no tensor of the size of the sequence.
TEST(Invariance, WorkspaceDoesNotGrowWithTheSequence) {
  constexpr std::size_t kHeads = 12;
  constexpr std::size_t kState = 64 * (64 + 2) * sizeof(float);
  for (const std::string kind :
       {"lln", "diag64", "lln+diag64", "diag128", "lln+diag128", "diag256", "lln+diag256"}) {
    for (const std::string op : kOps) {
      const auto bytes = [&](const std::string& tokens) {
        return workspace_bytes(parse_problem(op + ":f32:cpu:b1h12n" + tokens + "d64:" + kind));
      };
      EXPECT_EQ(bytes("65536"), bytes("1048576")) << op << ' ' << kind;
      EXPECT_LE(bytes("1048576"), 32 * kHeads * kState) << op << ' ' << kind;
    }
  }
}

// Asking costs nothing, however much is asked for; and the answer never wraps around.
TEST(Invariance, WorkspaceOfAbsurdlyLongSequencesIsKnownAtOnce) {
  for (const std::string kind : {"lln:causal", "lln+diag64:causal", "lln", "softmax",
                                 "lln+diag64:causal:state:block_origins"}) {
    for (const std::string op : kOps) {
      const auto bytes = [&](const std::string& tokens) {
        return explain(parse_problem(op + ":f32:cpu:b1h1n" + tokens + "d64:" + kind))
            .workspace_bytes;
      };
      const auto start = std::chrono::steady_clock::now();
      try {
        EXPECT_GE(bytes("1000000000000"), bytes("1000000000")) << op << ' ' << kind;
      } catch (const Error& refusal) {
        EXPECT_NE(std::string(refusal.what()).find("1000000000000"), std::string::npos)
            << refusal.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1))
          << op << ' ' << kind;
    }
  }
}

}  // namespace
}  // namespace lln::test
