// The case table: every problem that a kernel must get right, with the form of its data. One table
// serves the tests and the command line; a kernel that is added to the library is judged on it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/tensor.h"
#include "lln/attention.h"

namespace lln::conformance {

// Where the weights of LLN+Diag come from: options.mix, or a tensor of this form.
enum class WeightForm : std::uint8_t { constant, call, head, channel, token };

enum class ParameterForm : std::uint8_t { one, head, sequence };  // of alpha and beta

// Which keys of a batch element are valid. Those that are not hold NaN in k and v.
enum class KeyPattern : std::uint8_t {
  all,
  lengths,       // a different length for each batch element, the last one 0
  left_padding,  // a mask that starts late
  holes,         // a mask with holes, borders included; one batch element without any valid key
};

enum class InputStyle : std::uint8_t {
  normal,         // independent standard normal numbers
  large_keys,     // keys times 1e4
  spike,          // one key with an exponent 200 larger; in odd heads in its first channel alone
  constant_rows,  // all queries alike, all keys alike
  large_values,   // v near the largest finite number of its type
  denormal,       // q, k, v and g below the smallest normal f32
  high_values,    // v up to 2^60, which every kernel must stand
  far_below,      // q and k so negative that a channel of zeros would outweigh theirs
};

struct Case {
  Problem problem = {};  // op forward, backward or append (in pieces, to an empty decode state)
  Layout layout = Layout::bhnd;
  WeightForm weights = WeightForm::constant;
  bool two_weights = false;  // lln_weight and diag_weight instead of mix
  ParameterForm parameters = ParameterForm::head;
  KeyPattern keys = KeyPattern::all;
  InputStyle style = InputStyle::normal;
  std::int64_t spike_at = 0;                 // index of the key inside its sequence
  std::vector<std::int64_t> lengths = {};    // packed: tokens of each sequence
  std::vector<std::int64_t> lengths_k = {};  // packed cross attention: key tokens of each sequence
  bool saved = false;                        // forward writes, backward reads (c, C)
  bool parameter_gradients = false;  // dalpha, dbeta and the gradients of the weights as well
  bool weight_gradients = false;     // those of the weights alone
  bool quick = false;                // of the small subset for slow builds
  bool tensor_cores = false;         // for kernels of devices: on the CPU it would add time alone
};

// The problem and everything that differs from a plain call of it.
std::string to_string(const Case& c);
AttentionOptions options(const Case& c);

// Cases are written for tensors in host memory; those for `device`, there. f64 is for the CPU.
std::vector<Case> on_device(std::vector<Case> cases, Device device);

std::vector<Case> cases();        // of all devices; the order is fixed
std::vector<Case> quick_cases();  // those marked quick

}  // namespace lln::conformance
