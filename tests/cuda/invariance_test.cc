// What must not change a bit of a result on a device: another run, batch neighbours, packing, the
// scratch memory, where the tensors start. And where a NaN may go.
// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <vector>

#include "device_run.h"

namespace lln::test {
namespace {

using conformance::KeyPattern;
using conformance::ParameterForm;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class CudaInvariance : public OnDevice {};

// Of one type.
class CudaForms : public OnDevice, public testing::WithParamInterface<const char*> {
 protected:
  // Calls body(case) for every kind and op on a shape that takes several pieces of a sequence.
  template <class Body>
  static void for_each_form(const std::string& shape, const Body& body) {
    for (const std::string kind : kDeviceKinds) {
      for (const std::string op : kDeviceOps) {
        Case c = make_case(op + ":" + GetParam() + ":cpu:" + shape + ":" + kind);
        body(c);
        // Gradients of parameters take other ways.
        c.parameter_gradients = true;
        if (op == "backward") body(c);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Types, CudaForms, testing::ValuesIn(kDeviceTypes),
                         [](const auto& type) { return std::string(type.param); });

void copy_batch(const Tensor& from, std::int64_t from_batch, std::int64_t from_row, Tensor& to,
                std::int64_t to_row, std::int64_t rows) {
  for (std::int64_t h = 0; h < to.shape()[1]; ++h) {
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t c = 0; c < to.shape()[3]; ++c) {
        to.set(0, h, to_row + n, c, from.get(from_batch, h, from_row + n, c));
      }
    }
  }
}

// The rows of one sequence of `from`, as the only sequence of `to`.
void take_sequence(const Inputs& from, std::int64_t batch, std::int64_t row, std::int64_t tokens,
                   Inputs& to) {
  copy_batch(from.q, batch, row, to.q, 0, tokens);
  copy_batch(from.k, batch, row, to.k, 0, tokens);
  copy_batch(from.v, batch, row, to.v, 0, tokens);
  copy_batch(from.g, batch, row, to.g, 0, tokens);
}

// Rows [row, row + tokens) of a batch element, against a tensor that holds nothing else.
void expect_rows(const Tensor& together, std::int64_t batch, std::int64_t row, const Tensor& alone,
                 const std::string& what) {
  const auto expected = [&](auto b, auto h, auto n, auto c) -> std::optional<double> {
    if (b != batch || n < row || n >= row + alone.shape()[2]) return std::nullopt;
    return alone.get(0, h, n - row, c);
  };
  EXPECT_EQ(first_difference(together, 0, expected), "") << what;
}

// Where a kernel may add in another order, or another kernel may run: the same to rounding.
void expect_close(const TensorSet& found, const TensorSet& expected, const Case& c,
                  const std::string& what) {
  for (const TensorSet::Entry& entry : found.entries()) {
    double unit = c.problem.dtype == DType::f32 ? 1e-5 : 2e-2;
    // The sum of all q dq, each rounded, is no larger than what chance leaves of it.
    if (entry.name == "dalpha" || entry.name == "dbeta") unit *= 4;
    double largest = 0;
    entry.tensor.for_each([&](auto b, auto h, auto n, auto ch) {
      largest = std::max(largest, std::abs(entry.tensor.get(b, h, n, ch)));
    });
    EXPECT_EQ(first_difference(entry.tensor, unit * largest, expected.at(entry.name)), "")
        << entry.name << " of " << to_string(c) << ' ' << what;
  }
}

TEST_P(CudaForms, AnotherRun) {
  for_each_form("b2h4k2n1500d64", [](const Case& c) {
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    expect_same_bits(run_on_device(c, in), run_on_device(c, in), to_string(c));
  });
}

// The first and the last of three sequences, against each of them alone; the one between is NaN.
void expect_alone_as_among_three(Case three) {
  three.parameters = ParameterForm::one;
  three.parameter_gradients = false;
  Case one = three;
  one.problem.batch = one.problem.sequences = 1;
  Inputs in = conformance::make_inputs(three, three.problem.dtype);
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.g}) {
    t->for_each([&](auto b, auto h, auto n, auto c) {
      if (b == 1) t->set(b, h, n, c, kNaN);
    });
  }
  const TensorSet together = run_on_device(three, in);
  for (const std::int64_t batch : {0, 2}) {
    Inputs own = conformance::make_inputs(one, one.problem.dtype);
    take_sequence(in, batch, 0, one.problem.tokens, own);
    const TensorSet alone = run_on_device(one, own);
    for (const TensorSet::Entry& entry : alone.entries()) {
      expect_rows(together.at(entry.name), batch, 0, entry.tensor,
                  entry.name + " of " + to_string(three));
    }
  }
}

TEST_P(CudaForms, BatchNeighbours) {
  for (const std::string shape : {"h2n130d24", "h2k1n3000d64"}) {
    for_each_form("b3" + shape, expect_alone_as_among_three);
  }
}

// 1024 tokens are 16 tiles, and three teams take them in turn: two have a turn without a tile,
// and go on with the next head.
TEST_F(CudaInvariance, TurnsWithoutATile) {
  for (const std::string kind : {"lln", "lln+diag64"}) {
    for (const std::string op : kDeviceOps) {
      const Case c = make_case(op + ":bf16:cpu:b3h4n1100d64:" + kind);
      const Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const TensorSet first = run_on_device(c, in);
      for (int again = 0; again < 3; ++again) {
        expect_same_bits(run_on_device(c, in), first, to_string(c));
      }
    }
  }
}

// Several pieces to a block, of other heads and sequences: its teams hand over the sums of each.
TEST_F(CudaInvariance, ManyPiecesOfABlock) {
  for (const std::string kind : {"lln", "lln+diag64"}) {
    for (const std::string op : kDeviceOps) {
      expect_alone_as_among_three(make_case(op + ":bf16:cpu:b3h100n1100d64:" + kind));
    }
  }
}

// As many heads as half of the multiprocessors, or as all of them, are done in one launch; three
// times as many in two. Of an H200, and of the emulated device.
TEST_F(CudaInvariance, HeadsOfOneLaunchOrTwo) {
  for (const std::string heads : {"h70", "h4"}) {
    for (const std::string dim : {"d64", "d128"}) {
      expect_alone_as_among_three(make_case("forward:bf16:cpu:b3" + heads + "n150" + dim + ":lln"));
    }
  }
}

// Rows that several warps and two blocks share, in one piece and in several.
TEST_F(CudaInvariance, WideHeads) {
  for (const std::string type : {"bf16", "f16"}) {
    for (const std::string shape : {"h2k1n70d256", "h1n1050m40d136v8"}) {
      const Case c = make_case("backward:" + type + ":cpu:b3" + shape + ":lln");
      const Inputs in = conformance::make_inputs(c, c.problem.dtype);
      expect_same_bits(run_on_device(c, in), run_on_device(c, in), to_string(c));
    }
    expect_alone_as_among_three(make_case("backward:" + type + ":cpu:b3h2k1n70d256:lln"));
  }
}

// The same with Diag, in blocks of one tile and of several, alone and added in place.
TEST_F(CudaInvariance, WideBlocks) {
  for (const std::string op : kDeviceOps) {
    for (const std::string type : {"bf16", "f16"}) {
      for (const std::string form :
           {"h2k1n140d256:diag64", "h2k1n70d136v200:lln+diag16", "h1n140d256:lln+diag100"}) {
        const Case c = make_case(op + ":" + type + ":cpu:b3" + form);
        const Inputs in = conformance::make_inputs(c, c.problem.dtype);
        expect_same_bits(run_on_device(c, in), run_on_device(c, in), to_string(c));
        expect_alone_as_among_three(c);
      }
    }
  }
}

// f32 on tensor cores, and f16 by the same walks: rows that several warps share, Diag that is added
// in place, sums of pieces.
TEST_F(CudaInvariance, FloatHeads) {
  for (const std::string problem :
       {"f32:cpu:b3h2k1n70d64:lln", "f32:cpu:b3h2k1n70d64:lln+diag16",
        "f32:cpu:b3h2k1n70d64:lln:causal", "f32:cpu:b3h2k1n70d64:lln+diag16:causal",
        "f32:cpu:b3h1n4100d8:lln:causal", "f16:cpu:b3h2k1n70d64:lln:causal",
        "f16:cpu:b3h2k1n70d64:lln+diag16:causal", "f16:cpu:b3h1n140d128:lln+diag100:causal"}) {
    const Case c = make_case("backward:" + problem);
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    expect_same_bits(run_on_device(c, in), run_on_device(c, in), to_string(c));
    expect_alone_as_among_three(c);
  }
}

// The rows of a tile look at no keys behind it, where a NaN would reach them: 0 * NaN is NaN.
void expect_nothing_of_later_tiles(const Case& c) {
  constexpr std::int64_t kBehind = 64;
  Inputs in = conformance::make_inputs(c, c.problem.dtype);
  const TensorSet before = run_on_device(c, in);
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.g}) {
    t->for_each([&](auto b, auto h, auto n, auto ch) {
      if (n >= kBehind) t->set(b, h, n, ch, kNaN);
    });
  }
  const TensorSet after = run_on_device(c, in);
  const std::string of_rows = c.problem.op == Op::forward ? "o" : "dq";
  EXPECT_EQ(first_difference(after.at(of_rows), 0,
                             [&](auto b, auto h, auto n, auto ch) -> std::optional<double> {
                               if (n >= kBehind) return std::nullopt;
                               return before.at(of_rows).get(b, h, n, ch);
                             }),
            "")
      << of_rows << " of " << to_string(c);
}

