// Validation of calls. Nothing is written before all rules hold; a kernel may assume them all.
// SPDX-License-Identifier: Apache-2.0
#include "api/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lln/error.h"

namespace lln {
namespace {

bool is_empty(const Shape& shape) {
  return std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size <= 0; });
}

class Checker {
 public:
  Checker(const AttentionInputs& in, const AttentionOptions& options, Op op)
      : in_(in), options_(options) {
    Problem& p = problem_;
    p.op = op;
    p.dtype = in.q.dtype;
    p.device = in.q.device;
    p.batch = in.q.shape[0];
    p.heads = in.q.shape[1];
    p.tokens = in.q.shape[2];
    p.dim = in.q.shape[3];
    p.heads_k = in.k.shape[1];
    p.tokens_k = in.k.shape[2];
    p.dim_v = in.v.shape[3];
    p.kind = options.kind;
    p.diag_block = p.has_diag() ? options.diag_block : 0;
    p.causal = options.causal;
    p.masked = in.key_lengths.given() || in.key_mask.given();
    p.packed = in.cu_seqlens_q.given() || in.cu_seqlens_k.given();
    p.sequences = p.packed ? std::max<std::int64_t>(in.cu_seqlens_q.count - 1, 0) : p.batch;
    p.feature = options.feature;
    if (p.feature == Feature::power) p.power = options.power;
  }

  void check_inputs() {
    const Problem& p = problem_;
    input("q", in_.q, in_.q.shape);
    input("k", in_.k, {p.batch, p.heads_k, p.tokens_k, p.dim});
    input("v", in_.v, {p.batch, p.heads_k, p.tokens_k, p.dim_v});
    for (std::string& fault : problem_faults(p)) faults_.push_back(std::move(fault));
    if (p.has_lln()) {
      parameter("alpha", in_.alpha, p.heads);
      parameter("beta", in_.beta, p.heads_k);
    }
    if (p.kind == Kind::lln_diag) check_weights();
    if (in_.key_lengths.given() && in_.key_mask.given()) {
      fault("key_lengths and key_mask are both given: give one");
    }
    check_key_lengths();
    check_key_mask();
    check_packing();
  }

  // dL/do, shaped like o.
  void gradient_input(const ConstView& g) {
    input("g", g, {problem_.batch, problem_.heads, problem_.tokens, problem_.dim_v});
  }

  void output(const char* name, const View& view, const Shape& shape, DType dtype) {
    tensor(name, view, shape, dtype);
    if (is_empty(view.shape)) return;
    for (int i = 0; i < 4; ++i) {
      if (view.shape[i] > 1 && view.stride[i] == 0) {
        fault(fmt::format("{} is written and must not have stride 0 in dimension {} of size {}",
                          name, i, view.shape[i]));
      }
    }
    for (const auto& [other, data] : placed_) {
      if (data == view.data) {
        fault(fmt::format("{} and {} start at the same address: outputs must not overlap", name,
                          other));
      }
    }
    placed_.emplace_back(name, view.data);
  }

  void saved(const AttentionSaved& saved) {
    const bool any = saved.key_lse.given() || saved.channel_values.given();
    if (!any) return;
    const Problem& p = problem_;
    if (!p.has_lln()) fault("saved belongs to LLN; this kind has no key_lse and channel_values");
    if (!saved.key_lse.given() || !saved.channel_values.given()) {
      fault("saved.key_lse and saved.channel_values go together: one of them is not given");
      return;
    }
    output("saved.key_lse", saved.key_lse, {p.sequences, p.heads_k, 1, p.dim}, parameter_type());
    output("saved.channel_values", saved.channel_values, {p.sequences, p.heads_k, p.dim, p.dim_v},
           parameter_type());
  }

  // A gradient on request: shaped like the input that it belongs to.
  void parameter_gradient(const char* name, const View& gradient, const char* input_name,
                          const ConstView& input_view, bool meaningful) {
    if (!gradient.given()) return;
    if (!meaningful || !input_view.given()) {
      fault(fmt::format("{} is asked for but {} {}", name, input_name,
                        meaningful ? "is not given" : "plays no part in this kind"));
      return;
    }
    output(name, gradient, input_view.shape, parameter_type());
  }

  void fault(std::string text) { faults_.push_back(std::move(text)); }

  const Problem& problem() const { return problem_; }
  DType parameter_type() const { return problem_.dtype == DType::f64 ? DType::f64 : DType::f32; }

