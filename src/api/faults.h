// The faults of one call, collected so that a single Error names them all, and the rules for views
// that every call shares. Apart from validate.cc, because not only attention is validated.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lln/tensor.h"

namespace lln {

class Faults {
 public:
  void add(std::string text) { texts_.push_back(std::move(text)); }
  void replace_last(std::string text) { texts_.back() = std::move(text); }
  std::size_t count() const noexcept { return texts_.size(); }
  // "CALL: 2 faults in SUBJECT: ...; ..." as an invalid_argument, where there are any.
  void throw_any(const std::string& call, const std::string& subject) const;

  // Given, of this shape, dtype and device, with readable memory and contiguous channels; true when
  // all of that holds.
  bool tensor(const char* name, const ConstView& view, const Shape& shape, DType dtype,
              Device device);
  // A tensor that no output may start at.
  void input(const char* name, const ConstView& view, const Shape& shape, DType dtype,
             Device device);
  // A tensor that is written: no two elements share memory, and it starts where no other does of
  // those seen before.
  void output(const char* name, const View& view, const Shape& shape, DType dtype, Device device);
  // alpha or beta: [sequences or 1, heads or 1, 1, 1], finite. Not called where it is not given.
  void parameter(const char* name, const ConstView& view, std::int64_t sequences,
                 std::int64_t heads, DType dtype, Device device);
  // Every number of a tensor() that is right; read on the CPU only.
  void finite(const char* name, const ConstView& view);
  // The next three are asked only about what is given. Integers, one for each `of`: true when they
  // are there; their values may be any.
  bool list(const char* name, const IndexView& list, std::int64_t count, const char* of,
            Device device);
  void lengths(const char* name, const IndexView& lengths, std::int64_t batch, std::int64_t tokens,
               Device device);
  void mask(const char* name, const MaskView& mask, std::int64_t batch, std::int64_t tokens,
            Device device);
  // Cumulative lengths of packed sequences; true when the numbers are right.
  bool cumulative(const char* name, const IndexView& cu, std::int64_t tokens, Device device);

 private:
  void on_device(const char* name, Device found, Device expected);

  std::vector<std::string> texts_;
  std::vector<std::pair<const char*, const void*>> placed_;  // inputs and outputs seen so far
};

}  // namespace lln
