// The padded family on the host: which kernel takes a padded problem, which tensors of a call are
// copied, and where to. Columns of v, g and o that are zeros change nothing. Channels of q and k
// do: in LLN 2^0 is a weight as good as others, and Diag divides by the root of their number. So
// the kernels are told how many are padding (Call::padding), and give those the weight 0.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/padded.h"

#include <algorithm>

#include "cuda/padded_copy.h"
#include "cuda/scale_gradients.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

constexpr const char* kName = "cuda-padded";

std::int64_t padded(std::int64_t channels) { return (channels + 7) / 8 * 8; }

Problem padded(Problem p) {
  p.dim = padded(p.dim);
  p.dim_v = padded(p.dim_v);
  return p;
}

std::string kernel_refusal(const Kernel& kernel, const Problem& p) {
  if (p.is_piece() && !kernel.takes_pieces) return "takes no pieces of a sequence";
  return kernel.refusal(p);
}

// The first kernel that takes a padded problem, of those before this family: they are all for
// tensor cores. Null where none does; then `refusals` is what they say.
const Kernel* kernel_for(const Problem& p, std::string* refusals = nullptr) {
  for (const Kernel& kernel : kernels(p.op)) {
    if (kernel.name == kName) break;
    if (kernel.device != DeviceKind::cuda) continue;
    const std::string why = kernel_refusal(kernel, p);
    if (why.empty()) return &kernel;
    if (refusals != nullptr) {
      *refusals += (refusals->empty() ? "" : "; ") + kernel.name + " " + why;
    }
  }
  return nullptr;
}

std::string refusal(const Problem& p) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (p.dim % 8 == 0 && p.dim_v % 8 == 0) {
    return "is for dim or dim_v that is no multiple of 8";
  }
  std::string refusals;
  const Problem whole = padded(p);
  if (kernel_for(whole, &refusals) != nullptr) return "";
  return "no kernel takes " + to_string(whole) + ": " + refusals;
}

bool is_for_plain(const Call& call) { return wants_scales(call) && !has_scales(call.problem); }

// A call on padded tensors in scratch memory, and the copies before and after it.
class PaddedCall {
 public:
  PaddedCall(const Call& call, std::byte* base) : call_(call), layout_(base) {
    const Problem& p = call.problem;
    call_.problem = padded(p);
    call_.padding = call_.problem.dim - p.dim;
    AttentionInputs& in = call_.in;
    AttentionGradients& grads = call_.grads;
    pad_rows(in.q, call_.problem.dim, kBefore);
    pad_rows(in.k, call_.problem.dim, kBefore);
    pad_rows(in.v, call_.problem.dim_v, kBefore);
    pad_rows(call_.out.o, call_.problem.dim_v, kAfter);
    pad_rows(grads.g, call_.problem.dim_v, kBefore);
    pad_rows(grads.dq, call_.problem.dim, kAfter);
    pad_rows(grads.dk, call_.problem.dim, kAfter);
    pad_rows(grads.dv, call_.problem.dim_v, kAfter);
    for (ConstView* weight : {&in.mix, &in.lln_weight, &in.diag_weight}) {
      pad_weight(*weight, kBefore);
    }
    for (View* weight : {&grads.dmix, &grads.dlln_weight, &grads.ddiag_weight}) {
      pad_weight(*weight, kAfter);
    }
    pad_state(in.state, kBefore);
    pad_state(call_.out.saved, kAfter);
    pad_state(grads.saved, kBefore);
    pad_state(grads.dsaved, kBefore);
    pad_state(grads.dstate, kAfter);
    call_.workspace = layout_.take<std::byte>(0);
  }

  const Call& call() const { return call_; }
  std::size_t bytes() const { return layout_.bytes(); }
  void copy_inputs() const { before_.launch("pad_rows", stream()); }
  void copy_results() const { after_.launch("unpad_rows", stream()); }

 private:
  enum When { kBefore, kAfter };

  cudaStream_t stream() const { return static_cast<cudaStream_t>(call_.stream); }

  // The view becomes one of scratch memory of this shape, which is copied to or from what it was.
  template <class AnyView>
  void pad(AnyView& view, std::int64_t rows, std::int64_t channels, When when) {
    View padded;
    padded.dtype = view.dtype;
    padded.device = view.device;
    padded.shape = {view.shape[0], view.shape[1], rows, channels};
    padded.stride = contiguous_stride(padded.shape);
    const std::int64_t bytes = padded.shape[0] * padded.shape[1] * rows * channels *
                               static_cast<std::int64_t>(size_of(view.dtype));
    padded.data = layout_.take<std::byte>(bytes);
    if constexpr (std::is_same_v<AnyView, View>) {
      if (when == kAfter) {
        after_.add(view, padded);
        // Kernels write no row of sequences whose cumulative lengths are wrong.
        if (call_.problem.packed) before_.add(padded, {});
      }
    }
    if (when == kBefore) before_.add(padded, view);
    view = padded;
  }

