// Moment matching from C: the formula in every mode, the report, and running moments that are
// stored and come back.
// SPDX-License-Identifier: Apache-2.0
#include "check.h"

enum { B = 2, H = 4, HK = 2, N = 50, D = 16 };

static float q[B * H * N * D], k[B * HK * N * D], alpha[B * H], beta[B * HK];

static lln_matching_inputs inputs(void) {
  const lln_matching_inputs in = {.q = f32_view(q, B, H, N, D), .k = f32_view(k, B, HK, N, D)};
  return in;
}

static lln_matching_outputs outputs(void) {
  const lln_matching_outputs out = {f32_view(alpha, B, H, 1, 1), f32_view(beta, B, HK, 1, 1)};
  return out;
}

static double variance(const float* x, size_t count) {
  double mean = 0, squares = 0;
  for (size_t i = 0; i < count; ++i) mean += x[i] / (double)count;
  for (size_t i = 0; i < count; ++i) squares += (x[i] - mean) * (x[i] - mean);
  return squares / (double)(count - 1);
}

static int close(double found, double expected) {
  return fabs(found - expected) < 1e-5 * fabs(expected);
}

static void test_moments(void) {
  lln_moments heads[B * HK], all = {0}, extra;
  const lln_moments_inputs in = {.x = f32_view(k, B, HK, N, D)};
  CHECK_OK(lln_head_moments(&in, heads, B * HK, NULL));
  for (int i = 0; i < B * HK; ++i) {
    CHECK(heads[i].count == N * D);
    CHECK(close(heads[i].m2 / (N * D - 1), variance(k + i * N * D, N * D)));
    extra = all;
    CHECK_OK(lln_merge_moments(&extra, &heads[i], &all));
  }
  CHECK(all.count == B * HK * N * D);
  CHECK(close(all.m2 / (all.count - 1), variance(k, B * HK * N * D)));
  CHECK_INVALID(lln_head_moments(&in, heads, 3, NULL), "out has 3 entries");
}

// st = sqrt((sigma_q^2 sigma_k^2 - b) / (2 a)), alpha = st / sigma_q.
static double expected_alpha(double var_q, double var_k, lln_matching_constants c) {
  return sqrt((var_q * var_k - c.b) / (2 * c.a) / var_q);
}

static void test_modes(void) {
  const lln_matching_inputs in = inputs();
  const lln_matching_outputs out = outputs();
  lln_matching_constants c;
  CHECK_OK(lln_matching_constants_of(D, &c));
  CHECK(c.a > 0.1 && c.a < 0.3 && c.b < 0);
  lln_matching_report report = {0};
  CHECK_OK(lln_match_moments(&in, &out, NULL, &report, NULL));
  CHECK(report.constants.a == c.a && report.constants.b == c.b && report.count == 0);
  for (int i = 0; i < B * HK; ++i) {
    const double var_q = variance(q + i * 2 * N * D, 2 * N * D),
                 var_k = variance(k + i * N * D, N * D);
    CHECK(close(alpha[2 * i], expected_alpha(var_q, var_k, c)));
    CHECK(alpha[2 * i] == alpha[2 * i + 1]);
    CHECK(close(beta[i], expected_alpha(var_k, var_q, c)));
  }

  lln_matching_options options;
  CHECK_OK(lln_matching_options_init(&options));
  CHECK(options.mode == LLN_MATCHING_PER_HEAD && options.running == NULL);
  const lln_matching_constants mine = {0.2, -0.1};
  options.constants = &mine;
  CHECK_OK(lln_match_moments(&in, &out, &options, &report, NULL));
  CHECK(report.constants.a == 0.2 && report.constants.b == -0.1);
  CHECK(close(beta[3], expected_alpha(variance(k + 3 * N * D, N * D),
                                      variance(q + 6 * N * D, 2 * N * D), mine)));

  options.constants = NULL;
  options.mode = LLN_MATCHING_PAPER;
  CHECK_OK(lln_match_moments(&in, &out, &options, &report, NULL));
  CHECK(close(alpha[5], expected_alpha(variance(q, B * H * N * D), variance(k, B * HK * N * D),
                                       report.constants)));
  options.mode = LLN_MATCHING_EXACT;
  CHECK_OK(lln_match_moments(&in, &out, &options, &report, NULL));
  const float exact = beta[3];
  options.mode = LLN_MATCHING_ENTROPY;
  CHECK_OK(lln_match_moments(&in, &out, &options, &report, NULL));
  CHECK(report.constants.a == 0 && report.count == 0);
  CHECK(beta[3] > 0.5F * exact && beta[3] < exact);
  options.mode = LLN_MATCHING_NONE;
  CHECK_OK(lln_match_moments(&in, &out, &options, NULL, NULL));
  CHECK(alpha[7] == 1 && beta[3] == 1);
  options.mode = LLN_MATCHING_FROZEN;
  CHECK_INVALID(lln_match_moments(&in, &out, &options, NULL, NULL), "alpha is not given");
  const float two = 2, three = 3;
  lln_matching_inputs given = in;
  given.alpha = f32_view(&two, 1, 1, 1, 1);
  given.beta = f32_view(&three, 1, 1, 1, 1);
  CHECK_OK(lln_match_moments(&given, &out, &options, NULL, NULL));
  CHECK(alpha[7] == 2 && beta[3] == 3);
  options.mode = LLN_MATCHING_PER_HEAD;
  options.causal = 1;
  CHECK_INVALID(lln_match_moments(&in, &out, &options, NULL, NULL), "reads the whole sequence");
}

