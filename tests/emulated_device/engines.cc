// Operands as the tensor core finds them in shared memory, and boxes as the copy engine lays them
// down.
// SPDX-License-Identifier: Apache-2.0
#include "engines.h"

#include <algorithm>
#include <cstring>

#include "math/half.h"
#include "tensor_core.h"

namespace emulated {
namespace {

constexpr std::uint32_t kRows = 16;   // of a warp's part of a product
constexpr std::uint32_t kRow = 128;   // bytes of a row of a tile
constexpr std::uint32_t kPiece = 16;  // bytes that stay together

// 16-byte pieces of rows of 128 bytes lie where their number, XOR that of the row in eight, says.
std::uint32_t permuted(std::uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// Where number `outer` (row of a, column of b), `k` of an operand lies in shared memory.
const unsigned char* operand_place(std::uint64_t descriptor, bool transposed, std::uint32_t outer,
                                   std::uint32_t k) {
  const auto field = [&](int bit) {
    return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFF) << 4;
  };
  const std::uint32_t start = field(0), leading = field(16), stride = field(32);
  std::uint32_t address = start;
  if (descriptor >> 62 == 1) {
    address += transposed ? outer / 64 * leading + k / 8 * stride + k % 8 * kRow + outer % 64 * 2
                          : outer / 8 * stride + outer % 8 * kRow + k * 2;
    address = permuted(address);
  } else {
    if (transposed)
      fault("a product with an operand by columns that is not permuted: not emulated");
    address += outer / 8 * stride + k / 8 * leading + outer % 8 * 16 + k % 8 * 2;
  }
  return at_address(address);
}
float operand_at(std::uint64_t descriptor, bool transposed, std::uint32_t outer, std::uint32_t k) {
  std::uint16_t bits;
  std::memcpy(&bits, operand_place(descriptor, transposed, outer, k), sizeof bits);
  return lln::f32_from_bf16(bits);
}

// What a warp's part of a product reads, when it is begun: 16 bytes are eight of the sum, or eight
// rows or columns.
void touch_operands(const Product& product, std::uint32_t warp, std::size_t index) {
  const Access access{Actor::product, false, static_cast<std::uint32_t>(index + 1)};
  const auto touch_operand = [&](std::uint64_t descriptor, bool transposed, std::uint32_t first,
                                 std::uint32_t count) {
    for (std::uint32_t outer = 0; outer < count; outer += transposed ? 8 : 1) {
      for (std::uint32_t k = 0; k < kProductDepth; k += transposed ? 1 : 8) {
        touch(operand_place(descriptor, transposed, first + outer, k), 16, access);
      }
    }
  };
  if (!product.a_in_registers) {
    touch_operand(product.a, product.a_transposed, warp * kRows, kRows);
  }
  touch_operand(product.b, product.b_transposed, 0, product.columns);
}

// `warp`: of the four of a group, which have 16 rows each.
void multiply(const Product& product, std::uint32_t warp) {
  float a[kRows][kProductDepth];
  if (product.a_in_registers) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      for (std::size_t i = 0; i < 4; ++i) {
        for (std::size_t half = 0; half < 2; ++half) {
          a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] =
              lln::f32_from_bf16(static_cast<std::uint16_t>(product.words[lane][i] >> 16 * half));
        }
      }
    }
  } else {
    for (std::uint32_t row = 0; row < kRows; ++row) {
      for (std::uint32_t k = 0; k < kProductDepth; ++k) {
        a[row][k] = operand_at(product.a, product.a_transposed, warp * kRows + row, k);
      }
    }
  }
  for (std::uint32_t first = 0; first < product.columns; first += kProductColumns) {
    float b[kProductDepth][kProductColumns];
    for (std::uint32_t k = 0; k < kProductDepth; ++k) {
      for (std::uint32_t column = 0; column < kProductColumns; ++column) {
        b[k][column] = operand_at(product.b, product.b_transposed, first + column, k);
      }
    }
    for (std::uint32_t row = 0; row < kRows; ++row) {
      const auto place = [&](std::uint32_t column) -> float& {
        return product.results[row % 8 * 4 + column / 2][first / 2 + row / 8 * 2 + column % 2];
      };
      float sums[kProductColumns];
      for (std::uint32_t i = 0; i < kProductColumns; ++i) {
        sums[i] = product.accumulate ? place(i) : 0;
      }
      add_products(sums, a[row], b);
      for (std::uint32_t i = 0; i < kProductColumns; ++i) place(i) = sums[i];
    }
  }
}

// Calls copy(where in device memory, where in shared memory) for every piece of 16 bytes of the
// box; null where it is outside of the tensor.
template <class Copy>
void for_each_piece(const CUtensorMap& map, const Corner& corner, std::uint32_t shared,
                    const Copy& copy) {
  for (std::uint32_t row = 0; row < map.box[1]; ++row) {
    for (std::uint32_t column = 0; column < map.box[0]; column += kPiece / 2) {
      const std::int64_t at[4] = {corner[0] + std::int64_t{column}, corner[1] + std::int64_t{row},
                                  corner[2], corner[3]};
      bool inside = true;
      unsigned char* element = map.data;
      for (int i = 0; i < 4; ++i) {
        inside = inside && at[i] >= 0 && at[i] < static_cast<std::int64_t>(map.sizes[i]);
        element += at[i] * static_cast<std::int64_t>(map.strides[i]);
      }
      copy(inside ? element : nullptr, at_address(permuted(shared + row * kRow + column * 2)));
    }
  }
}

