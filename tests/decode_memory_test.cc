// The calls of a decode state where an allocation fails, whichever it is: an Error, and nothing has
// changed. Apart from decode_state_test, because the program's allocation functions are replaced.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>

#include "attention_run.h"
#include "conformance/decode.h"
#include "lln/error.h"
#include "watched_allocation.h"

namespace lln::test {
namespace {

using conformance::OwnedState;

class DecodeMemory : public testing::Test {
 protected:
  void SetUp() override {
    if (!allocations_can_fail()) GTEST_SKIP() << "a sanitizer keeps its own allocation functions";
  }
  DecodeMemory()
      : c(make_case("append:f32:cpu:b2h2n9d8:lln+diag4")),
        in(conformance::make_inputs(c, c.problem.dtype)),
        state(conformance::decode_config(c)),
        other(conformance::decode_config(c)),
        foreign({.dim = 3, .dim_v = 2}),
        rows(DType::f32, in.g.shape()),
        bytes(state->saved_bytes()) {
    state->append(in.views(), rows.view());
    other->append(in.views(), rows.view());
  }

  // Makes the call with its first allocation failing, then its second, and so on until it meets no
  // failure. Returns how many there were.
  int failures(const std::function<void()>& call) {
    for (int passed = 0;; ++passed) {
      const std::vector<std::byte> before = everything();
      fail_allocation_after(passed);
      const char* outcome = "no exception";  // a std::string would allocate
      try {
        call();
      } catch (const Error& e) {
        outcome = to_string(e.code());
      } catch (const std::bad_alloc&) {
        outcome = "std::bad_alloc";
      }
      if (!stop_failing()) return passed;
      EXPECT_STREQ(outcome, to_string(ErrorCode::out_of_memory)) << "allocation " << passed;
      EXPECT_EQ(everything(), before) << "allocation " << passed;
    }
  }

  // All that a call could write.
  std::vector<std::byte> everything() {
    std::vector<std::byte> all(state->saved_bytes());
    state->save(all);
    all.insert(all.end(), rows.bytes().begin(), rows.bytes().end());
    all.insert(all.end(), bytes.begin(), bytes.end());
    return all;
  }

  Case c;
  Inputs in;
  OwnedState state, other, foreign;
  Tensor rows;
  std::vector<std::byte> bytes;
};

TEST_F(DecodeMemory, CallsThatRun) {
  const AttentionInputs inputs = in.views();
  AttentionInputs query = inputs;
  query.k = query.v = {};
  std::vector<std::int32_t> lengths;
  const AttentionInputs token = conformance::token_range(inputs, 0, 1, lengths);
  const View row = conformance::token_range(rows.view(), 0, 1);
  EXPECT_GT(failures([&] { state->append(inputs, rows.view()); }), 0);
  EXPECT_GT(failures([&] { state->read(query, rows.view()); }), 0);
  EXPECT_GT(failures([&] { state->step(token, row); }), 0);
  EXPECT_GT(failures([&] { DecodeState(state->config(), other.memory()); }), 0);
}

TEST_F(DecodeMemory, SavesCopiesAndMergesNeedNone) {
  EXPECT_EQ(failures([&] { state->save(bytes); }), 0);
  EXPECT_EQ(failures([&] { state->copy_from(*other); }), 0);
  state->reset();
  EXPECT_EQ(failures([&] { state->merge(*other); }), 0);
}

TEST_F(DecodeMemory, Refusals) {
  const std::span<std::byte> cut = std::span(bytes).first(bytes.size() - 1);
  EXPECT_GT(failures([&] { state->save(cut); }), 0);
  EXPECT_GT(failures([&] { state->load(cut); }), 0);
  EXPECT_GT(failures([&] { (void)saved_decode_config(cut); }), 0);
  EXPECT_GT(failures([&] { state->merge(*other); }), 0);
  EXPECT_GT(failures([&] { state->merge(*foreign); }), 0);
  EXPECT_GT(failures([&] { state->copy_from(*foreign); }), 0);
  EXPECT_GT(failures([&] { (void)state->tokens(2); }), 0);
  EXPECT_GT(failures([&] { state->reset(2); }), 0);
  foreign->save(std::span(bytes).first(foreign->saved_bytes()));
  EXPECT_GT(failures([&] { state->load(std::span(bytes).first(foreign->saved_bytes())); }), 0);
}

}  // namespace
}  // namespace lln::test
