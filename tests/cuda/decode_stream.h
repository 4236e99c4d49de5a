// A case whose tokens go through decode states on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <random>

#include "conformance/compare.h"
#include "conformance/decode.h"
#include "device_run.h"

namespace lln::test {

using conformance::OwnedState;
using conformance::token_range;

class Stream {
 public:
  explicit Stream(const Case& of, const std::function<void(Inputs&)>& change = {})
      : c(of),
        in(changed(conformance::make_inputs(c, c.problem.dtype), change)),
        config(conformance::decode_config(c)),
        outputs_(conformance::make_outputs(c, in, c.problem.dtype)),
        data_(kDevice, in, outputs_) {}
  explicit Stream(const char* problem, const std::function<void(Inputs&)>& change = {})
      : Stream(make_case(problem), change) {}

  // Tokens [begin, end) of the case; rows go to their place in rows() where they are wanted.
  void append(OwnedState& state, std::int64_t begin, std::int64_t end, bool rows = true,
              const Exec& exec = {}) {
    AttentionInputs piece = token_range(data_.views().in, begin, end - begin, no_lengths_);
    const View o = token_range(data_.views().out.o, begin, end - begin);
    if (!rows) {
      piece.q = piece.alpha = {};
      state->append(piece, {}, exec);
    } else if (end - begin == 1) {
      state->step(piece, o, exec);
    } else {
      state->append(piece, o, exec);
    }
  }

  void append_in_pieces(OwnedState& state, std::uint64_t seed, std::int64_t longest) {
    std::mt19937_64 random(seed);
    for (std::int64_t begin = 0; begin < c.problem.tokens;) {
      const auto count = static_cast<std::int64_t>(1 + random() % static_cast<unsigned>(longest));
      const std::int64_t end = std::min(c.problem.tokens, begin + count);
      append(state, begin, end);
      begin = end;
    }
  }

  // The rows that were written so far.
  const Tensor& rows() {
    data_.fetch();
    return outputs_.at("o");
  }

  // Queries [begin, end) of the case against the state.
  Tensor read(OwnedState& state, std::int64_t begin, std::int64_t end) {
    AttentionInputs queries = token_range(data_.views().in, begin, end - begin, no_lengths_);
    queries.k = queries.v = queries.beta = {};
    Tensor o(c.problem.dtype, {c.problem.batch, c.problem.heads, end - begin, c.problem.dim_v});
    DeviceMemory memory(kDevice, o.bytes().size());
    View view = on(kDevice, o.view());
    view.data = memory.data();
    state->read(queries, view);
    memory.read(o.writable_bytes());
    return o;
  }

  Tensor causal_rows() const { return run(conformance::causal_case(host_case()), in).at("o"); }
  const CaseViews& views() const { return data_.views(); }

  Case c;
  Inputs in;
  DecodeConfig config;

 private:
  static Inputs changed(Inputs inputs, const std::function<void(Inputs&)>& change) {
    if (change) change(inputs);
    return inputs;
  }

  Case host_case() const {
    Case host = c;
    host.problem.device = {};
    return host;
  }

  std::vector<std::int32_t> no_lengths_;
  TensorSet outputs_;
  DeviceData data_;
};

// Lengths of the tokens that sequences add, in memory of the device.
template <class Index>
class DeviceLengths {
 public:
  explicit DeviceLengths(const std::vector<Index>& lengths)
      : memory_(kDevice, sizeof(Index) * lengths.size()),
        view_(on(kDevice, IndexView(std::span<const Index>(lengths)))) {
    memory_.write(std::as_bytes(std::span(lengths)));
    view_.data = memory_.data();
  }
  const IndexView& view() const { return view_; }

 private:
  DeviceMemory memory_;
  IndexView view_;
};

inline std::vector<std::byte> saved(OwnedState& state) {
  std::vector<std::byte> bytes(state->saved_bytes());
  state->save(bytes);
  return bytes;
}

inline double tolerance(const Stream& stream) {
  return 8 * conformance::unit_roundoff(stream.c.problem.dtype) + 1e-5;
}

}  // namespace lln::test