// Causal Diag of the 16-bit types: blocks of one tile, of several, and of none exactly.
TEST_F(CudaInvariance, CausalDiag) {
  for (const std::string op : kDeviceOps) {
    for (const std::string type : {"bf16", "f16"}) {
      for (const std::string shape :
           {"h2k1n140d64:diag64", "h1n140d128:diag100", "h2k1n200d32:diag192", "h1n140d8:diag1000",
            "h2k1n140d136:diag64", "h1n140d256:diag100"}) {
        const Case c = make_case(op + ":" + type + ":cpu:b3" + shape + ":causal");
        const Inputs in = conformance::make_inputs(c, c.problem.dtype);
        expect_same_bits(run_on_device(c, in), run_on_device(c, in), to_string(c));
        expect_alone_as_among_three(c);
        expect_nothing_of_later_tiles(c);
      }
    }
  }
}

void expect_packed_as_separate(Case packed, const std::vector<std::int64_t>& lengths) {
  packed.parameters = ParameterForm::one;
  packed.parameter_gradients = false;
  packed.lengths = lengths;
  packed.problem.packed = true;
  packed.problem.sequences = static_cast<std::int64_t>(lengths.size());
  const Inputs in = conformance::make_inputs(packed, packed.problem.dtype);
  const TensorSet together = run_on_device(packed, in);
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    Case alone = packed;
    alone.lengths.clear();
    alone.problem.packed = false;
    alone.problem.sequences = 1;
    alone.problem.tokens = alone.problem.tokens_k = length;
    Inputs own = conformance::make_inputs(alone, alone.problem.dtype);
    take_sequence(in, 0, begin, length, own);
    const TensorSet separate = run_on_device(alone, own);
    for (const TensorSet::Entry& entry : separate.entries()) {
      expect_rows(together.at(entry.name), 0, begin, entry.tensor,
                  entry.name + " of " + to_string(packed) + " against " + to_string(alone));
    }
    begin += length;
  }
}

