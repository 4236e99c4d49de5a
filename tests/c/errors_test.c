// Wrong calls from C: each gives a status and a text, and none ends the program.
// SPDX-License-Identifier: Apache-2.0
#include "check.h"

// Every required pointer, named in the text when it is null.
static void test_null_pointers(void) {
  const lln_attention_inputs in = {0};
  const lln_attention_outputs out = {0};
  const lln_attention_gradients grads = {0};
  const lln_matching_inputs q_and_k = {0};
  const lln_matching_outputs scales = {0};
  const lln_moments moments = {0};
  lln_moments merged;
  lln_running_moments* running = NULL;
  lln_running_head head;
  size_t bytes;
  CHECK_INVALID(lln_attention_forward(NULL, NULL, NULL, NULL),
                "lln_attention_forward: 2 faults in its arguments: in is null; out is null");
  CHECK_INVALID(lln_attention_forward(&in, NULL, NULL, NULL), "1 fault in its arguments: out is");
  CHECK_INVALID(lln_attention_backward(NULL, &grads, NULL, NULL),
                "lln_attention_backward: 1 fault");
  CHECK_INVALID(lln_attention_backward(&in, NULL, NULL, NULL), "grads is null");
  CHECK_INVALID(lln_attention_options_init(NULL),
                "lln_attention_options_init: 1 fault in its "
                "arguments: options is null");
  CHECK_INVALID(lln_forward_problem(NULL, &out, NULL, NULL, 0, NULL), "in is null");
  CHECK_INVALID(lln_backward_problem(&in, NULL, NULL, NULL, 0, NULL), "grads is null");
  CHECK_INVALID(lln_workspace_bytes(NULL, NULL, NULL), "problem is null; bytes is null");
  CHECK_INVALID(lln_explain(NULL, NULL, NULL, 0, NULL), "problem is null");
  CHECK_INVALID(lln_kernel_names(LLN_OP_FORWARD, NULL, 8, NULL), "text is null, but size is 8");
  CHECK_INVALID(lln_threads_create(1, NULL), "threads is null");
  CHECK_INVALID(lln_head_moments(NULL, NULL, 1, NULL), "in is null; out is null");
  CHECK_INVALID(lln_merge_moments(&moments, NULL, &merged), "second is null");
  CHECK_INVALID(lln_merge_moments(NULL, &moments, NULL), "first is null; merged is null");
  CHECK_INVALID(lln_matching_constants_of(64, NULL), "constants is null");
  CHECK_INVALID(lln_matching_options_init(NULL), "options is null");
  CHECK_INVALID(lln_match_moments(NULL, &scales, NULL, NULL, NULL), "in is null");
  CHECK_INVALID(lln_match_moments(&q_and_k, NULL, NULL, NULL, NULL), "out is null");
  CHECK_INVALID(lln_update_moments(NULL, &q_and_k, NULL), "running is null");
  CHECK_INVALID(lln_update_device_moments(NULL, &q_and_k, NULL), "running is null");
  CHECK_INVALID(lln_matching_workspace_bytes(NULL, NULL), "in is null; bytes is null");
  CHECK_INVALID(lln_running_create(0.5, NULL), "running is null");
  CHECK_INVALID(lln_running_get(NULL, NULL, NULL, 1), "running is null; q is null; k is null");
  CHECK_INVALID(lln_running_set(NULL, &head, NULL, 1), "running is null; k is null");
  CHECK_INVALID(lln_running_create(1, &running), "decay is 1: expected 0 to below 1");
  CHECK(running == NULL);
  CHECK_INVALID(lln_decode_config_init(NULL), "config is null");
  CHECK_INVALID(lln_decode_state_bytes(NULL, &bytes), "config is null");
  CHECK_INVALID(lln_decode_create(NULL, NULL, 0, NULL), "config is null; memory is null; state is");
  CHECK_INVALID(lln_decode_get_config(NULL, NULL), "state is null; config is null");
  CHECK_INVALID(lln_decode_tokens(NULL, 0, NULL), "state is null; tokens is null");
  CHECK_INVALID(lln_decode_reset(NULL), "state is null");
  CHECK_INVALID(lln_decode_reset_sequence(NULL, 0), "state is null");
  CHECK_INVALID(lln_decode_append(NULL, NULL, NULL, NULL), "state is null; in is null");
  CHECK_INVALID(lln_decode_read(NULL, &in, NULL, NULL), "state is null; o is null");
  CHECK_INVALID(lln_decode_step(NULL, &in, NULL, NULL), "state is null; o is null");
  CHECK_INVALID(lln_decode_merge(NULL, NULL), "state is null; later is null");
  CHECK_INVALID(lln_decode_copy(NULL, NULL), "state is null; from is null");
  CHECK_INVALID(lln_decode_saved_bytes(NULL, NULL), "state is null; bytes is null");
  CHECK_INVALID(lln_decode_save(NULL, NULL, 0), "state is null; out is null");
  CHECK_INVALID(lln_decode_load(NULL, NULL, 0), "state is null; saved is null");
  CHECK_INVALID(lln_decode_saved_config(NULL, 0, NULL), "saved is null; config is null");
  lln_threads_destroy(NULL);
  lln_running_destroy(NULL);
  lln_decode_destroy(NULL);
  CHECK(lln_threads_count(NULL) == 0 && lln_running_heads(NULL) == 0);
}

