// The part of lln demo on decoding: a prompt appended to a state, then one token at a time, against
// the causal forward of the whole sequence, and what a token costs at different positions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lln/attention.h"
#include "verb.h"

namespace lln::cli {

struct DecodeRow {
  std::int64_t position = 0;   // tokens seen after the steps that were timed
  double seconds = 0;          // of one step, median
  double softmax_seconds = 0;  // one row of softmax attention over as many cached keys and values
  double cache_bytes = 0;      // of those keys and values
};

struct DecodeFindings {
  std::vector<DecodeRow> rows;
  double state_bytes = 0;
  double difference = 0;  // largest from the causal forward over all tokens, relative to the
                          // largest output
};

// `in` holds f32 tensors of one sequence, `out` gets the causal forward.
DecodeFindings measure_decoding(const AttentionInputs& in, const View& out, std::int64_t diag_block,
                                const Exec& exec);

std::string to_text(const DecodeFindings& found);
Json to_json(const DecodeFindings& found);

}  // namespace lln::cli