// Of four constant heads of k the report holds as many as fit, and says how many there are.
static void test_report(void) {
  static float flat[B * HK * N * D];
  lln_matching_inputs in = inputs();
  in.k = f32_view(flat, B, HK, N, D);
  const lln_matching_outputs out = outputs();
  lln_clamped_head clamped[3] = {{0}};
  clamped[2].sequence = 77;
  lln_matching_report report = {.clamped = clamped, .capacity = 2};
  CHECK_OK(lln_match_moments(&in, &out, NULL, &report, NULL));
  CHECK(report.count == 4);
  CHECK(clamped[1].sequence == 0 && clamped[1].head_k == 1);
  CHECK(clamped[1].sigma_k && !clamped[1].sigma_q && !clamped[1].target && !clamped[1].size);
  CHECK(clamped[2].sequence == 77);
  // Ten tokens are fewer than the tables of mode exact begin with.
  in.q = f32_view(q, 1, HK, 10, D);
  in.k = f32_view(k, 1, HK, 10, D);
  const lln_matching_outputs two = {f32_view(alpha, 1, HK, 1, 1), f32_view(beta, 1, HK, 1, 1)};
  const lln_matching_options exact = {.mode = LLN_MATCHING_EXACT};
  CHECK_OK(lln_match_moments(&in, &two, &exact, &report, NULL));
  CHECK(report.count == 2 && clamped[1].size && !clamped[1].sigma_k && !clamped[1].target);
  report.clamped = NULL;
  CHECK_INVALID(lln_match_moments(&in, &two, &exact, &report, NULL), "report.clamped is null");
}

// A batch that counts no tokens of some sequences, by lengths and by masks.
static void test_tokens_that_count(void) {
  const lln_matching_outputs out = outputs();
  lln_matching_inputs in = inputs();
  const int32_t lengths[B] = {N, 20};
  uint8_t mask[B * N];
  for (int i = 0; i < B * N; ++i) mask[i] = i < N + 20;
  in.key_lengths = (lln_index_view){.data = lengths, .count = B};
  CHECK_OK(lln_match_moments(&in, &out, NULL, NULL, NULL));
  const float by_length = beta[3], alpha_by_length = alpha[7];
  in.key_lengths = (lln_index_view){0};
  in.key_mask = (lln_mask_view){.data = mask, .shape = {B, N}, .stride = {N, 1}};
  CHECK_OK(lln_match_moments(&in, &out, NULL, NULL, NULL));
  CHECK(close(beta[3], by_length) && close(alpha[7], alpha_by_length));
  in.cross = 1;  // q then has no mask
  CHECK_OK(lln_match_moments(&in, &out, NULL, NULL, NULL));
  CHECK(!close(alpha[7], alpha_by_length));
  in.query_mask = in.key_mask;
  CHECK_OK(lln_match_moments(&in, &out, NULL, NULL, NULL));
  CHECK(close(alpha[7], alpha_by_length));
}

static void test_running(void) {
  const lln_matching_inputs in = inputs();
  const lln_matching_outputs out = outputs();
  lln_running_moments *running = NULL, *restored = NULL;
  CHECK_OK(lln_running_create(0.9, &running));
  CHECK_OK(lln_running_create(0.9, &restored));
  lln_matching_options options;
  CHECK_OK(lln_matching_options_init(&options));
  options.mode = LLN_MATCHING_EMA;
  CHECK_INVALID(lln_match_moments(&in, &out, &options, NULL, NULL),
                "running moments are not given");
  options.running = running;
  CHECK_OK(lln_match_moments(&in, &out, &options, NULL, NULL));
  CHECK(alpha[0] == 1 && lln_running_heads(running) == 0);
  CHECK_OK(lln_update_moments(running, &in, NULL));
  CHECK(lln_running_heads(running) == HK);
  CHECK_OK(lln_match_moments(&in, &out, &options, NULL, NULL));
  const float after = alpha[0];
  CHECK(after != 1);

  lln_running_head of_q[HK], of_k[HK];
  CHECK_OK(lln_running_get(running, of_q, of_k, HK));
  CHECK(close(of_q[0].weight, 0.1) && of_k[0].variance > 0);
  CHECK_INVALID(lln_running_get(running, of_q, of_k, 1), "heads is 1: the running moments have 2");
  CHECK_OK(lln_running_set(restored, of_q, of_k, HK));
  options.running = restored;
  alpha[0] = 0;
  CHECK_OK(lln_match_moments(&in, &out, &options, NULL, NULL));
  CHECK(alpha[0] == after);
  lln_running_destroy(running);
  lln_running_destroy(restored);
}

int main(void) {
  fill(q, B * H * N * D);
  fill(k, B * HK * N * D);
  for (int i = 0; i < B * HK * N * D; ++i) k[i] *= 1.0F + 0.3F * (float)(i / (N * D));
  test_moments();
  test_modes();
  test_report();
  test_tokens_that_count();
  test_running();
  return finish();
}