// Constants that are none, all in one text; C++ has types for them, C has not.
static void test_constants_out_of_range(void) {
  lln_attention_inputs in = {.q = {.dtype = 9}, .beta = {.device = {.kind = -1}}};
  in.key_mask.device.kind = 2;
  in.key_lengths.count = -3;
  const lln_attention_outputs out = {.saved = {.key_lse = {.dtype = 4}}};
  const lln_attention_options options = {.kind = 4, .feature = 5};
  const lln_exec exec = {.workspace_bytes = 10};
  CHECK_INVALID(lln_attention_forward(&in, &out, &options, &exec),
                "8 faults in its arguments: q.dtype is 9: expected 0 to 3; "
                "beta.device.kind is -1: expected 0 to 1; key_lengths.count is -3: expected 0 or "
                "more; key_mask.device.kind is 2: expected 0 to 1; saved.key_lse.dtype is 4: "
                "expected 0 to 3; kind is 4: expected 0 to 3; feature is 5: expected 0 to 4; "
                "exec.workspace is null, but exec.workspace_bytes is 10");
  const lln_matching_options matching = {.mode = 7};
  const lln_matching_inputs q_and_k = {0};
  const lln_matching_outputs scales = {0};
  CHECK_INVALID(lln_match_moments(&q_and_k, &scales, &matching, NULL, NULL), "mode is 7: expected");
  CHECK_INVALID(lln_kernel_names(5, NULL, 0, NULL), "op is 5: expected 0 to 4");
  lln_decode_config config;
  size_t bytes;
  CHECK_OK(lln_decode_config_init(&config));
  config.kind = -1;
  CHECK_INVALID(lln_decode_state_bytes(&config, &bytes), "kind is -1: expected 0 to 3");
  const lln_device nowhere = {.kind = 2};
  CHECK_INVALID(lln_decode_state_bytes_on(&config, nowhere, &bytes), "state.device.kind is 2");
  CHECK_INVALID(lln_decode_create_on(&config, &config, 8, nowhere, NULL, NULL),
                "lln_decode_create_on: 3 faults");
  lln_threads* threads;
  CHECK_INVALID(lln_threads_create(-1, &threads), "count is -1: expected 0 to");
  lln_matching_constants constants;
  CHECK_INVALID(lln_matching_constants_of(0, &constants), "dim is 0: expected 1 to 256");
}

