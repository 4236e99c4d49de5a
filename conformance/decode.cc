// Pieces of a case, and what they are held against.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/decode.h"

#include <algorithm>
#include <array>

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

// Whether a kernel for appends takes a piece of so many tokens: some are for long ones alone.
bool takes(Problem p, std::int64_t tokens, std::string_view kernel) {
  p.op = tokens == 1 ? Op::step : Op::append;
  p.tokens = p.tokens_k = tokens;
  const Explanation found = explain(p);
  return std::ranges::any_of(found.candidates, [&](const Explanation::Candidate& candidate) {
    return candidate.kernel == kernel && candidate.refusal.empty();
  });
}

}  // namespace

OwnedState::OwnedState(const DecodeConfig& config, Device device, void* stream)
    : bytes_(decode_state_bytes(config, device)) {
  if (device.kind == DeviceKind::cpu) {
    memory_.reset(new (std::align_val_t{64}) std::byte[bytes_]);
    std::fill_n(memory_.get(), bytes_, std::byte{0xFF});
  } else {
    device_memory_.emplace(device, bytes_);
  }
  state_ = std::make_unique<DecodeState>(config, device_memory_ ? device_memory_->span() : memory(),
                                         device, stream);
}

void OwnedState::check_guards() const {
  if (!device_memory_ || device_memory_->guards_untouched()) return;
  throw Error(ErrorCode::internal, "a kernel wrote before or behind the memory of a state");
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
  OwnedState state(decode_config(c), device, exec.stream);
  std::vector<std::int32_t> lengths;
  std::optional<DeviceMemory> device_lengths;
  AttentionInputs all = views.in;
  all.key_lengths = in.views().key_lengths;
  std::int64_t begin = 0;
  for (std::size_t i = 0; begin < c.problem.tokens; ++i) {
    const std::int64_t count = std::min(kPieces[i % kPieces.size()], c.problem.tokens - begin);
    AttentionInputs piece = token_range(all, begin, count, lengths);
    if (piece.key_lengths.given() && device.kind != DeviceKind::cpu) {
      if (!device_lengths) device_lengths.emplace(device, 4 * lengths.size());
      device_lengths->write(std::as_bytes(std::span(lengths)));
      piece.key_lengths = on(device, piece.key_lengths);
      piece.key_lengths.data = device_lengths->data();
    }
    const View rows = token_range(views.out.o, begin, count);
    Exec own = exec;
    if (!takes(c.problem, count, exec.kernel)) own.kernel = {};
    if (count == 1) {
      state->step(piece, rows, own);
    } else {
      state->append(piece, rows, own);
    }
    begin += count;
  }
  state.check_guards();
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