TEST_P(CudaForms, PackedEqualsSeparateCalls) {
  for_each_form("b1h4k2n2330d32v64", [](const Case& packed) {
    expect_packed_as_separate(packed, {700, 0, 1, 129, 1500, 0});
  });
}

// Wide heads that are causal, in one piece and in several, with Diag that is added in place.
TEST_F(CudaInvariance, WideCausalHeads) {
  for (const std::string op : kDeviceOps) {
    for (const std::string form :
         {"h2k1n70d256:lln", "h1n300d8v136:lln", "h2k1n70d136:lln+diag16"}) {
      const Case c = make_case(op + ":bf16:cpu:b3" + form + ":causal");
      const Inputs in = conformance::make_inputs(c, c.problem.dtype);
      expect_same_bits(run_on_device(c, in), run_on_device(c, in), to_string(c));
      expect_alone_as_among_three(c);
    }
    expect_packed_as_separate(make_case(op + ":bf16:cpu:b1h2k1n320d136v8:lln:causal"),
                              {10, 0, 257, 53});
  }
}

// dim and dim_v that are no multiples of 8: rows with padding, copied there and back. Where the
// tensors start makes no difference at all.
TEST_F(CudaInvariance, PaddedHeads) {
  for (const std::string op : kDeviceOps) {
    for (const std::string form :
         {"bf16:cpu:b3h2k1n140d60:lln", "f16:cpu:b3h2n140d100v36:lln+diag16",
          "bf16:cpu:b3h2k1n140d50v64:lln:causal", "bf16:cpu:b3h1n140d64v7:lln+diag64:causal",
          "f32:cpu:b3h2k1n70d60v7:lln+diag16:causal", "f32:cpu:b3h2n70d33v100:lln",
          "bf16:cpu:b3h1n140d27:diag48:causal"}) {
      const Case c = make_case(op + ":" + form);
      const Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const TensorSet first = run_on_device(c, in);
      expect_same_bits(run_on_device(c, in), first, to_string(c));
      expect_same_bits(run_on_device(c, in, {}, 1), first, to_string(c) + ", shifted");
      expect_alone_as_among_three(c);
      Case packed = c;
      packed.problem.batch = 1;
      expect_packed_as_separate(packed, {c.problem.tokens - 33, 0, 1, 32});
    }
  }
}

