// Pieces of a case, and what they are held against.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/decode.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>

#include "lln/error.h"

namespace lln::conformance {
namespace {

// Steps, short pieces, and pieces that begin and end anywhere in a diagonal block.
constexpr std::array<std::int64_t, 9> kPieces = {5, 1, 40, 1, 1, 100, 17, 3, 300};

template <class AnyView>
AnyView rows_from(AnyView view, std::int64_t begin, std::int64_t count) {
  if (!view.given() || view.data == nullptr) return view;
  using Byte = std::conditional_t<std::is_same_v<AnyView, View>, std::byte, const std::byte>;
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  view.data = static_cast<Byte*>(view.data) + begin * view.stride[2] * size;
  view.shape[2] = count;
  return view;
}

}  // namespace

OwnedState::OwnedState(const DecodeConfig& config)
    : bytes_(decode_state_bytes(config)), memory_(new (std::align_val_t{64}) std::byte[bytes_]) {
  std::fill_n(memory_.get(), bytes_, std::byte{0xFF});
  state_ = std::make_unique<DecodeState>(config, memory());
}

DecodeConfig decode_config(const Problem& p, const AttentionOptions& o) {
  return {.batch = p.batch,
          .heads = p.heads,
          .heads_k = p.heads_k,
          .dim = p.dim,
          .dim_v = p.dim_v,
          .kind = p.kind,
          .diag_block = o.diag_block,
          .feature = o.feature,
          .power = o.power,
          .mix = o.mix};
}

DecodeConfig decode_config(const Case& c) { return decode_config(c.problem, options(c)); }

AttentionInputs token_range(const AttentionInputs& in, std::int64_t begin, std::int64_t count,
                            std::vector<std::int32_t>& lengths) {
  AttentionInputs piece = in;
  const std::int64_t tokens = in.q.shape[2];
  for (ConstView* view : {&piece.q, &piece.k, &piece.v}) *view = rows_from(*view, begin, count);
  for (ConstView* view : {&piece.mix, &piece.lln_weight, &piece.diag_weight}) {
    if (view->shape[2] == tokens && view->shape[3] == 1) *view = rows_from(*view, begin, count);
  }
  if (in.key_lengths.given()) {
    lengths.clear();
    for (std::int64_t b = 0; b < in.key_lengths.count; ++b) {
      lengths.push_back(
          static_cast<std::int32_t>(std::clamp<std::int64_t>(in.key_lengths[b] - begin, 0, count)));
    }
    piece.key_lengths = IndexView(std::span<const std::int32_t>(lengths));
  }
  return piece;
}

View token_range(const View& o, std::int64_t begin, std::int64_t count) {
  return rows_from(o, begin, count);
}

void decode_all(const Case& c, const Inputs& in, const CaseViews& views, const Exec& exec) {
  const Device device = c.problem.device;
  const bool on_host = device.kind == DeviceKind::cpu;
  std::optional<OwnedState> owned;
  std::optional<DeviceMemory> memory;
  std::optional<DecodeState> state;
  if (on_host) {
    owned.emplace(decode_config(c));
  } else {
    memory.emplace(device, decode_state_bytes(decode_config(c), device));
    state.emplace(decode_config(c), memory->span(), device);
  }
  DecodeState& decoder = on_host ? **owned : *state;
  AttentionInputs all = views.in;
  all.key_lengths = in.views().key_lengths;  // read here, piece by piece
  std::vector<std::int32_t> lengths;
  std::deque<DeviceMemory> device_lengths;
  std::int64_t begin = 0;
  for (std::size_t i = 0; begin < c.problem.tokens; ++i) {
    const std::int64_t count = std::min(kPieces[i % kPieces.size()], c.problem.tokens - begin);
    AttentionInputs piece = token_range(all, begin, count, lengths);
    if (!on_host && piece.key_lengths.given()) {
      const auto bytes = std::as_bytes(std::span(lengths));
      DeviceMemory& copy = device_lengths.emplace_back(device, bytes.size());
      copy.write(bytes);
      piece.key_lengths.data = copy.data();
      piece.key_lengths.device = device;
    }
    const View rows = token_range(views.out.o, begin, count);
    if (count == 1) {
      decoder.step(piece, rows, exec);
    } else {
      decoder.append(piece, rows, exec);
    }
    begin += count;
  }
  if (memory && !memory->guards_untouched()) {
    throw Error(ErrorCode::internal, "decoding wrote before or behind the memory of its state");
  }
}

Case causal_case(const Case& c) {
  Case causal = c;
  causal.problem.op = Op::forward;
  causal.problem.causal = true;
  return causal;
}

void zero_rows_past_lengths(const Inputs& in, Tensor& o) {
  if (in.key_lengths.empty()) return;
  o.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t channel) {
    if (n >= in.key_lengths[static_cast<std::size_t>(b)]) o.set(b, h, n, channel, 0);
  });
}

}  // namespace lln::conformance
