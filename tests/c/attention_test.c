// Attention from C: values against plain loops, all gradients against a difference quotient, and
// every way to say which keys count, so that no field of the structs can land in a wrong place.
// SPDX-License-Identifier: Apache-2.0
#include "check.h"

enum { B = 2, H = 4, HK = 2, N = 9, D = 3, DV = 5, BLOCK = 4 };
enum { Q = B * H * N * D, K = B * HK * N * D, V = B * HK * N * DV, O = B * H * N * DV };

static void test_forward_against_loops(void) {
  float q[Q], k[K], v[V], o[O], alpha[H], beta[HK];
  fill(q, Q), fill(k, K), fill(v, V), fill(alpha, H), fill(beta, HK);
  const lln_attention_inputs in = {.q = f32_view(q, B, H, N, D),
                                   .k = f32_view(k, B, HK, N, D),
                                   .v = f32_view(v, B, HK, N, DV),
                                   .alpha = f32_view(alpha, 1, H, 1, 1),
                                   .beta = f32_view(beta, 1, HK, 1, 1)};
  const lln_attention_outputs out = {.o = f32_view(o, B, H, N, DV)};
  CHECK_OK(lln_attention_forward(&in, &out, NULL, NULL));
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < H; ++h) {
      const int hk = h / (H / HK);
      for (int i = 0; i < N; ++i) {
        double total = 0, row[DV] = {0};
        for (int j = 0; j < N; ++j) {
          double weight = 0;
          for (int l = 0; l < D; ++l) {
            weight += exp((double)alpha[h] * q[((b * H + h) * N + i) * D + l] +
                          (double)beta[hk] * k[((b * HK + hk) * N + j) * D + l]);
          }
          total += weight;
          for (int c = 0; c < DV; ++c) row[c] += weight * v[((b * HK + hk) * N + j) * DV + c];
        }
        for (int c = 0; c < DV; ++c) {
          CHECK(fabs(o[((b * H + h) * N + i) * DV + c] - row[c] / total) < 1e-5);
        }
      }
    }
  }
}

// Everything that LLN+Diag reads, in f64, and the gradients in the same order.
enum { kQ, kK, kV, kAlpha, kBeta, kLlnWeight, kDiagWeight, kTensors };
static const int64_t kShapes[kTensors][4] = {{B, H, N, D}, {B, HK, N, D}, {B, HK, N, DV},
                                             {B, H, 1, 1}, {B, HK, 1, 1}, {1, H, 1, DV},
                                             {1, H, 1, DV}};

static size_t size_of(int tensor) {
  const int64_t* s = kShapes[tensor];
  return (size_t)(s[0] * s[1] * s[2] * s[3]);
}

static lln_view f64_view(const double* data, const int64_t s[4]) {
  return lln_view_of(data, LLN_DTYPE_F64, s[0], s[1], s[2], s[3]);
}

static lln_attention_inputs inputs_of(double* const x[kTensors]) {
  const lln_attention_inputs in = {.q = f64_view(x[kQ], kShapes[kQ]),
                                   .k = f64_view(x[kK], kShapes[kK]),
                                   .v = f64_view(x[kV], kShapes[kV]),
                                   .alpha = f64_view(x[kAlpha], kShapes[kAlpha]),
                                   .beta = f64_view(x[kBeta], kShapes[kBeta]),
                                   .lln_weight = f64_view(x[kLlnWeight], kShapes[kLlnWeight]),
                                   .diag_weight = f64_view(x[kDiagWeight], kShapes[kDiagWeight])};
  return in;
}

static const int64_t kOutput[4] = {B, H, N, DV};

static double loss(const lln_attention_inputs* in, const lln_attention_options* options,
                   const double* g) {
  double o[O], sum = 0;
  const lln_attention_outputs out = {.o = f64_view(o, kOutput)};
  CHECK_OK(lln_attention_forward(in, &out, options, NULL));
  for (int i = 0; i < O; ++i) sum += g[i] * o[i];
  return sum;
}

