// FNet: the real part of the Fourier transform over channels and tokens; nothing is learned. A
// padded sequence is transformed at its own length (Bluestein's algorithm, where the length is a
// number in the phases and not a shape), so padding does not move the frequencies.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <numbers>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// exp(-i pi j^2 / n) for j < tokens and n of each sequence: complex [batch, tokens]. Phases are
// reduced in integers: j^2 / n loses its fraction in f32.
Tensor fnet_chirp(const Tensor& counts, std::int64_t tokens, const Tensor& like) {
  const Tensor j = at::arange(tokens, counts.options());
  const Tensor phase = (j * j).remainder(2 * counts).to(at::kDouble) / counts.to(at::kDouble);
  const Tensor angle = (-std::numbers::pi * phase).to(like.scalar_type());
  return at::complex(angle.cos(), angle.sin());
}

// sum over j < n of x_j exp(-2 pi i j m / n) for rows m < n; x complex [batch, tokens, dim] is zero
// from n on. 2 j m = j^2 + m^2 - (m - j)^2 makes it a convolution with the chirp.
Tensor fnet_transform(const Tensor& x, const Tensor& counts) {
  const std::int64_t tokens = x.size(1);
  const auto length = static_cast<std::int64_t>(
      std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(2 * tokens - 1, 1))));
  const Tensor chirp = fnet_chirp(counts, tokens, at::real(x));
  const Tensor back = chirp.conj().resolve_conj();
  const Tensor gap = at::zeros({chirp.size(0), length - 2 * tokens + 1}, chirp.options());
  const Tensor around = at::cat({back, gap, back.narrow(1, 1, tokens - 1).flip(1)}, 1);
  const Tensor product = at::fft_fft(x * chirp.unsqueeze(-1), length, 1) *
                         at::fft_fft(around, length, 1).unsqueeze(-1);
  return at::fft_ifft(product, length, 1).narrow(1, 0, tokens) * chirp.unsqueeze(-1);
}

class FnetAttention : public Attention {
 public:
  FnetAttention(const AttentionConfig& config, const Settings& options)
      : config_(config),
        orthonormal_(options.choice("norm", "none", {"none", "ortho"}) == "ortho") {}

  Tensor forward(const Tensor& x, const Tensor& key_mask, Context& context) override {
    if (x.size(1) == 0) return at::zeros_like(x);
    if (context.observer != nullptr) {
      context.observer->observe(
          {.layer = config_.layer, .name = config_.name, .key_mask = key_mask});
    }
    const WithoutAutocast exact;
    const Tensor tokens = at_least_f32(x);
    return (key_mask.defined() ? padded(tokens, key_mask) : whole(tokens)).to(x.scalar_type());
  }

 private:
  Tensor whole(const Tensor& x) const {
    const Tensor y = at::real(at::fft_fft(at::fft_fft(x), {}, 1));
    return orthonormal_ ? y / std::sqrt(static_cast<double>(x.size(1) * x.size(2))) : y;
  }

  Tensor padded(const Tensor& x, const Tensor& key_mask) const {
    // Tokens that count first, in their order: the transform knows no other place of theirs.
    const Tensor order = std::get<1>(key_mask.to(at::kInt).sort(true, 1, true));
    const auto wide = [&](const Tensor& places) { return places.unsqueeze(-1).expand_as(x); };
    const Tensor counts = token_counts(key_mask, x, x.size(1)).clamp_min(1);
    const Tensor counted = x.masked_fill(key_mask.logical_not().unsqueeze(-1), 0);
    const Tensor front = counted.gather(1, wide(order));
    Tensor y = at::real(fnet_transform(at::fft_fft(front), counts));
    if (orthonormal_) y = y / (counts * x.size(2)).to(x.scalar_type()).sqrt().unsqueeze(-1);
    return y.gather(1, wide(order.argsort(1, false)));
  }

  AttentionConfig config_;
  bool orthonormal_;
};

std::shared_ptr<Attention> make_fnet(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<FnetAttention>(config, options);
}

}  // namespace

ZooEntry fnet_entry() {
  return {.name = "fnet",
          .summary = "Re FFT over tokens and channels of x; norm = none or ortho; no q, k, v",
          .cost = "time N dim log(N dim), memory N dim",
          .parameters = "none, and no projections",
          .padding = "left out: each sequence is transformed at the number of tokens that count",
          .causal = false,
          .takes_diag = false,
          .make = make_fnet};
}

}  // namespace lln_torch
