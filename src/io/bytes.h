// Owned memory for tensors that are read from or written to files. Aligned to a cache line, so that
// a tensor of any dtype may be viewed in it wherever it lay in the file; never null, because a null
// pointer means "not given" to the library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace lln::io {

class Bytes {
 public:
  Bytes() : Bytes(0) {}
  // Uninitialised; throws std::bad_alloc.
  explicit Bytes(std::size_t size)
      : data_(static_cast<std::byte*>(::operator new[](size == 0 ? 1 : size, kAlignment))),
        size_(size) {}

  std::byte* data() noexcept { return data_.get(); }
  const std::byte* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::span<const std::byte> span() const noexcept { return {data_.get(), size_}; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(std::byte* p) const noexcept { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<std::byte[], Delete> data_;
  std::size_t size_;
};

}  // namespace lln::io
