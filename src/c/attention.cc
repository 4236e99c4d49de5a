// Attention, problems and threads for C.
// SPDX-License-Identifier: Apache-2.0
#include "lln/attention.h"

#include <fmt/format.h>

#include <limits>

#include "c/arguments.h"

using lln::c::Arguments;
using lln::c::guarded;
using lln::c::put_text;

lln_status lln_threads_create(int32_t count, lln_threads** threads) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("threads", threads);
    arguments.in_range("count", count, 0, std::numeric_limits<int32_t>::max());
    arguments.check();
    *threads = new lln_threads{lln::ThreadPool(count)};
  });
}

void lln_threads_destroy(lln_threads* threads) { delete threads; }

int32_t lln_threads_count(const lln_threads* threads) {
  return threads == nullptr ? 0 : threads->pool.workers();
}

lln_status lln_attention_options_init(lln_attention_options* options) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("options", options);
    arguments.check();
    const lln::AttentionOptions from;
    *options = {.kind = static_cast<lln_kind>(from.kind),
                .feature = static_cast<lln_feature>(from.feature),
                .diag_block = from.diag_block,
                .causal = from.causal,
                .power = from.power,
                .mix = from.mix};
  });
}

lln_status lln_attention_forward(const lln_attention_inputs* in, const lln_attention_outputs* out,
                                 const lln_attention_options* options, const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::AttentionOutputs outputs = arguments.outputs(out);
    const lln::AttentionOptions choices = arguments.options(options);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    lln::attention_forward(inputs, outputs, choices, how);
  });
}

lln_status lln_attention_backward(const lln_attention_inputs* in,
                                  const lln_attention_gradients* grads,
                                  const lln_attention_options* options, const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::AttentionGradients gradients = arguments.gradients(grads);
    const lln::AttentionOptions choices = arguments.options(options);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    lln::attention_backward(inputs, gradients, choices, how);
  });
}

lln_status lln_forward_problem(const lln_attention_inputs* in, const lln_attention_outputs* out,
                               const lln_attention_options* options, char* text, size_t size,
                               size_t* length) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::AttentionOutputs outputs = arguments.outputs(out);
    const lln::AttentionOptions choices = arguments.options(options);
    arguments.text(text, size);
    arguments.check();
    put_text(to_string(lln::make_problem(inputs, outputs, choices)), text, size, length);
  });
}

lln_status lln_backward_problem(const lln_attention_inputs* in,
                                const lln_attention_gradients* grads,
                                const lln_attention_options* options, char* text, size_t size,
                                size_t* length) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::AttentionGradients gradients = arguments.gradients(grads);
    const lln::AttentionOptions choices = arguments.options(options);
    arguments.text(text, size);
    arguments.check();
    put_text(to_string(lln::make_problem(inputs, gradients, choices)), text, size, length);
  });
}

lln_status lln_workspace_bytes(const char* problem, const lln_exec* exec, size_t* bytes) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("problem", problem);
    arguments.required("bytes", bytes);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    *bytes = lln::workspace_bytes(lln::parse_problem(problem), how);
  });
}

lln_status lln_explain(const char* problem, const lln_exec* exec, char* text, size_t size,
                       size_t* length) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("problem", problem);
    arguments.text(text, size);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    put_text(to_string(lln::explain(lln::parse_problem(problem), how)), text, size, length);
  });
}

lln_status lln_kernel_names(lln_op op, char* text, size_t size, size_t* length) {
  return guarded(__func__, [&](Arguments& arguments) {
    const lln::Op asked = arguments.op(op);
    arguments.text(text, size);
    arguments.check();
    put_text(fmt::format("{}", fmt::join(lln::kernel_names(asked), "\n")), text, size, length);
  });
}
