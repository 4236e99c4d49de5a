// The decode state from C: a prompt in pieces and then steps give the rows of the causal forward,
// and every other call on a state does what it says.
// SPDX-License-Identifier: Apache-2.0
#include "check.h"

enum { B = 2, H = 4, HK = 2, N = 150, D = 8, DV = 6, BLOCK = 16 };

static float q[B * H * N * D], k[B * HK * N * D], v[B * HK * N * DV];
static float expected[B * H * N * DV], found[B * H * N * DV];
static const float kAlpha = 1.3F, kBeta = 0.8F;

// Tokens [first, first + count) of all tensors.
static lln_view rows(const float* data, int64_t heads, int64_t channels, int64_t first,
                     int64_t count) {
  lln_view view = f32_view(data, B, heads, N, channels);
  view.data = (float*)view.data + first * channels;
  view.shape[2] = count;
  return view;
}

static lln_attention_inputs tokens(int64_t first, int64_t count) {
  const lln_attention_inputs in = {.q = rows(q, H, D, first, count),
                                   .k = rows(k, HK, D, first, count),
                                   .v = rows(v, HK, DV, first, count),
                                   .alpha = f32_view(&kAlpha, 1, 1, 1, 1),
                                   .beta = f32_view(&kBeta, 1, 1, 1, 1)};
  return in;
}

static lln_view output(int64_t first, int64_t count) { return rows(found, H, DV, first, count); }

static lln_decode_config config_of(lln_kind kind) {
  lln_decode_config config;
  CHECK_OK(lln_decode_config_init(&config));
  CHECK(config.batch == 1 && config.diag_block == 64 && config.power == 2 && config.mix == 0.5F);
  config.batch = B;
  config.heads = H;
  config.heads_k = HK;
  config.dim = D;
  config.dim_v = DV;
  config.kind = kind;
  config.diag_block = BLOCK;
  config.mix = 0.25F;
  return config;
}

// A state and its memory, which C99 cannot ask to be aligned.
typedef struct Owned {
  void* block;
  lln_decode_state* state;
} Owned;

static Owned create(lln_kind kind) {
  const lln_decode_config config = config_of(kind);
  Owned owned = {0};
  size_t bytes = 0;
  CHECK_OK(lln_decode_state_bytes(&config, &bytes));
  owned.block = malloc(bytes + 64);
  void* const memory = (char*)owned.block + (64 - (uintptr_t)owned.block % 64);
  CHECK_INVALID(lln_decode_create(&config, memory, bytes - 1, &owned.state), "bytes");
  CHECK(owned.state == NULL);
  // Devices: the CPU is one, and no machine has so many of the others.
  const lln_device cpu = {.kind = LLN_DEVICE_CPU}, absent = {.kind = LLN_DEVICE_CUDA, .index = 60};
  size_t same = 0, on_device = 0;
  CHECK_OK(lln_decode_state_bytes_on(&config, cpu, &same));
  CHECK_OK(lln_decode_state_bytes_on(&config, absent, &on_device));
  CHECK(same == bytes && on_device > bytes);  // there the counts of tokens are in it too
  CHECK_INVALID(lln_decode_create_on(&config, memory, bytes, absent, NULL, &owned.state), "bytes");
  CHECK_ERROR(lln_decode_create_on(&config, memory, on_device, absent, NULL, &owned.state),
              LLN_ERROR_UNSUPPORTED, "no state of");
  CHECK(owned.state == NULL);
  CHECK_OK(lln_decode_create(&config, memory, bytes, &owned.state));
  return owned;
}

static void destroy(Owned owned) {
  lln_decode_destroy(owned.state);
  free(owned.block);
}

static int64_t count_of(const lln_decode_state* state, int64_t sequence) {
  int64_t count = -1;
  CHECK_OK(lln_decode_tokens(state, sequence, &count));
  return count;
}

static void run_causal(lln_kind kind) {
  const lln_attention_inputs in = tokens(0, N);
  const lln_attention_outputs out = {.o = f32_view(expected, B, H, N, DV)};
  const lln_attention_options options = {
      .kind = kind, .diag_block = BLOCK, .causal = 1, .power = 2, .mix = 0.25F};
  CHECK_OK(lln_attention_forward(&in, &out, &options, NULL));
}

static void append(lln_decode_state* state, int64_t first, int64_t count) {
  const lln_attention_inputs in = tokens(first, count);
  const lln_view o = output(first, count);
  CHECK_OK(lln_decode_append(state, &in, &o, NULL));
}

static void step(lln_decode_state* state, int64_t token) {
  const lln_attention_inputs in = tokens(token, 1);
  const lln_view o = output(token, 1);
  CHECK_OK(lln_decode_step(state, &in, &o, NULL));
}

static void check_rows(int64_t first, int64_t count) {
  double largest = 0;
  for (int64_t bh = 0; bh < B * H; ++bh) {
    const int64_t at = (bh * N + first) * DV;
    const double here = largest_difference(found + at, expected + at, (size_t)(count * DV));
    if (here > largest) largest = here;
  }
  CHECK(largest < 1e-5);
}

static void forget_rows(void) { memset(found, 0xFF, sizeof found); }