// The sum of all gradients times a random direction is the slope of the loss along it.
static void test_backward(void) {
  double g[O], *x[kTensors], *moved[kTensors], *direction[kTensors], *d[kTensors];
  for (int i = 0; i < O; ++i) g[i] = next_number();
  for (int t = 0; t < kTensors; ++t) {
    const size_t bytes = size_of(t) * sizeof(double);
    x[t] = malloc(bytes), moved[t] = malloc(bytes), direction[t] = malloc(bytes),
    d[t] = malloc(bytes);
    for (size_t i = 0; i < size_of(t); ++i)
      x[t][i] = next_number(), direction[t][i] = next_number();
  }
  lln_attention_options options;
  CHECK_OK(lln_attention_options_init(&options));
  options.kind = LLN_KIND_LLN_DIAG;
  options.diag_block = BLOCK;
  const lln_attention_inputs in = inputs_of(x);
  const lln_attention_gradients grads = {
      .g = f64_view(g, kOutput),
      .dq = f64_view(d[kQ], kShapes[kQ]),
      .dk = f64_view(d[kK], kShapes[kK]),
      .dv = f64_view(d[kV], kShapes[kV]),
      .dalpha = f64_view(d[kAlpha], kShapes[kAlpha]),
      .dbeta = f64_view(d[kBeta], kShapes[kBeta]),
      .dlln_weight = f64_view(d[kLlnWeight], kShapes[kLlnWeight]),
      .ddiag_weight = f64_view(d[kDiagWeight], kShapes[kDiagWeight])};
  CHECK_OK(lln_attention_backward(&in, &grads, &options, NULL));

  // One tensor at a time, so that none hides behind another.
  for (int t = 0; t < kTensors; ++t) {
    const double step = 1e-5;
    double slope = 0, ends[2];
    for (int end = 0; end < 2; ++end) {
      for (int u = 0; u < kTensors; ++u) memcpy(moved[u], x[u], size_of(u) * sizeof(double));
      for (size_t i = 0; i < size_of(t); ++i) {
        moved[t][i] += (end == 0 ? -step : step) * direction[t][i];
      }
      const lln_attention_inputs there = inputs_of(moved);
      ends[end] = loss(&there, &options, g);
    }
    for (size_t i = 0; i < size_of(t); ++i) slope += d[t][i] * direction[t][i];
    const double quotient = (ends[1] - ends[0]) / (2 * step);
    CHECK(fabs(slope) > 1e-3 && fabs(slope - quotient) < 1e-6 * (1 + fabs(slope)));
  }
  for (int t = 0; t < kTensors; ++t) free(x[t]), free(moved[t]), free(direction[t]), free(d[t]);
}

