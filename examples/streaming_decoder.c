// A streaming decoder in C: the prompt in one append, then one token at a time, with a state whose
// size never changes. Random numbers stand for the q, k and v that a model would compute.
// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "lln/c.h"

enum { HEADS = 8, DIM = 64, PROMPT = 4096, TOKENS = 5120, SIZE = HEADS * TOKENS * DIM };
enum { Q, K, V, O, EXPECTED };
static float x[5][SIZE];  // each [1, heads, tokens, dim]
static const float scale = 2.1F;

// Tokens [first, first + count) of a tensor.
static lln_view rows(int tensor, int64_t first, int64_t count) {
  lln_view view = lln_view_of(x[tensor] + first * DIM, LLN_DTYPE_F32, 1, HEADS, TOKENS, DIM);
  view.shape[2] = count;
  return view;
}

static lln_attention_inputs tokens(int64_t first, int64_t count) {
  const lln_view one = lln_view_of(&scale, LLN_DTYPE_F32, 1, 1, 1, 1);
  const lln_view q = rows(Q, first, count), k = rows(K, first, count), v = rows(V, first, count);
  return (lln_attention_inputs){.q = q, .k = k, .v = v, .alpha = one, .beta = one};
}

static void must(lln_status status) {
  if (status != LLN_OK) fprintf(stderr, "%s\n", lln_last_error()), exit(1);
}

static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(void) {
  for (int i = 0; i < 3 * SIZE; ++i) x[i / SIZE][i % SIZE] = (float)(rand() % 4001 - 2000) / 1000;
  lln_exec exec = {0};
  must(lln_threads_create(0, &exec.threads));
  lln_decode_config config;
  must(lln_decode_config_init(&config));
  config.heads = config.heads_k = HEADS;
  config.dim = config.dim_v = DIM;
  config.kind = LLN_KIND_LLN_DIAG;
  size_t bytes;
  must(lln_decode_state_bytes(&config, &bytes));
  void* const memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  lln_decode_state* state;
  must(lln_decode_create(&config, memory, bytes, &state));

  double start = seconds();
  lln_attention_inputs in = tokens(0, PROMPT);
  lln_view o = rows(O, 0, PROMPT);
  must(lln_decode_append(state, &in, &o, &exec));
  printf("prompt: %.0f tokens/s, a state of %zu kB\n", PROMPT / (seconds() - start), bytes / 1000);
  start = seconds();
  for (int t = PROMPT; t < TOKENS; ++t) {
    in = tokens(t, 1), o = rows(O, t, 1);
    must(lln_decode_step(state, &in, &o, &exec));
  }
  printf("then %.1f us a token\n", (seconds() - start) / (TOKENS - PROMPT) * 1e6);

  const lln_attention_options options = {
      .kind = LLN_KIND_LLN_DIAG, .diag_block = 64, .causal = 1, .mix = 0.5F};
  const lln_attention_outputs whole = {.o = rows(EXPECTED, 0, TOKENS)};
  in = tokens(0, TOKENS);
  must(lln_attention_forward(&in, &whole, &options, &exec));
  float largest = 0;
  for (int i = 0; i < SIZE; ++i) {
    const float difference = fabsf(x[O][i] - x[EXPECTED][i]);
    if (difference > largest || isnan(difference)) largest = difference;
  }
  printf("largest difference from the causal forward: %.1e\n", largest);
  lln_decode_destroy(state), lln_threads_destroy(exec.threads), free(memory);
  return largest < 1e-4F ? 0 : 1;
}