void settle_phase(ByteBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  end_phase(phases_of(&barrier));
  barrier.parity ^= 1;
  barrier.pending = barrier.expected;
  moved();
}

}  // namespace

void begin_product(float* results, std::size_t columns, std::uint64_t a, const std::uint32_t* words,
                   bool a_transposed, std::uint64_t b, bool b_transposed, bool accumulate) {
  Warp& warp = *current->warp;
  const std::size_t index = current->products++;
  if (warp.products.size() == index) {
    Product& product = warp.products.emplace_back();
    product.columns = static_cast<unsigned>(columns);
    product.a_transposed = a_transposed;
    product.b_transposed = b_transposed;
    product.accumulate = accumulate;
    product.a_in_registers = words != nullptr;
    product.a = a;
    product.b = b;
    const std::uint32_t of_group = current->index / kLanes % 4;
    begin({[&warp, index] {
             return warp.products_done == index && warp.products[index].threads == kLanes;
           },
           [&warp, index, of_group] {
             multiply(warp.products[index], of_group);
             ++warp.products_done;
           }});
  }
  Product& product = warp.products[index];
  if (product.columns != columns || product.a != a || product.b != b ||
      product.accumulate != accumulate) {
    fault("lanes of a warp begin different products");
  }
  product.results[current->lane] = results;
  if (words != nullptr) std::memcpy(product.words[current->lane].data(), words, 16);
  product.meetings = static_cast<std::uint32_t>(warp.meetings);
  if (++product.threads == kLanes) touch_operands(product, current->index / kLanes % 4, index);
}

void commit_products() { current->product_groups.push_back(current->products); }

void wait_products(std::size_t pending_groups) {
  const auto& groups = current->product_groups;
  if (groups.size() <= pending_groups) return;
  const std::size_t until = groups[groups.size() - 1 - pending_groups];
  current->products_awaited = until;
  // A product has ended when all four warps of the group have done theirs.
  Warp* const first = current->warp - current->index / kLanes % 4;
  wait_until("products", [&] {
    return std::all_of(first, first + 4,
                       [&](const Warp& warp) { return warp.products_done >= until; });
  });
  current->clock.products = static_cast<std::uint32_t>(until);
  for (unsigned i = 0; i < 4 && until > 0; ++i) {
    current->clock.lanes[i] = first[i].products[until - 1].meetings;
  }
}

void barrier_init(ByteBarrier& barrier, unsigned arrivals) {
  barrier = {static_cast<std::uint16_t>(arrivals), static_cast<std::uint16_t>(arrivals), 0, 0};
  touch(&barrier, sizeof barrier, {.writes = true});
}

void barrier_arrive(ByteBarrier& barrier, unsigned times, int bytes) {
  if (barrier.pending < times) fault("more arrivals at a barrier than it expects");
  touch(&barrier, sizeof barrier, {});
  phases_of(&barrier).arrived.add(*current);
  barrier.bytes += bytes;
  barrier.pending = static_cast<std::uint16_t>(barrier.pending - times);
  settle_phase(barrier);
}

void barrier_wait(const ByteBarrier& barrier, std::uint32_t parity) {
  touch(&barrier, sizeof barrier, {});
  wait_until("a barrier that counts bytes", [&] { return barrier.parity != parity; });
  learn(*current, phases_of(&barrier).ended);
}

void load_box(void* to, const CUtensorMap& map, const Corner& corner, ByteBarrier& barrier) {
  const std::uint32_t shared = shared_address(to);
  if (shared % 1024 != 0) fault("a box is copied to an address that is no multiple of 1024");
  const PhaseOrder& phases = phases_of(&barrier);
  for_each_piece(map, corner, shared, [&](const unsigned char* from, const unsigned char* in) {
    if (from != nullptr) touch(from, kPiece, {});
    touch(in, kPiece, {Actor::box, true, phases.phase + 1, &phases});
  });
  begin({{}, [=, &barrier] {
           for_each_piece(map, corner, shared, [](const unsigned char* from, unsigned char* in) {
             if (from != nullptr) {
               std::memcpy(in, from, kPiece);
             } else {
               std::memset(in, 0, kPiece);
             }
           });
           barrier.bytes -= static_cast<int>(map.box[0] * map.box[1] * 2);
           settle_phase(barrier);
         }});
}

void store_box(const CUtensorMap& map, const void* from, const Corner& corner) {
  const std::uint32_t shared = shared_address(from);
  if (shared % 1024 != 0) fault("a box is copied from an address that is no multiple of 1024");
  Groups& stores = current->stores;
  for_each_piece(map, corner, shared, [&](const unsigned char* to, const unsigned char* out) {
    if (to == nullptr) return;
    touch(out, kPiece, {Actor::store, false, stores.open()});
    touch(to, kPiece, {Actor::store, true, ~std::uint32_t{0}});  // nobody waits for its end
  });
  stores.begin_one();
  begin({{}, [=, ended = stores.end_one()] {
           for_each_piece(map, corner, shared, [](unsigned char* to, const unsigned char* out) {
             if (to != nullptr) std::memcpy(to, out, kPiece);
           });
           ended();
         }});
}

void commit_stores() { current->stores.commit(); }

void wait_stores_read(std::size_t pending_groups) {
  const Groups& stores = current->stores;
  wait_until("copies out of shared memory", [&] { return stores.ended_but(pending_groups); });
  current->clock.stores = stores.before(pending_groups);
}

}  // namespace emulated