  template <class AnyView>
  void pad_rows(AnyView& view, std::int64_t channels, When when) {
    if (!view.given() || (view.shape[3] == channels && has_whole_pieces(view))) return;
    pad(view, view.shape[2], channels, when);
  }

  // A weight of each channel of v: kernels read those of the padding, too.
  template <class AnyView>
  void pad_weight(AnyView& view, When when) {
    const std::int64_t channels = call_.problem.dim_v;
    if (!view.given() || view.shape[3] == 1 || view.shape[3] == channels) return;
    pad(view, view.shape[2], channels, when);
    for (int i = 0; i < 3; ++i) view.stride[i] = view.shape[i] == 1 ? 0 : view.stride[i];
  }

  template <class State>
  void pad_state(State& state, When when) {
    if (!state.key_lse.given()) return;
    pad(state.key_lse, 1, call_.problem.dim, when);
    pad(state.channel_values, call_.problem.dim, call_.problem.dim_v, when);
  }

  Call call_;
  Layout layout_;
  RowCopies before_, after_;
};

// Scratch memory of the copies that any call of a problem needs.
std::size_t copy_bytes(const Problem& p) {
  const Problem whole = padded(p);
  const auto element = static_cast<std::int64_t>(size_of(p.dtype));
  Layout layout(nullptr);
  const auto take = [&](std::int64_t rows, std::int64_t channels, std::int64_t size) {
    layout.take<std::byte>(rows * channels * size);
  };
  const bool backward = p.op == Op::backward;
  const std::int64_t rows = p.batch * p.heads * p.tokens, keys = p.batch * p.heads_k * p.tokens_k;
  for (int i = 0; i < (backward ? 2 : 1); ++i) {  // gradients are as long as what they are of
    take(rows, whole.dim, element);
    take(keys, whole.dim, element);
    take(keys, whole.dim_v, element);
  }
  take(rows, whole.dim_v, element);  // o or g
  if (p.has_lln()) {
    const std::int64_t states = p.sequences * p.heads_k;
    // One that is saved; of pieces one that is given, and the gradients of both.
    for (int i = 0; i < (!p.is_piece() ? 1 : backward ? 4 : 2); ++i) {
      take(states, whole.dim, sizeof(float));
      take(states, whole.dim * whole.dim_v, sizeof(float));
    }
  }
  if (p.kind == Kind::lln_diag) {
    for (int i = 0; i < (backward ? 4 : 2); ++i) take(p.heads, whole.dim_v, sizeof(float));
  }
  return layout.bytes();
}

std::size_t bytes(const Problem& p, int workers) {
  const Problem whole = padded(p);
  const std::size_t own = copy_bytes(p) + kernel_for(whole)->workspace_bytes(whole, workers);
  const bool scales = p.op == Op::backward && p.has_lln();
  return std::max(scales && has_scales(p) ? bytes_with_scales(p, own, workers) : own,
                  plain_kernel(p.op).workspace_bytes(p, workers));
}

std::size_t call_bytes(const Call& call, int workers) {
  const Problem& p = call.problem;
  if (is_for_plain(call)) return plain_kernel(p.op).workspace_bytes(p, workers);
  // Addresses are looked at, not what is there; those of scratch memory are multiples of 256.
  const PaddedCall whole(without_scales(call), nullptr);
  const std::size_t own =
      whole.bytes() + kernel_for(whole.call().problem)->bytes_of_call(whole.call(), workers);
  return wants_scales(call) ? bytes_with_scales(p, own, workers) : own;
}

void run(const Call& call) {
  if (is_for_plain(call)) return plain_kernel(call.problem.op).run(call);
  // Sums over the tensors as they are; those of the gradients of weights are over the copies.
  if (wants_scales(call)) return run_with_scales(call, run);
  const PaddedCall whole(call, call.workspace);
  whole.copy_inputs();
  kernel_for(whole.call().problem)->run(whole.call());
  whole.copy_results();
}

}  // namespace

std::vector<Kernel> padded_forward_kernels() {
  return {{kName, refusal, bytes, run, DeviceKind::cuda, /*takes_pieces=*/true, call_bytes}};
}
std::vector<Kernel> padded_backward_kernels() { return padded_forward_kernels(); }

}  // namespace lln::cuda
