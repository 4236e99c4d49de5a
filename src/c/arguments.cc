// Conversions from the structs of C, and the proof that the constants of both languages agree.
// SPDX-License-Identifier: Apache-2.0
#include "c/arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace lln::c {
namespace {

template <class Enum>
constexpr bool agrees(Enum value, std::int32_t constant) {
  return static_cast<std::int32_t>(value) == constant;
}

static_assert(agrees(DType::f32, LLN_DTYPE_F32) && agrees(DType::f16, LLN_DTYPE_F16) &&
              agrees(DType::bf16, LLN_DTYPE_BF16) && agrees(DType::f64, LLN_DTYPE_F64));
static_assert(agrees(DeviceKind::cpu, LLN_DEVICE_CPU) && agrees(DeviceKind::cuda, LLN_DEVICE_CUDA));
static_assert(agrees(Op::forward, LLN_OP_FORWARD) && agrees(Op::backward, LLN_OP_BACKWARD) &&
              agrees(Op::append, LLN_OP_APPEND) && agrees(Op::step, LLN_OP_STEP) &&
              agrees(Op::train, LLN_OP_TRAIN));
static_assert(agrees(Kind::lln, LLN_KIND_LLN) && agrees(Kind::diag, LLN_KIND_DIAG) &&
              agrees(Kind::lln_diag, LLN_KIND_LLN_DIAG) && agrees(Kind::softmax, LLN_KIND_SOFTMAX));
static_assert(agrees(Feature::exp, LLN_FEATURE_EXP) && agrees(Feature::elu, LLN_FEATURE_ELU) &&
              agrees(Feature::relu, LLN_FEATURE_RELU) &&
              agrees(Feature::softplus, LLN_FEATURE_SOFTPLUS) &&
              agrees(Feature::power, LLN_FEATURE_POWER));
static_assert(agrees(Matching::none, LLN_MATCHING_NONE) &&
              agrees(Matching::paper, LLN_MATCHING_PAPER) &&
              agrees(Matching::per_head, LLN_MATCHING_PER_HEAD) &&
              agrees(Matching::frozen, LLN_MATCHING_FROZEN) &&
              agrees(Matching::ema, LLN_MATCHING_EMA) &&
              agrees(Matching::exact, LLN_MATCHING_EXACT) &&
              agrees(Matching::entropy, LLN_MATCHING_ENTROPY));

}  // namespace

void Arguments::required(const char* name, const void* pointer) {
  if (pointer == nullptr) faults_.add(fmt::format("{} is null", name));
}

void Arguments::in_range(const char* name, std::int64_t value, std::int64_t least,
                         std::int64_t most) {
  if (value >= least && value <= most) return;
  faults_.add(fmt::format("{} is {}: expected {} to {}", name, value, least, most));
}

template <class Enum>
Enum Arguments::constant(const std::string& name, std::int32_t value, Enum last) {
  if (value >= 0 && value <= static_cast<std::int32_t>(last)) return static_cast<Enum>(value);
  faults_.add(fmt::format("{} is {}: expected 0 to {}", name, value, static_cast<int>(last)));
  return Enum{};
}

Device Arguments::device(const std::string& name, const lln_device& device) {
  return {constant(name + ".device.kind", device.kind, DeviceKind::cuda), device.index};
}

View Arguments::output(const char* name, const lln_view& v) {
  View view{.data = v.data,
            .dtype = constant(fmt::format("{}.dtype", name), v.dtype, DType::f64),
            .device = device(name, v.device)};
  std::copy_n(v.shape, 4, view.shape.begin());
  std::copy_n(v.stride, 4, view.stride.begin());
  return view;
}

View Arguments::required_output(const char* name, const lln_view* v) {
  required(name, v);
  return v == nullptr ? View() : output(name, *v);
}

ConstView Arguments::input(const char* name, const lln_view& v) { return output(name, v); }

IndexView Arguments::index(const char* name, const lln_index_view& v) {
  IndexView view;
  view.data = v.data;
  view.wide = v.wide != 0;
  view.count = v.data == nullptr && v.count == 0 ? -1 : v.count;
  view.device = device(name, v.device);
  if (v.count < 0) faults_.add(fmt::format("{}.count is {}: expected 0 or more", name, v.count));
  return view;
}

MaskView Arguments::mask(const char* name, const lln_mask_view& v) {
  return {v.data, {v.shape[0], v.shape[1]}, {v.stride[0], v.stride[1]}, device(name, v.device)};
}

AttentionSaved Arguments::saved(const lln_attention_saved& saved) {
  return {output("saved.key_lse", saved.key_lse),
          output("saved.channel_values", saved.channel_values)};
}

AttentionInputs Arguments::inputs(const lln_attention_inputs* in) {
  required("in", in);
  if (in == nullptr) return {};
  return {.q = input("q", in->q),
          .k = input("k", in->k),
          .v = input("v", in->v),
          .alpha = input("alpha", in->alpha),
          .beta = input("beta", in->beta),
          .mix = input("mix", in->mix),
          .lln_weight = input("lln_weight", in->lln_weight),
          .diag_weight = input("diag_weight", in->diag_weight),
          .key_lengths = index("key_lengths", in->key_lengths),
          .key_mask = mask("key_mask", in->key_mask),
          .cu_seqlens_q = index("cu_seqlens_q", in->cu_seqlens_q),
          .cu_seqlens_k = index("cu_seqlens_k", in->cu_seqlens_k)};
}