// A block that is longer than a sequence, which fits into a tile, and others that do not.
TEST_F(CudaInvariance, BlocksLongerThanATile) {
  for (const std::string op : {"forward", "backward"}) {
    for (const std::string type : {"bf16", "f32"}) {
      const std::string problem = op + ":" + type + ":cpu:b1h2n190d64:lln+diag100";
      expect_packed_as_separate(make_case(problem), {50, 64, 76});
    }
    for (const std::string kind :
         {"bf16:cpu:b1h2n320d64:diag100", "bf16:cpu:b1h2n320d64:diag1000",
          "f16:cpu:b1h2n320d64:lln+diag100", "f16:cpu:b1h2n320d64:lln+diag1000",
          "bf16:cpu:b1h2n320d136:diag100"}) {
      const std::string problem = op + ":" + kind + ":causal";
      expect_packed_as_separate(make_case(problem), {50, 64, 76, 130});
    }
  }
}

// Given and poisoned, given and zero, or taken inside the call.
TEST_P(CudaForms, Workspace) {
  for_each_form("b2h2n1100d64", [](const Case& c) {
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    const TensorSet expected = run_on_device(c, in);
    const DeviceMemory memory(kDevice, workspace_bytes(on_device(c.problem)));
    for (const int fill : {0xFF, 0}) {
      ASSERT_EQ(cudaMemset(memory.data(), fill, memory.size()), cudaSuccess);
      expect_same_bits(run_on_device(c, in, {.workspace = memory.span()}), expected, to_string(c));
    }
    EXPECT_TRUE(memory.guards_untouched()) << to_string(c);
  });
}

// A call that gives out the state of its keys, or gets it, on tensors that are not there.
std::size_t bytes_of_training(const Problem& p) {
  std::uintptr_t next = 4096;
  const auto view = [&](std::int64_t heads, std::int64_t rows, std::int64_t columns, DType type) {
    void* const data = reinterpret_cast<void*>(next);
    next += 4096;
    return View{data,
                type,
                p.device,
                {p.batch, heads, rows, columns},
                {heads * rows * columns, rows * columns, columns, 1}};
  };
  const auto row = [&] { return view(p.heads, p.tokens, p.dim, p.dtype); };
  const auto scale = [&] { return view(p.heads, 1, 1, DType::f32); };
  const AttentionSaved saved{view(p.heads, 1, p.dim, DType::f32),
                             view(p.heads, p.dim, p.dim_v, DType::f32)};
  const AttentionInputs in{.q = row(), .k = row(), .v = row(), .alpha = scale(), .beta = scale()};
  const AttentionOptions options{.kind = p.kind, .diag_block = p.diag_block, .causal = p.causal};
  if (p.op == Op::forward) return workspace_bytes(in, AttentionOutputs{row(), saved}, options);
  const AttentionGradients grads{.g = row(), .saved = saved, .dq = row(), .dk = row(), .dv = row()};
  return workspace_bytes(in, grads, options);
}

