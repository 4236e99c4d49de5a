// The faults of one call, collected so that a single Error names them all, and the rules for views
// that every call shares. Apart from validate.cc, because not only attention is validated.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lln/tensor.h"

namespace lln {

class Faults {
 public:
  void add(std::string text) { texts_.push_back(std::move(text)); }
  std::size_t count() const noexcept { return texts_.size(); }
  // "CALL: 2 faults in SUBJECT: ...; ..." as an invalid_argument, where there are any.
  void throw_any(const std::string& call, const std::string& subject) const;

  // Given, of this shape, dtype and device, with readable memory and contiguous channels.
  void tensor(const char* name, const ConstView& view, const Shape& shape, DType dtype,
              Device device);
  // A tensor that is written: no two elements share memory.
  void output(const char* name, const View& view, const Shape& shape, DType dtype, Device device);
  // alpha or beta: [sequences or 1, heads or 1, 1, 1], finite. Not called where it is not given.
  void parameter(const char* name, const ConstView& view, std::int64_t sequences,
                 std::int64_t heads, DType dtype, Device device);
  // The next two are asked only about what is given.
  void lengths(const char* name, const IndexView& lengths, std::int64_t batch, std::int64_t tokens);
  void mask(const char* name, const MaskView& mask, std::int64_t batch, std::int64_t tokens);
  // Cumulative lengths of packed sequences; true when they are right.
  bool cumulative(const char* name, const IndexView& cu, std::int64_t tokens);

 private:
  std::vector<std::string> texts_;
};

}  // namespace lln