AttentionOutputs Arguments::outputs(const lln_attention_outputs* out) {
  required("out", out);
  if (out == nullptr) return {};
  return {.o = output("o", out->o), .saved = saved(out->saved)};
}

AttentionGradients Arguments::gradients(const lln_attention_gradients* grads) {
  required("grads", grads);
  if (grads == nullptr) return {};
  return {.g = input("g", grads->g),
          .saved = saved(grads->saved),
          .dq = output("dq", grads->dq),
          .dk = output("dk", grads->dk),
          .dv = output("dv", grads->dv),
          .dalpha = output("dalpha", grads->dalpha),
          .dbeta = output("dbeta", grads->dbeta),
          .dmix = output("dmix", grads->dmix),
          .dlln_weight = output("dlln_weight", grads->dlln_weight),
          .ddiag_weight = output("ddiag_weight", grads->ddiag_weight)};
}

AttentionOptions Arguments::options(const lln_attention_options* options) {
  if (options == nullptr) return {};
  return {.kind = constant("kind", options->kind, Kind::softmax),
          .diag_block = options->diag_block,
          .causal = options->causal != 0,
          .feature = constant("feature", options->feature, Feature::power),
          .power = options->power,
          .mix = options->mix};
}

MomentsInputs Arguments::moments(const lln_moments_inputs* in) {
  required("in", in);
  if (in == nullptr) return {};
  return {.x = input("x", in->x),
          .lengths = index("lengths", in->lengths),
          .mask = mask("mask", in->mask),
          .cu_seqlens = index("cu_seqlens", in->cu_seqlens)};
}

MatchingInputs Arguments::matching(const lln_matching_inputs* in) {
  required("in", in);
  if (in == nullptr) return {};
  return {.q = input("q", in->q),
          .k = input("k", in->k),
          .alpha = input("alpha", in->alpha),
          .beta = input("beta", in->beta),
          .key_lengths = index("key_lengths", in->key_lengths),
          .key_mask = mask("key_mask", in->key_mask),
          .query_mask = mask("query_mask", in->query_mask),
          .cu_seqlens_q = index("cu_seqlens_q", in->cu_seqlens_q),
          .cu_seqlens_k = index("cu_seqlens_k", in->cu_seqlens_k),
          .cross = in->cross != 0};
}

MatchingOutputs Arguments::matching(const lln_matching_outputs* out) {
  required("out", out);
  if (out == nullptr) return {};
  return {.alpha = output("alpha (output)", out->alpha),
          .beta = output("beta (output)", out->beta)};
}

MatchingOptions Arguments::matching(const lln_matching_options* options) {
  if (options == nullptr) return {};
  MatchingOptions to{.mode = constant("mode", options->mode, Matching::entropy),
                     .causal = options->causal != 0,
                     .feature = constant("feature", options->feature, Feature::power)};
  if (options->constants != nullptr) {
    to.constants = MatchingConstants{options->constants->a, options->constants->b};
  }
  if (options->running != nullptr) to.running = &options->running->value;
  if (options->running_on_device != nullptr) {
    running_ = running(options->running_on_device);
    to.running_on_device = &running_;
  }
  return to;
}

DeviceRunningMoments Arguments::running(const lln_device_running_moments* running) {
  required("running", running);
  if (running == nullptr) return {};
  return {.decay = running->decay, .heads = output("running.heads", running->heads)};
}

DecodeConfig Arguments::decode(const lln_decode_config* config) {
  required("config", config);
  if (config == nullptr) return {};
  return {.batch = config->batch,
          .heads = config->heads,
          .heads_k = config->heads_k,
          .dim = config->dim,
          .dim_v = config->dim_v,
          .kind = constant("kind", config->kind, Kind::softmax),
          .diag_block = config->diag_block,
          .feature = constant("feature", config->feature, Feature::power),
          .power = config->power,
          .mix = config->mix};
}

Exec Arguments::exec(const lln_exec* exec) {
  if (exec == nullptr) return {};
  if (exec->workspace == nullptr && exec->workspace_bytes != 0) {
    faults_.add(fmt::format("exec.workspace is null, but exec.workspace_bytes is {}",
                            exec->workspace_bytes));
    return {};
  }
  return {.parallel = exec->threads == nullptr ? nullptr : &exec->threads->pool,
          .workspace = {static_cast<std::byte*>(exec->workspace), exec->workspace_bytes},
          .kernel = exec->kernel == nullptr ? "" : exec->kernel,
          .stream = exec->stream};
}

Op Arguments::op(lln_op op) { return constant("op", op, Op::train); }

void Arguments::text(const char* text, std::size_t size) {
  if (text == nullptr && size != 0) faults_.add(fmt::format("text is null, but size is {}", size));
}

void put_text(const std::string& from, char* text, std::size_t size, std::size_t* length) noexcept {
  if (length != nullptr) *length = from.size();
  if (size == 0) return;
  const std::size_t copied = std::min(from.size(), size - 1);
  std::memcpy(text, from.data(), copied);
  text[copied] = '\0';
}

}  // namespace lln::c