// What the C++ calls refuse arrives with its own text and code.
static void test_errors_of_the_library(void) {
  float x[8] = {0}, one = 1;
  lln_attention_inputs in = {.q = f32_view(x, 1, 1, 4, 2),
                             .k = f32_view(x, 1, 1, 4, 3),
                             .v = f32_view(x, 1, 1, 4, 2),
                             .beta = f32_view(&one, 1, 1, 1, 1)};
  lln_attention_outputs out = {.o = f32_view(x, 1, 1, 4, 2)};
  CHECK_INVALID(lln_attention_forward(&in, &out, NULL, NULL),
                "k has shape [1, 1, 4, 3]: expected [1, 1, 4, 2]");
  CHECK_INVALID(lln_attention_forward(&in, &out, NULL, NULL), "alpha is not given");
  lln_view* const views[] = {&in.q, &in.k, &in.v, &out.o};
  float o[8];
  in.k = in.q;
  out.o = f32_view(o, 1, 1, 4, 2);
  for (int i = 0; i < 4; ++i) views[i]->device.kind = LLN_DEVICE_CUDA;
  const lln_attention_options softmax = {.kind = LLN_KIND_SOFTMAX};
  in.beta = (lln_view){0};
  CHECK_ERROR(lln_attention_forward(&in, &out, &softmax, NULL), LLN_ERROR_UNSUPPORTED,
              "no kernel takes forward:f32:cuda:");
  for (int i = 0; i < 4; ++i) views[i]->device.kind = LLN_DEVICE_CPU;
  const lln_exec abacus = {.kernel = "abacus"};
  CHECK_INVALID(lln_attention_forward(&in, &out, &softmax, &abacus), "unknown kernel 'abacus'");
  size_t bytes;
  CHECK_INVALID(lln_workspace_bytes("forward:f32:cpu:n8:lln", NULL, &bytes), "n8");
  CHECK_ERROR(lln_workspace_bytes("forward:f32:cuda:900:n8d8:lln", NULL, &bytes),
              LLN_ERROR_UNSUPPORTED, "no kernel takes");
}

// As snprintf: cut, closed, and with the whole length.
static void test_texts(void) {
  char text[8];
  size_t whole = 0, length = 0;
  memset(text, 'x', sizeof text);
  CHECK_OK(lln_kernel_names(LLN_OP_FORWARD, NULL, 0, &whole));
  CHECK(whole > sizeof text);
  CHECK_OK(lln_kernel_names(LLN_OP_FORWARD, text, sizeof text - 1, &length));
  CHECK(length == whole && strlen(text) == sizeof text - 2 && text[7] == 'x');
  CHECK_OK(lln_kernel_names(LLN_OP_FORWARD, text, 1, NULL));
  CHECK(text[0] == '\0' && text[1] != '\0');
}

static void test_status(void) {
  const struct {
    lln_status status;
    const char* name;
  } names[] = {{LLN_OK, "ok"},
               {LLN_ERROR_INVALID_ARGUMENT, "invalid_argument"},
               {LLN_ERROR_UNSUPPORTED, "unsupported"},
               {LLN_ERROR_OUT_OF_MEMORY, "out_of_memory"},
               {LLN_ERROR_DEVICE, "device"},
               {LLN_ERROR_IO, "io"},
               {LLN_ERROR_INTERNAL, "internal"},
               {7, "?"},
               {-1, "?"}};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    CHECK(strcmp(lln_status_name(names[i].status), names[i].name) == 0);
  }
  CHECK(strcmp(lln_version(), LLN_EXPECTED_VERSION) == 0);
  CHECK_INVALID(lln_decode_reset(NULL), "state is null");
  lln_attention_options options;
  CHECK_OK(lln_attention_options_init(&options));
  CHECK(strstr(lln_last_error(), "state is null") != NULL);  // success leaves it
}

// Sanitizers end the program where this much memory is asked for.
#ifndef LLN_QUICK_TESTS
static void test_memory(void) {
  lln_running_moments* running = NULL;
  lln_running_head head = {0};
  CHECK_OK(lln_running_create(0.5, &running));
  CHECK_ERROR(lln_running_set(running, &head, &head, SIZE_MAX / 64), LLN_ERROR_OUT_OF_MEMORY,
              "lln_running_set: no memory");
  CHECK_ERROR(lln_running_set(running, &head, &head, SIZE_MAX), LLN_ERROR_OUT_OF_MEMORY,
              "lln_running_set: no memory");
  CHECK(lln_running_heads(running) == 0);
  lln_running_destroy(running);
}
#endif

int main(void) {
  CHECK(strcmp(lln_last_error(), "") == 0);
  test_null_pointers();
  test_constants_out_of_range();
  test_errors_of_the_library();
  test_texts();
  test_status();
#ifndef LLN_QUICK_TESTS
  test_memory();
#endif
  return finish();
}