  CheckedCall finish() {
    if (!faults_.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("attention_{}: {} fault{} in {}: {}", to_string(problem_.op),
                              faults_.size(), faults_.size() == 1 ? "" : "s", to_string(problem_),
                              fmt::join(faults_, "; ")));
    }
    CheckedCall checked;
    checked.call.problem = problem_;
    checked.call.options = options_;
    checked.call.in = in_;
    for (ConstView* view : {&checked.call.in.alpha, &checked.call.in.beta, &checked.call.in.mix,
                            &checked.call.in.lln_weight, &checked.call.in.diag_weight}) {
      for (int i = 0; i < 4; ++i) {
        if (view->shape[i] == 1) view->stride[i] = 0;
      }
    }
    make_sequences(checked.sequences);
    return checked;
  }

 private:
  void input(const char* name, const ConstView& view, const Shape& shape) {
    tensor(name, view, shape, problem_.dtype);
    if (!is_empty(view.shape)) placed_.emplace_back(name, view.data);
  }

  void on_device(const char* name, Device device) {
    if (device == problem_.device) return;
    fault(fmt::format("{} is on {}: expected {}", name, to_string(device),
                      to_string(problem_.device)));
  }

  // Lists of numbers report their first few bad entries and how many more there are.
  class Entries {
   public:
    explicit Entries(Checker& checker) : checker_(checker) {}
    ~Entries() {
      if (bad_ > kShown) checker_.fault(fmt::format("and {} more such entries", bad_ - kShown));
    }
    Entries(const Entries&) = delete;
    Entries& operator=(const Entries&) = delete;
    void add(std::string text) {
      if (++bad_ <= kShown) checker_.fault(std::move(text));
    }
    bool any() const { return bad_ > 0; }

   private:
    static constexpr std::int64_t kShown = 4;
    Checker& checker_;
    std::int64_t bad_ = 0;
  };

  void tensor(const char* name, const ConstView& view, const Shape& shape, DType dtype) {
    if (!view.given()) {
      fault(fmt::format("{} is not given: expected {} of shape {}", name, to_string(dtype),
                        to_string(shape)));
      return;
    }
    if (view.shape != shape) {
      fault(fmt::format("{} has shape {}: expected {}", name, to_string(view.shape),
                        to_string(shape)));
    }
    if (view.dtype != dtype) {
      fault(fmt::format("{} is {}: expected {}", name, to_string(view.dtype), to_string(dtype)));
    }
    on_device(name, view.device);
    if (is_empty(view.shape)) return;
    if (view.data == nullptr) fault(fmt::format("{} has elements but its data is null", name));
    if (view.shape[3] > 1 && view.stride[3] != 1) {
      fault(fmt::format("{} has stride {} between channels: expected 1", name, view.stride[3]));
    }
    if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
      fault(fmt::format("{} starts at an address that is not a multiple of {} bytes", name,
                        size_of(view.dtype)));
    }
  }

  // alpha and beta: [sequences or 1, heads or 1, 1, 1], finite.
  void parameter(const char* name, const ConstView& view, std::int64_t heads) {
    const std::int64_t sequences = problem_.sequences;
    if (!view.given()) {
      fault(fmt::format("{} is not given: LLN needs it, {} of shape [{} or 1, {} or 1, 1, 1]", name,
                        to_string(parameter_type()), sequences, heads));
      return;
    }
    const Shape& s = view.shape;
    if ((s[0] != sequences && s[0] != 1) || (s[1] != heads && s[1] != 1) || s[2] != 1 ||
        s[3] != 1) {
      fault(fmt::format("{} has shape {}: expected [{} or 1, {} or 1, 1, 1]", name, to_string(s),
                        sequences, heads));
      return;
    }
    if (parameter_memory(name, view)) finite(name, view);
  }

  void finite(const char* name, const ConstView& view) {
    Entries entries(*this);
    for (std::int64_t b = 0; b < view.shape[0]; ++b) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        for (std::int64_t n = 0; n < view.shape[2]; ++n) {
          for (std::int64_t c = 0; c < view.shape[3]; ++c) {
            const double value = element(view, b, h, n, c);
            if (std::isfinite(value)) continue;
            entries.add(fmt::format("{}[{}, {}, {}, {}] is {}: expected a finite number", name, b,
                                    h, n, c, value));
          }
        }
      }
    }
  }

  // dtype, device and address of an alpha, beta or weight tensor whose shape is right.
  bool parameter_memory(const char* name, const ConstView& view) {
    const std::size_t before = faults_.size();
    tensor(name, view, view.shape, parameter_type());
    return faults_.size() == before && view.device.kind == DeviceKind::cpu;
  }

  void check_weights() {
    const bool two = in_.lln_weight.given() || in_.diag_weight.given();
    if (in_.mix.given() && two) fault("mix and lln_weight or diag_weight are both given");
    if (two && (!in_.lln_weight.given() || !in_.diag_weight.given())) {
      fault("lln_weight and diag_weight go together: one of them is not given");
    }
    if (in_.mix.given()) weight("mix", in_.mix);
    if (in_.lln_weight.given()) weight("lln_weight", in_.lln_weight);
    if (in_.diag_weight.given()) weight("diag_weight", in_.diag_weight);
    if (!in_.mix.given() && !two && !std::isfinite(options_.mix)) {
      fault(fmt::format("mix is {}: expected a finite number", options_.mix));
    }
  }

  void weight(const char* name, const ConstView& view) {
    const Problem& p = problem_;
    const Shape forms[] = {{1, 1, 1, 1},
                           {1, p.heads, 1, 1},
                           {1, p.heads, 1, p.dim_v},
                           {p.batch, p.heads, p.tokens, 1}};
    for (const Shape& form : forms) {
      if (view.shape != form) continue;
      // Weights per token are data, not parameters: NaN there stays in its row.
      if (parameter_memory(name, view) && (view.shape[2] == 1 || p.tokens == 1)) finite(name, view);
      return;
    }
    fault(
        fmt::format("{} has shape {}: expected {} per call, {} per head, {} per head and channel "
                    "or {} per head and token",
                    name, to_string(view.shape), to_string(forms[0]), to_string(forms[1]),
                    to_string(forms[2]), to_string(forms[3])));
  }

  void check_key_lengths() {
    const IndexView& lengths = in_.key_lengths;
    if (!lengths.given()) return;
    if (lengths.count != problem_.batch) {
      fault(fmt::format("key_lengths has {} entries: expected one per batch element, {}",
                        lengths.count, problem_.batch));
      return;
    }
    on_device("key_lengths", lengths.device);
    Entries entries(*this);
    for (std::int64_t b = 0; b < lengths.count; ++b) {
      if (lengths[b] < 0 || lengths[b] > problem_.tokens_k) {
        entries.add(fmt::format("key_lengths[{}] is {}: expected 0 to {}", b, lengths[b],
                                problem_.tokens_k));
      }
    }
  }

  void check_key_mask() {
    const MaskView& mask = in_.key_mask;
    if (!mask.given()) return;
    on_device("key_mask", mask.device);
    if (mask.shape[0] != problem_.batch || mask.shape[1] != problem_.tokens_k) {
      fault(fmt::format("key_mask has shape [{}, {}]: expected [{}, {}]", mask.shape[0],
                        mask.shape[1], problem_.batch, problem_.tokens_k));
    } else if (mask.data == nullptr && mask.shape[0] * mask.shape[1] > 0) {
      fault("key_mask has elements but its data is null");
    }
  }

  void check_packing() {
    const Problem& p = problem_;
    if (!p.packed) return;
    if (!in_.cu_seqlens_q.given()) {
      fault("cu_seqlens_k is given without cu_seqlens_q");
      return;
    }
    const bool q_ok = cumulative("cu_seqlens_q", in_.cu_seqlens_q, p.tokens);
    const IndexView& k = in_.cu_seqlens_k;
    if (!k.given()) {
      if (p.tokens != p.tokens_k) {
        fault(fmt::format("cu_seqlens_k is needed where q and k have different tokens: {} and {}",
                          p.tokens, p.tokens_k));
      }
      return;
    }
    const bool k_ok = cumulative("cu_seqlens_k", k, p.tokens_k);
    if (!q_ok || !k_ok) return;
    if (k.count != in_.cu_seqlens_q.count) {
      fault(fmt::format("cu_seqlens_q has {} entries and cu_seqlens_k {}: expected as many",
                        in_.cu_seqlens_q.count, k.count));
      return;
    }
    if (!p.causal && !p.has_diag()) return;
    for (std::int64_t s = 0; s < k.count; ++s) {
      if (in_.cu_seqlens_q[s] != k[s]) {
        fault(
            fmt::format("cu_seqlens_q[{}] is {} and cu_seqlens_k[{}] is {}: causal and "
                        "block-diagonal attention need as many keys as queries",
                        s, in_.cu_seqlens_q[s], s, k[s]));
        return;
      }
    }
  }

  bool cumulative(const char* name, const IndexView& cu, std::int64_t tokens) {
    if (cu.count < 1) {
      fault(fmt::format("{} is empty: expected sequences + 1 entries", name));
      return false;
    }
    on_device(name, cu.device);
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

  void make_sequences(std::vector<Sequence>& sequences) const {
    const Problem& p = problem_;
    sequences.resize(static_cast<std::size_t>(p.sequences));
    const IndexView& cu_q = in_.cu_seqlens_q;
    const IndexView& cu_k = in_.cu_seqlens_k.given() ? in_.cu_seqlens_k : cu_q;
    for (std::int64_t s = 0; s < p.sequences; ++s) {
      Sequence& seq = sequences[static_cast<std::size_t>(s)];
      if (p.packed) {
        seq.q_begin = cu_q[s];
        seq.q_tokens = cu_q[s + 1] - cu_q[s];
        seq.k_begin = cu_k[s];
        seq.k_tokens = cu_k[s + 1] - cu_k[s];
      } else {
        seq.batch = s;
        seq.q_tokens = p.tokens;
        seq.k_tokens = p.tokens_k;
      }
      seq.key_end = in_.key_lengths.given() ? in_.key_lengths[s] : seq.k_tokens;
      if (in_.key_mask.given()) {
        seq.mask = in_.key_mask.data + s * in_.key_mask.stride[0];
        seq.mask_stride = in_.key_mask.stride[1];
        while (seq.key_first < seq.key_end && seq.mask[seq.key_first * seq.mask_stride] == 0) {
          ++seq.key_first;
        }
        while (seq.key_end > seq.key_first && seq.mask[(seq.key_end - 1) * seq.mask_stride] == 0) {
          --seq.key_end;
        }
      }
      if (seq.key_first == seq.key_end) seq.key_first = seq.key_end = 0;
    }
  }

  const AttentionInputs& in_;
  const AttentionOptions& options_;
  Problem problem_;
  std::vector<std::string> faults_;
  std::vector<std::pair<const char*, const void*>> placed_;  // tensors seen so far
};

}  // namespace