// Saved values make the same gradients, other ones would not, and dmix belongs to mix.
static void test_saved_and_mix(void) {
  float q[Q], k[K], v[V], g[O], o[O], lse[B * HK * D], values[B * HK * D * DV];
  float dq[2][Q], dk[2][K], dv[2][V], dmix[2][H], mix[H], one = 1;
  fill(q, Q), fill(k, K), fill(v, V), fill(g, O), fill(mix, H);
  lln_attention_options options;
  CHECK_OK(lln_attention_options_init(&options));
  options.kind = LLN_KIND_LLN_DIAG;
  options.diag_block = BLOCK;
  const lln_attention_inputs in = {.q = f32_view(q, B, H, N, D),
                                   .k = f32_view(k, B, HK, N, D),
                                   .v = f32_view(v, B, HK, N, DV),
                                   .alpha = f32_view(&one, 1, 1, 1, 1),
                                   .beta = f32_view(&one, 1, 1, 1, 1),
                                   .mix = f32_view(mix, 1, H, 1, 1)};
  const lln_attention_outputs out = {
      .o = f32_view(o, B, H, N, DV),
      .saved = {f32_view(lse, B, HK, 1, D), f32_view(values, B, HK, D, DV)}};
  CHECK_OK(lln_attention_forward(&in, &out, &options, NULL));
  for (int saved = 0; saved < 2; ++saved) {
    lln_attention_gradients grads = {.g = f32_view(g, B, H, N, DV),
                                     .dq = f32_view(dq[saved], B, H, N, D),
                                     .dk = f32_view(dk[saved], B, HK, N, D),
                                     .dv = f32_view(dv[saved], B, HK, N, DV),
                                     .dmix = f32_view(dmix[saved], 1, H, 1, 1)};
    if (saved) grads.saved = out.saved;
    CHECK_OK(lln_attention_backward(&in, &grads, &options, NULL));
  }
  CHECK(largest_difference(dq[0], dq[1], Q) < 1e-5);
  CHECK(largest_difference(dk[0], dk[1], K) < 1e-5);
  CHECK(largest_difference(dv[0], dv[1], V) < 1e-5);
  CHECK(largest_difference(dmix[0], dmix[1], H) < 1e-5);
  memset(values, 0, sizeof values);
  const lln_attention_gradients wrong = {.g = f32_view(g, B, H, N, DV),
                                         .saved = out.saved,
                                         .dq = f32_view(dq[1], B, H, N, D),
                                         .dk = f32_view(dk[1], B, HK, N, D),
                                         .dv = f32_view(dv[1], B, HK, N, DV)};
  CHECK_OK(lln_attention_backward(&in, &wrong, &options, NULL));
  CHECK(largest_difference(dq[0], dq[1], Q) > 1e-3);
}

// One sequence of N tokens of which the first `counts` count, said in four ways.
static void test_which_keys_count(void) {
  enum { COUNTS = 6, HEADS = 2 };
  float x[3][HEADS * N * D], first[HEADS * N * D], second[HEADS * N * D], one = 1;
  for (int i = 0; i < 3; ++i) fill(x[i], HEADS * N * D);
  lln_attention_inputs in = {.q = f32_view(x[0], 1, HEADS, N, D),
                             .k = f32_view(x[1], 1, HEADS, N, D),
                             .v = f32_view(x[2], 1, HEADS, N, D),
                             .alpha = f32_view(&one, 1, 1, 1, 1),
                             .beta = f32_view(&one, 1, 1, 1, 1)};
  const lln_attention_outputs out = {.o = f32_view(first, 1, HEADS, N, D)};
  const lln_attention_outputs other = {.o = f32_view(second, 1, HEADS, N, D)};
  const int64_t wide_length = COUNTS;
  const int32_t length = COUNTS;
  const uint8_t mask[N] = {1, 1, 1, 1, 1, 1};
  in.key_lengths = (lln_index_view){.data = &wide_length, .count = 1, .wide = 1};
  CHECK_OK(lln_attention_forward(&in, &out, NULL, NULL));
  in.key_lengths = (lln_index_view){.data = &length, .count = 1};
  CHECK_OK(lln_attention_forward(&in, &other, NULL, NULL));
  CHECK(largest_difference(first, second, HEADS * N * D) == 0);
  in.key_lengths = (lln_index_view){0};
  in.key_mask = (lln_mask_view){.data = mask, .shape = {1, N}, .stride = {N, 1}};
  CHECK_OK(lln_attention_forward(&in, &other, NULL, NULL));
  CHECK(largest_difference(first, second, HEADS * N * D) < 1e-6);
  // Packed: all queries see the first six keys, and a second sequence without queries the rest.
  const int32_t of_q[3] = {0, N, N};
  const int64_t of_k[3] = {0, COUNTS, N};
  in.key_mask = (lln_mask_view){0};
  in.cu_seqlens_q = (lln_index_view){.data = of_q, .count = 3};
  in.cu_seqlens_k = (lln_index_view){.data = of_k, .count = 3, .wide = 1};
  CHECK_OK(lln_attention_forward(&in, &other, NULL, NULL));
  CHECK(largest_difference(first, second, HEADS * N * D) < 1e-6);
}