// Training needs besides its tensors three states of each head, of which one is saved, and little
// else.
TEST_F(CudaInvariance, WorkspaceIsBounded) {
  constexpr double kLittle = 64e6;
  for (const std::string shape :
       {"b128h16n512d64", "b64h16n1024d64", "b16h16n4096d64", "b4h16n16384d64", "b1h16n65536d64",
        "b1h1n1048576d64", "b8h16n4096d128", "b4h16n4096d256"}) {
    for (const std::string kind : {"lln", "lln+diag64"}) {
      for (const std::string op : kDeviceOps) {
        const Problem p = parse_problem(op + ":bf16:cuda:" + shape + ":" + kind);
        const double state = 4.0 * static_cast<double>(p.batch * p.heads * p.dim * (p.dim_v + 2));
        EXPECT_LE(static_cast<double>(bytes_of_training(p)), 2 * state + kLittle) << to_string(p);
        EXPECT_LE(bytes_of_training(p), workspace_bytes(p)) << to_string(p);
      }
    }
  }
}

// Causal LLN+Diag in f16, whose parts are two families', needs what the walks of bf16 do: room for
// the plain kernels, which may have to do some heads again.
TEST_F(CudaInvariance, WorkspaceOfTwoFamilies) {
  for (const std::string shape : {"b64h16n1024d64", "b16h16n4096d64", "b8h16n4096d128"}) {
    for (const std::string op : kDeviceOps) {
      const auto problem = [&](const std::string& type) {
        return parse_problem(op + ":" + type + ":cuda:" + shape + ":lln+diag64:causal");
      };
      const Problem p = problem("f16");
      EXPECT_EQ(bytes_of_training(p), bytes_of_training(problem("bf16"))) << to_string(p);
      EXPECT_LE(bytes_of_training(p), workspace_bytes(p)) << to_string(p);
    }
  }
}

// Tensors that no wide load can start at: another path inside the kernels, or another kernel, and
// results as right as the others.
TEST_P(CudaForms, MisalignedTensors) {
  for_each_form("b2h2n300d64", [](const Case& c) {
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    const TensorSet aligned = run_on_device(c, in);
    for (const std::size_t shift : {1, 3}) {
      expect_close(run_on_device(c, in, {}, shift), aligned, c,
                   "shifted by " + std::to_string(shift));
    }
  });
}

// A NaN alpha or beta gives NaN in its own head alone.
TEST_P(CudaForms, NaNScaleStaysInItsHead) {
  for (const std::string kind : {"lln", "lln:causal", "lln+diag32"}) {
    for (const std::string op : kDeviceOps) {
      const Case c = make_case(op + ":" + GetParam() + ":cpu:b2h3n200d64:" + kind);
      Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const TensorSet before = run_on_device(c, in);
      for (Tensor* scale : {&in.alpha, &in.beta}) scale->set(0, 1, 0, 0, kNaN);
      const TensorSet after = run_on_device(c, in);
      for (const TensorSet::Entry& entry : after.entries()) {
        const auto expected = [&](auto b, auto h, auto n, auto ch) -> std::optional<double> {
          if (h == 1) return std::nullopt;
          return before.at(entry.name).get(b, h, n, ch);
        };
        EXPECT_EQ(first_difference(entry.tensor, 0, expected), "") << entry.name << to_string(c);
        EXPECT_TRUE(std::isnan(entry.tensor.get(0, 1, 100, 3))) << entry.name << to_string(c);
      }
    }
  }
}

// Padding that holds NaN, by length and by mask.
TEST_P(CudaForms, LengthsEqualMask) {
  for_each_form("b3h2n700d32", [](Case c) {
    c.problem.masked = true;
    c.keys = KeyPattern::lengths;
    Inputs in = conformance::make_inputs(c, c.problem.dtype);
    const TensorSet by_length = run_on_device(c, in);
    in.key_mask.clear();
    for (const auto& rows : in.sequences) {
      in.key_mask.insert(in.key_mask.end(), rows.valid.begin(), rows.valid.end());
    }
    in.key_lengths.clear();
    expect_close(run_on_device(c, in), by_length, c, "by mask against by length");
  });
}

}  // namespace
}  // namespace lln::test
