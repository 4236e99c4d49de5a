// Rules for views, lengths and masks; each adds a text with what was found and what was expected.
// SPDX-License-Identifier: Apache-2.0
#include "api/faults.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "api/kernel.h"
#include "lln/error.h"

namespace lln {
namespace {

bool is_empty(const Shape& shape) {
  return std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size <= 0; });
}

// Lists of numbers report their first few bad entries and how many more there are.
class Entries {
 public:
  explicit Entries(Faults& faults) : faults_(faults) {}
  void add(std::string text) {
    if (++bad_ > kShown) text = fmt::format("and {} more such entries", bad_ - kShown);
    if (bad_ > kShown + 1) {
      faults_.replace_last(std::move(text));
    } else {
      faults_.add(std::move(text));
    }
  }
  bool any() const { return bad_ > 0; }

 private:
  static constexpr std::int64_t kShown = 4;
  Faults& faults_;
  std::int64_t bad_ = 0;
};

}  // namespace

void Faults::throw_any(const std::string& call, const std::string& subject) const {
  if (texts_.empty()) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: {} fault{} in {}: {}", call, texts_.size(),
                          texts_.size() == 1 ? "" : "s", subject, fmt::join(texts_, "; ")));
}

void Faults::on_device(const char* name, Device found, Device expected) {
  if (found == expected) return;
  add(fmt::format("{} is on {}: expected {}", name, to_string(found), to_string(expected)));
}

bool Faults::tensor(const char* name, const ConstView& view, const Shape& shape, DType dtype,
                    Device device) {
  const std::size_t before = count();
  if (!view.given()) {
    add(fmt::format("{} is not given: expected {} of shape {}", name, to_string(dtype),
                    to_string(shape)));
    return false;
  }
  if (view.shape != shape) {
    add(fmt::format("{} has shape {}: expected {}", name, to_string(view.shape), to_string(shape)));
  }
  if (view.dtype != dtype) {
    add(fmt::format("{} is {}: expected {}", name, to_string(view.dtype), to_string(dtype)));
  }
  on_device(name, view.device, device);
  if (is_empty(view.shape)) return count() == before;
  if (view.data == nullptr) add(fmt::format("{} has elements but its data is null", name));
  if (view.shape[3] > 1 && view.stride[3] != 1) {
    add(fmt::format("{} has stride {} between channels: expected 1", name, view.stride[3]));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    add(fmt::format("{} starts at an address that is not a multiple of {} bytes", name,
                    size_of(view.dtype)));
  }
  return count() == before;
}

void Faults::input(const char* name, const ConstView& view, const Shape& shape, DType dtype,
                   Device device) {
  tensor(name, view, shape, dtype, device);
  if (!is_empty(view.shape)) placed_.emplace_back(name, view.data);
}

void Faults::output(const char* name, const View& view, const Shape& shape, DType dtype,
                    Device device) {
  tensor(name, view, shape, dtype, device);
  if (is_empty(view.shape)) return;
  for (int i = 0; i < 4; ++i) {
    if (view.shape[i] > 1 && view.stride[i] == 0) {
      add(fmt::format("{} is written and must not have stride 0 in dimension {} of size {}", name,
                      i, view.shape[i]));
    }
  }
  for (const auto& [other, data] : placed_) {
    if (data == view.data) {
      add(fmt::format("{} and {} start at the same address: outputs must not overlap", name,
                      other));
    }
  }
  placed_.emplace_back(name, view.data);
}

void Faults::parameter(const char* name, const ConstView& view, std::int64_t sequences,
                       std::int64_t heads, DType dtype, Device device) {
  const Shape& s = view.shape;
  if ((s[0] != sequences && s[0] != 1) || (s[1] != heads && s[1] != 1) || s[2] != 1 || s[3] != 1) {
    add(fmt::format("{} has shape {}: expected [{} or 1, {} or 1, 1, 1]", name, to_string(s),
                    sequences, heads));
    return;
  }
  if (tensor(name, view, s, dtype, device)) finite(name, view);
}

void Faults::finite(const char* name, const ConstView& view) {
  if (view.device.kind != DeviceKind::cpu) return;
  Entries entries(*this);
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t n = 0; n < view.shape[2]; ++n) {
        for (std::int64_t c = 0; c < view.shape[3]; ++c) {
          const double value = element(view, b, h, n, c);
          if (std::isfinite(value)) continue;
          entries.add(fmt::format("{}[{}, {}, {}, {}] is {}: expected a finite number", name, b, h,
                                  n, c, value));
        }
      }
    }
  }
}

bool Faults::list(const char* name, const IndexView& list, std::int64_t count, const char* of,
                  Device device) {
  const std::size_t before = texts_.size();
  on_device(name, list.device, device);
  if (list.count != count) {
    add(fmt::format("{} has {} entries: expected one per {}, {}", name, list.count, of, count));
  } else if (list.data == nullptr && count > 0) {
    add(fmt::format("{} has entries but its data is null", name));
  }
  return texts_.size() == before;
}

void Faults::lengths(const char* name, const IndexView& lengths, std::int64_t batch,
                     std::int64_t tokens, Device device) {
  if (!list(name, lengths, batch, "batch element", device)) return;
  if (lengths.device.kind != DeviceKind::cpu) return;  // not to be read from here
  Entries entries(*this);
  for (std::int64_t b = 0; b < lengths.count; ++b) {
    if (lengths[b] < 0 || lengths[b] > tokens) {
      entries.add(fmt::format("{}[{}] is {}: expected 0 to {}", name, b, lengths[b], tokens));
    }
  }
}

void Faults::mask(const char* name, const MaskView& mask, std::int64_t batch, std::int64_t tokens,
                  Device device) {
  on_device(name, mask.device, device);
  if (mask.shape[0] != batch || mask.shape[1] != tokens) {
    add(fmt::format("{} has shape [{}, {}]: expected [{}, {}]", name, mask.shape[0], mask.shape[1],
                    batch, tokens));
  } else if (mask.data == nullptr && mask.shape[0] * mask.shape[1] > 0) {
    add(fmt::format("{} has elements but its data is null", name));
  }
}

bool Faults::cumulative(const char* name, const IndexView& cu, std::int64_t tokens, Device device) {
  if (cu.count < 1) {
    add(fmt::format("{} is empty: expected sequences + 1 entries", name));
    return false;
  }
  on_device(name, cu.device, device);
  if (cu.count == 1 && tokens != 0) {
    add(fmt::format("{} has one entry, which is no sequence: expected more for {} tokens", name,
                    tokens));
    return false;
  }
  if (cu.device.kind != DeviceKind::cpu) return false;  // not to be read from here
  Entries entries(*this);
  const auto bad = [&](std::int64_t s, const std::string& expected) {
    entries.add(fmt::format("{}[{}] is {}: expected {}", name, s, cu[s], expected));
  };
  if (cu[0] != 0) bad(0, "0");
  for (std::int64_t s = 1; s < cu.count; ++s) {
    if (cu[s] < cu[s - 1]) {
      bad(s, fmt::format("at least the entry before it, {}", cu[s - 1]));
    } else if (cu[s] > tokens) {
      bad(s, fmt::format("at most the number of tokens, {}", tokens));
    }
  }
  if (!entries.any() && cu[cu.count - 1] != tokens) {
    bad(cu.count - 1, fmt::format("the number of tokens, {}", tokens));
  }
  return !entries.any();
}

}  // namespace lln