CheckedCall check_forward(const AttentionInputs& in, const AttentionOutputs& out,
                          const AttentionOptions& options) {
  Checker checker(in, options, Op::forward);
  checker.check_inputs();
  const Problem& p = checker.problem();
  checker.output("o", out.o, {p.batch, p.heads, p.tokens, p.dim_v}, p.dtype);
  checker.saved(out.saved);
  CheckedCall checked = checker.finish();
  checked.call.out = out;
  return checked;
}

CheckedCall check_backward(const AttentionInputs& in, const AttentionGradients& grads,
                           const AttentionOptions& options) {
  Checker checker(in, options, Op::backward);
  checker.check_inputs();
  const Problem& p = checker.problem();
  checker.gradient_input(grads.g);
  checker.output("dq", grads.dq, {p.batch, p.heads, p.tokens, p.dim}, p.dtype);
  checker.output("dk", grads.dk, {p.batch, p.heads_k, p.tokens_k, p.dim}, p.dtype);
  checker.output("dv", grads.dv, {p.batch, p.heads_k, p.tokens_k, p.dim_v}, p.dtype);
  checker.saved(grads.saved);
  const bool lln = p.has_lln();
  const bool mixture = p.kind == Kind::lln_diag;
  checker.parameter_gradient("dalpha", grads.dalpha, "alpha", in.alpha, lln);
  checker.parameter_gradient("dbeta", grads.dbeta, "beta", in.beta, lln);
  checker.parameter_gradient("dmix", grads.dmix, "mix", in.mix, mixture);
  checker.parameter_gradient("dlln_weight", grads.dlln_weight, "lln_weight", in.lln_weight,
                             mixture);
  checker.parameter_gradient("ddiag_weight", grads.ddiag_weight, "diag_weight", in.diag_weight,
                             mixture);
  CheckedCall checked = checker.finish();
  checked.call.grads = grads;
  return checked;
}

}  // namespace lln