static void test_pieces_and_steps(lln_kind kind) {
  const Owned owned = create(kind);
  run_causal(kind);
  forget_rows();
  append(owned.state, 0, 37);
  append(owned.state, 37, 1);
  append(owned.state, 38, 60);
  for (int64_t t = 98; t < N; ++t) step(owned.state, t);
  check_rows(0, N);
  CHECK(count_of(owned.state, 1) == N);

  // Appended without rows, then read at the place of the last token.
  CHECK_OK(lln_decode_reset(owned.state));
  CHECK(count_of(owned.state, 0) == 0);
  lln_attention_inputs in = tokens(0, N);
  in.q = (lln_view){0};
  CHECK_OK(lln_decode_append(owned.state, &in, NULL, NULL));
  forget_rows();
  lln_attention_inputs last = tokens(N - 1, 1);
  last.k = last.v = last.beta = (lln_view){0};
  const lln_view o = output(N - 1, 1);
  CHECK_OK(lln_decode_read(owned.state, &last, &o, NULL));
  check_rows(N - 1, 1);
  destroy(owned);
}

static void test_one_sequence_is_forgotten(void) {
  const Owned owned = create(LLN_KIND_LLN_DIAG);
  append(owned.state, 0, 20);
  CHECK_OK(lln_decode_reset_sequence(owned.state, 1));
  CHECK(count_of(owned.state, 0) == 20 && count_of(owned.state, 1) == 0);
  CHECK_INVALID(lln_decode_reset_sequence(owned.state, 2), "sequence 2 of");
  int64_t count;
  CHECK_INVALID(lln_decode_tokens(owned.state, -1, &count), "sequence -1 of");
  destroy(owned);
}

// Two halves filled apart and joined, a fork, and the way back to it.
static void test_merge_and_copy(lln_kind kind) {
  const Owned whole = create(kind), later = create(kind), fork = create(kind);
  run_causal(kind);
  append(whole.state, 0, 64);
  append(later.state, 64, 36);
  CHECK_OK(lln_decode_merge(whole.state, later.state));
  CHECK(count_of(whole.state, 0) == 100);
  CHECK_OK(lln_decode_copy(fork.state, whole.state));
  forget_rows();
  for (int64_t t = 100; t < 120; ++t) step(whole.state, t);
  check_rows(100, 20);
  forget_rows();
  step(fork.state, 100);
  check_rows(100, 1);
  destroy(whole), destroy(later), destroy(fork);
}

static void test_bytes(void) {
  const Owned owned = create(LLN_KIND_LLN_DIAG), other = create(LLN_KIND_LLN_DIAG),
              lln = create(LLN_KIND_LLN);
  run_causal(LLN_KIND_LLN_DIAG);
  append(owned.state, 0, 77);
  size_t bytes = 0;
  CHECK_OK(lln_decode_saved_bytes(owned.state, &bytes));
  char* const saved = malloc(bytes);
  CHECK_INVALID(lln_decode_save(owned.state, saved, bytes - 1), "bytes");
  CHECK_OK(lln_decode_save(owned.state, saved, bytes));
  const lln_decode_config config = config_of(LLN_KIND_LLN_DIAG);
  lln_decode_config read, held;
  CHECK_OK(lln_decode_saved_config(saved, bytes, &read));
  CHECK_OK(lln_decode_get_config(owned.state, &held));
  const lln_decode_config* const both[] = {&read, &held};
  for (int i = 0; i < 2; ++i) {
    CHECK(both[i]->batch == B && both[i]->heads == H && both[i]->heads_k == HK);
    CHECK(both[i]->dim == D && both[i]->dim_v == DV && both[i]->diag_block == BLOCK);
    CHECK(both[i]->kind == config.kind && both[i]->feature == config.feature);
    CHECK(both[i]->power == config.power && both[i]->mix == config.mix);
  }
  CHECK_OK(lln_decode_load(other.state, saved, bytes));
  CHECK(count_of(other.state, 1) == 77);
  forget_rows();
  append(other.state, 77, N - 77);
  check_rows(77, N - 77);

  CHECK(lln_decode_load(lln.state, saved, bytes) != LLN_OK);  // another configuration
  CHECK(lln_decode_load(owned.state, saved, bytes - 1) != LLN_OK);
  saved[bytes / 2] ^= 1;
  CHECK(lln_decode_load(owned.state, saved, bytes) != LLN_OK);
  CHECK(count_of(owned.state, 0) == 77 && count_of(lln.state, 0) == 0);
  free(saved);
  destroy(owned), destroy(other), destroy(lln);
}

int main(void) {
  fill(q, sizeof q / sizeof q[0]);
  fill(k, sizeof k / sizeof k[0]);
  fill(v, sizeof v / sizeof v[0]);
  test_pieces_and_steps(LLN_KIND_LLN);
  test_pieces_and_steps(LLN_KIND_LLN_DIAG);
  test_one_sequence_is_forgotten();
  test_merge_and_copy(LLN_KIND_LLN);
  test_merge_and_copy(LLN_KIND_LLN_DIAG);
  test_bytes();
  return finish();
}
