// Host memory, touched by the threads that use it.
// SPDX-License-Identifier: Apache-2.0
#include "bench/tensor_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "conformance/data.h"
#include "math/half.h"

namespace lln::bench {
namespace {

constexpr std::int64_t kBlock = 100003;

std::vector<float> make_gaussian_block() {
  std::vector<float> block(kBlock);
  for (std::int64_t i = 0; i < kBlock; ++i) {
    block[static_cast<std::size_t>(i)] =
        static_cast<float>(conformance::normal_number(1, static_cast<std::uint64_t>(i)));
  }
  return block;
}

void store(DType dtype, float value, std::byte* at) {
  const double wide = value;
  const std::uint16_t half = dtype == DType::f16 ? f16_from_f32(value) : bf16_from_f32(value);
  const void* from = &half;
  if (dtype == DType::f32) from = &value;
  if (dtype == DType::f64) from = &wide;
  std::memcpy(at, from, size_of(dtype));
}

std::vector<std::byte> stored(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store(dtype, values[i], bytes.data() + i * size_of(dtype));
  }
  return bytes;
}

std::vector<std::byte> gaussian_block(DType dtype) {
  static const std::vector<float> numbers = make_gaussian_block();
  return stored(dtype, numbers);
}

// Calls body(begin, end) for pieces of [0, bytes) on all threads, pages staying whole.
template <class Body>
void for_pieces(Parallel& threads, std::size_t bytes, const Body& body) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  struct Context {
    std::size_t bytes;
    const Body& body;
  } context{bytes, body};
  threads.run(
      static_cast<std::int64_t>((bytes + kPiece - 1) / kPiece),
      [](void* c, std::int64_t piece, int) {
        const auto& [size, call] = *static_cast<const Context*>(c);
        const std::size_t begin = static_cast<std::size_t>(piece) * kPiece;
        call(begin, std::min(begin + kPiece, size));
      },
      &context);
}

}  // namespace

std::size_t bytes_of(DType dtype, const Shape& shape) {
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) {
      throw std::bad_alloc();
    }
  }
  return bytes;
}

View TensorMemory::zeros(DType dtype, const Shape& shape) {
  void* const data = zeros(bytes_of(dtype, shape)).data();
  return on(device(), view(data, dtype, shape));
}

ConstView TensorMemory::numbers(DType dtype, const Shape& shape, std::span<const float> values) {
  const View tensor = zeros(dtype, shape);
  const std::vector<std::byte> bytes = stored(dtype, values);
  write({static_cast<std::byte*>(tensor.data), bytes.size()}, bytes);
  return tensor;
}

IndexView TensorMemory::list(std::span<const std::int64_t> values) {
  const std::span<std::byte> memory = zeros(values.size_bytes());
  write(memory, std::as_bytes(values));
  const auto* const data = reinterpret_cast<const std::int64_t*>(memory.data());
  return on(device(), IndexView(std::span(data, values.size())));
}

std::span<std::byte> HostMemory::zeros(std::size_t bytes) {
  io::Bytes& memory = memory_.emplace_back(bytes);
  for_pieces(threads_, bytes, [&](std::size_t begin, std::size_t end) {
    std::memset(memory.data() + begin, 0, end - begin);
  });
  return {memory.data(), bytes};
}

ConstView HostMemory::gaussian(DType dtype, const Shape& shape) {
  io::Bytes& memory = memory_.emplace_back(bytes_of(dtype, shape));
  const std::vector<std::byte> block = gaussian_block(dtype);
  // Every tensor starts elsewhere in the block.
  const std::size_t shift = memory_.size() * 7919 * size_of(dtype);
  for_pieces(threads_, memory.size(), [&](std::size_t begin, std::size_t end) {
    while (begin < end) {
      const std::size_t at = (begin + shift) % block.size();
      const std::size_t count = std::min(end - begin, block.size() - at);
      std::memcpy(memory.data() + begin, block.data() + at, count);
      begin += count;
    }
  });
  return view(static_cast<const void*>(memory.data()), dtype, shape);
}

void HostMemory::write(std::span<std::byte> to, std::span<const std::byte> from) {
  std::copy(from.begin(), from.end(), to.begin());
}

}  // namespace lln::bench