// Threads, workspace and kernel change how, not what; the problem text says what.
static void test_exec_and_problems(void) {
  enum { TOKENS = 700, SIZE = 2 * TOKENS * 8 };
  float* x = malloc(5 * SIZE * sizeof(float));
  float one = 1;
  fill(x, 3 * SIZE);
  lln_attention_inputs in = {.q = f32_view(x, 1, 2, TOKENS, 8),
                             .k = f32_view(x + SIZE, 1, 2, TOKENS, 8),
                             .v = f32_view(x + 2 * SIZE, 1, 2, TOKENS, 8),
                             .alpha = f32_view(&one, 1, 1, 1, 1),
                             .beta = f32_view(&one, 1, 1, 1, 1)};
  const lln_attention_outputs out = {.o = f32_view(x + 3 * SIZE, 1, 2, TOKENS, 8)};
  const lln_attention_outputs other = {.o = f32_view(x + 4 * SIZE, 1, 2, TOKENS, 8)};
  lln_attention_options options;
  CHECK_OK(lln_attention_options_init(&options));
  options.kind = LLN_KIND_LLN_DIAG;
  options.causal = 1;
  options.feature = LLN_FEATURE_POWER;
  options.power = 3;
  CHECK_OK(lln_attention_forward(&in, &out, &options, NULL));

  char problem[128], longer[512];
  size_t length = 0, bytes = 0;
  CHECK_OK(lln_forward_problem(&in, &out, &options, problem, sizeof problem, &length));
  CHECK(strcmp(problem, "forward:f32:cpu:b1h2n700d8:lln+diag64:causal:feature=power3") == 0);
  CHECK(length == strlen(problem));
  lln_exec exec = {0};
  CHECK_OK(lln_threads_create(3, &exec.threads));
  CHECK(lln_threads_count(exec.threads) == 3);
  CHECK_OK(lln_workspace_bytes(problem, &exec, &bytes));
  CHECK(bytes > 0);
  exec.workspace_bytes = bytes;
  exec.workspace = malloc(bytes);
  CHECK_OK(lln_attention_forward(&in, &other, &options, &exec));
  CHECK(largest_difference(x + 3 * SIZE, x + 4 * SIZE, SIZE) == 0);
  exec.workspace_bytes = bytes - 1;
  CHECK_INVALID(lln_attention_forward(&in, &other, &options, &exec), "is too small");
  free(exec.workspace);
  exec.workspace = NULL;
  exec.workspace_bytes = 0;
  exec.kernel = "reference";
  CHECK_OK(lln_attention_forward(&in, &other, &options, &exec));
  CHECK(largest_difference(x + 3 * SIZE, x + 4 * SIZE, SIZE) < 1e-4);

  CHECK_OK(lln_explain(problem, &exec, longer, sizeof longer, &length));
  CHECK(strstr(longer, problem) != NULL && strstr(longer, "reference") != NULL);
  CHECK_OK(lln_kernel_names(LLN_OP_BACKWARD, longer, sizeof longer, NULL));
  CHECK(strlen(longer) > 10 && strcmp(longer + strlen(longer) - 10, "\nreference") == 0);
  const lln_attention_gradients grads = {.g = out.o, .dq = in.q, .dk = in.k, .dv = in.v};
  CHECK_INVALID(lln_backward_problem(&in, &grads, &options, problem, sizeof problem, NULL),
                "dq and q start at the same address");
  lln_threads_destroy(exec.threads);
  free(x);
}

int main(void) {
  test_forward_against_loops();
  test_backward();
  test_saved_and_mix();
  test_which_keys_count();
  test_exec_and_problems();
  return finish();
}
