// A problem is what a call computes, without the data: a value that prints, parses and compares.
// The same text names a problem in errors, in benchmarks and on the command line:
//
//   op:dtype:device:shape:kind[:flags] forward:bf16:cpu:b2h16k4n4096m4096d64v64:lln+diag64:causal
//
//   op     forward | backward | append | step | train (forward and backward together, benchmarks)
//   dtype  f32 | f16 | bf16 | f64                device  cpu | cuda | cuda:INDEX
//   shape  b batch, h query heads, k key heads (h), n query tokens, m key tokens (n), d channels of
//          q and k, v channels of v (d); what stands in parentheses is taken where it is omitted
//   kind   lln | diagB | lln+diagB | softmax     B is the block size
//   flags  causal, packed or packed=SEQUENCES, masked, state, block_origins,
//          feature=exp|elu|relu|softplus|powerP
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lln/exec.h"
#include "lln/tensor.h"

namespace lln {

enum class Op : std::uint8_t { forward, backward, append, step, train };
enum class Kind : std::uint8_t { lln, diag, lln_diag, softmax };
enum class Feature : std::uint8_t { exp, elu, relu, softplus, power };

const char* to_string(Op op) noexcept;
const char* to_string(Feature feature) noexcept;

struct Problem {
  Op op = Op::forward;
  DType dtype = DType::f32;
  Device device;
  std::int64_t batch = 1;     // of the tensors; 1 when packed
  std::int64_t heads = 1;     // of q and o
  std::int64_t heads_k = 1;   // of k and v; divides heads
  std::int64_t tokens = 0;    // of q; the sum over all sequences when packed
  std::int64_t tokens_k = 0;  // of k and v
  std::int64_t dim = 0;       // channels of q and k
  std::int64_t dim_v = 0;     // channels of v and o
  Kind kind = Kind::lln;
  std::int64_t diag_block = 0;  // block size of the kinds with a block-diagonal part, otherwise 0
  bool causal = false;
  bool masked = false;  // key lengths or a key mask are given
  bool packed = false;
  std::int64_t sequences = 1;  // packed: how many; otherwise equal to batch
  Feature feature = Feature::exp;
  float power = 2;  // of Feature::power
  // The state of other keys is given, or in the backward the gradient of the state of all keys.
  bool state = false;
  bool block_origins = false;  // where diagonal blocks are counted from is given

  bool has_lln() const noexcept { return kind == Kind::lln || kind == Kind::lln_diag; }
  bool has_diag() const noexcept { return kind == Kind::diag || kind == Kind::lln_diag; }
  // Something is given of a longer sequence that the call is a piece of.
  bool is_piece() const noexcept { return state || block_origins; }
  bool operator==(const Problem&) const = default;
};

std::string to_string(const Problem& problem);
Problem parse_problem(std::string_view text);  // throws Error naming the part that is wrong

// The part of the text after the shape, also taken alone by the command line.
void parse_kind(std::string_view text, Kind& kind, std::int64_t& diag_block);
void parse_feature(std::string_view text, Feature& feature, float& power);

// Scratch memory that is enough for every call of a problem with these workers, in bytes; one call
// may need less (lln/attention.h).
std::size_t workspace_bytes(const Problem& problem, const Exec& exec = {});

// The least that any implementation must do: bytes that must move between memory and the chip, and
// the floating-point operations of the matrix products (exponentials count as none). Masks are
// not known here, so all keys count as valid; packed sequences count as equally long.
struct Cost {
  double bytes = 0;
  double flops = 0;
};
Cost minimal_cost(const Problem& problem);

// Which kernels were asked, in order, and what each of them answered.
struct Explanation {
  struct Candidate {
    std::string kernel;
    std::string refusal;  // empty: takes the problem
  };
  Problem problem;
  std::vector<Candidate> candidates;
  std::string chosen;  // empty: no kernel takes it
  std::size_t workspace_bytes = 0;
  Cost cost;
};
Explanation explain(const Problem& problem, const Exec& exec = {});
std::string to_string(const Explanation& explanation);

// The names of all kernels of an operation in this build, in order of preference.
std::vector<std::string> kernel_names(Op op);
std::vector<std::string> kernel_names(Op op, DeviceKind device);  // those for tensors there

}  // namespace lln
