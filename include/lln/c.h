// The library for C, and for every language that can call C: the calls of the C++ headers under C
// names, field by field. What a call computes is said there; here is what C needs besides.
//
// - Every call returns a status. Where it is not LLN_OK, nothing was written, and
//   lln_last_error() has the text. No exception leaves the library.
// - Structs are passed by pointer and hold nothing: all memory behind them is the caller's and is
//   used during the call alone. A struct of zeros is valid; where its defaults are not zero, a
//   function lln_..._init sets them. A view of zeros means "not given".
// - `options` and `exec` may be null and mean the defaults then. Every other pointer is required
//   unless its comment says "or null"; one that is missing is LLN_ERROR_INVALID_ARGUMENT.
// - Handles come from lln_..._create and go to lln_..._destroy, which takes null too. One handle
//   is used by one thread at a time; lln_threads may be shared by calls on several threads.
// SPDX-License-Identifier: Apache-2.0
#ifndef LLN_C_H_
#define LLN_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Types of the constants below have 32 bits in every compiler, which an enum has not.
typedef int32_t lln_status;
enum {
  LLN_OK = 0,
  LLN_ERROR_INVALID_ARGUMENT = 1,  // the request contradicts itself or the data it points to
  LLN_ERROR_UNSUPPORTED = 2,       // a legal request that no kernel of this build takes
  LLN_ERROR_OUT_OF_MEMORY = 3,
  LLN_ERROR_DEVICE = 4,
  LLN_ERROR_IO = 5,
  LLN_ERROR_INTERNAL = 6  // a bug in the library
};

typedef int32_t lln_dtype;
enum { LLN_DTYPE_F32 = 0, LLN_DTYPE_F16 = 1, LLN_DTYPE_BF16 = 2, LLN_DTYPE_F64 = 3 };

typedef int32_t lln_device_kind;
enum { LLN_DEVICE_CPU = 0, LLN_DEVICE_CUDA = 1 };

typedef int32_t lln_op;
enum {
  LLN_OP_FORWARD = 0,
  LLN_OP_BACKWARD = 1,
  LLN_OP_APPEND = 2,
  LLN_OP_STEP = 3,
  LLN_OP_TRAIN = 4
};

typedef int32_t lln_kind;
enum { LLN_KIND_LLN = 0, LLN_KIND_DIAG = 1, LLN_KIND_LLN_DIAG = 2, LLN_KIND_SOFTMAX = 3 };

typedef int32_t lln_feature;
enum {
  LLN_FEATURE_EXP = 0,
  LLN_FEATURE_ELU = 1,
  LLN_FEATURE_RELU = 2,
  LLN_FEATURE_SOFTPLUS = 3,
  LLN_FEATURE_POWER = 4
};

typedef int32_t lln_matching;
enum {
  LLN_MATCHING_NONE = 0,
  LLN_MATCHING_PAPER = 1,
  LLN_MATCHING_PER_HEAD = 2,
  LLN_MATCHING_FROZEN = 3,
  LLN_MATCHING_EMA = 4,
  LLN_MATCHING_EXACT = 5,
  LLN_MATCHING_ENTROPY = 6
};

const char* lln_version(void);                   // of the library that is linked: "0.1.0"
const char* lln_status_name(lln_status status);  // "invalid_argument"; "?" for what is no status
// Text of the last call that failed on this thread, "" where none has; lives until the next fails.
const char* lln_last_error(void);

// ---- Views of the caller's memory (lln/tensor.h) ----

typedef struct lln_device {
  lln_device_kind kind;
  int32_t index;
} lln_device;

// [batch, head, token, channel], strides in elements. Memory of inputs is never written.
typedef struct lln_view {
  void* data;
  int64_t shape[4];
  int64_t stride[4];
  lln_dtype dtype;
  lln_device device;
} lln_view;

// Integers of 32 bits, or of 64 where `wide` is not 0. Null data and a count of 0: not given.
typedef struct lln_index_view {
  const void* data;
  int64_t count;
  int32_t wide;
  lln_device device;
} lln_index_view;

// One byte per key, not 0 where the key is valid: [batch, token].
typedef struct lln_mask_view {
  const uint8_t* data;
  int64_t shape[2];
  int64_t stride[2];
  lln_device device;
} lln_mask_view;

// A contiguous view of host memory.
static inline lln_view lln_view_of(const void* data, lln_dtype dtype, int64_t batch, int64_t heads,
                                   int64_t tokens, int64_t channels) {
  lln_view view = {(void*)data,
                   {batch, heads, tokens, channels},
                   {heads * tokens * channels, tokens * channels, channels, 1},
                   dtype,
                   {LLN_DEVICE_CPU, 0}};
  return view;
}

// ---- How a call is carried out (lln/exec.h) ----

typedef struct lln_threads lln_threads;                               // a fixed set of threads
lln_status lln_threads_create(int32_t count, lln_threads** threads);  // 0: one per hardware thread
void lln_threads_destroy(lln_threads* threads);
int32_t lln_threads_count(const lln_threads* threads);  // 0 for null

typedef struct lln_exec {
  lln_threads* threads;    // or null: the calling thread alone
  void* workspace;         // or null: allocated and freed inside the call; where the tensors are
  size_t workspace_bytes;  // of workspace
  const char* kernel;      // or null: the first kernel that takes the problem
  void* stream;            // a CUDA stream, null: the default one; ignored on the CPU
} lln_exec;

// ---- Attention (lln/attention.h) ----

typedef struct lln_attention_options {
  lln_kind kind;
  lln_feature feature;
  int64_t diag_block;
  int32_t causal;  // a truth value
  float power;
  float mix;
} lln_attention_options;

typedef struct lln_attention_inputs {
  lln_view q, k, v;
  lln_view alpha, beta;
  lln_view mix, lln_weight, diag_weight;
  lln_index_view key_lengths;
  lln_mask_view key_mask;
  lln_index_view cu_seqlens_q, cu_seqlens_k;
} lln_attention_inputs;

typedef struct lln_attention_saved {
  lln_view key_lse, channel_values;
} lln_attention_saved;

typedef struct lln_attention_outputs {
  lln_view o;
  lln_attention_saved saved;
} lln_attention_outputs;

typedef struct lln_attention_gradients {
  lln_view g;
  lln_attention_saved saved;
  lln_view dq, dk, dv;
  lln_view dalpha, dbeta;
  lln_view dmix, dlln_weight, ddiag_weight;
} lln_attention_gradients;

lln_status lln_attention_options_init(lln_attention_options* options);
lln_status lln_attention_forward(const lln_attention_inputs* in, const lln_attention_outputs* out,
                                 const lln_attention_options* options, const lln_exec* exec);
lln_status lln_attention_backward(const lln_attention_inputs* in,
                                  const lln_attention_gradients* grads,
                                  const lln_attention_options* options, const lln_exec* exec);

// ---- Problems (lln/problem.h) ----
// A text goes into `text` as snprintf puts it there: at most `size` bytes, cut where it is longer
// and closed by a zero byte. *length, or null, gets the length of the whole text. With a size of 0
// `text` may be null: that asks for the length alone.

// The problem text of a call, with all its views checked.
lln_status lln_forward_problem(const lln_attention_inputs* in, const lln_attention_outputs* out,
                               const lln_attention_options* options, char* text, size_t size,
                               size_t* length);
lln_status lln_backward_problem(const lln_attention_inputs* in,
                                const lln_attention_gradients* grads,
                                const lln_attention_options* options, char* text, size_t size,
                                size_t* length);
// Scratch memory that is enough for every call of a problem with these threads and this kernel; of
// exec nothing else counts. Without a workspace a call takes what it needs, which may be less.
lln_status lln_workspace_bytes(const char* problem, const lln_exec* exec, size_t* bytes);
lln_status lln_explain(const char* problem, const lln_exec* exec, char* text, size_t size,
                       size_t* length);
// All kernels of an operation in order of preference, one to a line.
lln_status lln_kernel_names(lln_op op, char* text, size_t size, size_t* length);

// ---- Moment matching (lln/moments.h) ----

typedef struct lln_moments {
  double count, mean, m2;
} lln_moments;

typedef struct lln_moments_inputs {
  lln_view x;
  lln_index_view lengths;
  lln_mask_view mask;
  lln_index_view cu_seqlens;
} lln_moments_inputs;

// out[s * heads + h]; count is sequences * heads.
lln_status lln_head_moments(const lln_moments_inputs* in, lln_moments* out, size_t count,
                            const lln_exec* exec);
lln_status lln_merge_moments(const lln_moments* first, const lln_moments* second,
                             lln_moments* merged);

typedef struct lln_matching_constants {
  double a, b;
} lln_matching_constants;
lln_status lln_matching_constants_of(int64_t dim, lln_matching_constants* constants);

// Running moments of mode ema. Their numbers are stored with a model by get and come back by set;
// both move `heads` entries of q and of k, one per key head, none before the first step.
typedef struct lln_running_moments lln_running_moments;
typedef struct lln_running_head {
  double weight, mean, variance;
} lln_running_head;
lln_status lln_running_create(double decay, lln_running_moments** running);  // 0.99 is usual
void lln_running_destroy(lln_running_moments* running);
size_t lln_running_heads(const lln_running_moments* running);  // 0 for null
lln_status lln_running_get(const lln_running_moments* running, lln_running_head* q,
                           lln_running_head* k, size_t heads);
lln_status lln_running_set(lln_running_moments* running, const lln_running_head* q,
                           const lln_running_head* k, size_t heads);

// The same in memory of the device of q and k: f64 [1, 2, heads_k, 3], contiguous, all zero before
// the first step.
typedef struct lln_device_running_moments {
  double decay;  // 0.99 is usual
  lln_view heads;
} lln_device_running_moments;

typedef struct lln_matching_inputs {
  lln_view q, k;
  lln_view alpha, beta;
  lln_index_view key_lengths;
  lln_mask_view key_mask, query_mask;
  lln_index_view cu_seqlens_q, cu_seqlens_k;
  int32_t cross;  // a truth value
} lln_matching_inputs;

typedef struct lln_matching_options {
  lln_matching mode;
  lln_feature feature;
  int32_t causal;                           // a truth value
  const lln_matching_constants* constants;  // or null: those of the library
  const lln_running_moments* running;       // or null; mode ema with tensors in host memory
  const lln_device_running_moments* running_on_device;  // or null; mode ema with those of a device
} lln_matching_options;

typedef struct lln_matching_outputs {
  lln_view alpha, beta;
} lln_matching_outputs;

// A pair (sequence, key head) that a limit was applied to; -1 stands for all of them.
typedef struct lln_clamped_head {
  int64_t sequence, head_k;
  int32_t sigma_q, sigma_k, target, size;  // truth values
} lln_clamped_head;

typedef struct lln_matching_report {
  lln_matching_constants constants;  // set by the call
  lln_clamped_head* clamped;         // or null: memory for `capacity` entries, filled by the call
  size_t capacity;
  size_t count;  // set by the call: how many there are, which may be more than fit
} lln_matching_report;

lln_status lln_matching_options_init(lln_matching_options* options);
lln_status lln_match_moments(const lln_matching_inputs* in, const lln_matching_outputs* out,
                             const lln_matching_options* options,
                             lln_matching_report* report,  // or null
                             const lln_exec* exec);
lln_status lln_update_moments(lln_running_moments* running, const lln_matching_inputs* in,
                              const lln_exec* exec);
lln_status lln_update_device_moments(const lln_device_running_moments* running,
                                     const lln_matching_inputs* in, const lln_exec* exec);
// Scratch memory of match and update on a device; 0 on the CPU.
lln_status lln_matching_workspace_bytes(const lln_matching_inputs* in, size_t* bytes);

// ---- Decoding (lln/decode.h) ----

typedef struct lln_decode_config {
  int64_t batch, heads, heads_k, dim, dim_v;
  int64_t diag_block;
  lln_kind kind;
  lln_feature feature;
  float power;
  float mix;
} lln_decode_config;

typedef struct lln_decode_state lln_decode_state;

lln_status lln_decode_config_init(lln_decode_config* config);
lln_status lln_decode_state_bytes(const lln_decode_config* config, size_t* bytes);
// `memory` is aligned to 64 bytes, has lln_decode_state_bytes() and stays alive and untouched until
// the state is destroyed, which does not free it.
lln_status lln_decode_create(const lln_decode_config* config, void* memory, size_t bytes,
                             lln_decode_state** state);
// The same in memory of a device. `stream` is a CUDA stream, or null: the default one.
lln_status lln_decode_state_bytes_on(const lln_decode_config* config, lln_device device,
                                     size_t* bytes);
lln_status lln_decode_create_on(const lln_decode_config* config, void* memory, size_t bytes,
                                lln_device device, void* stream, lln_decode_state** state);
void lln_decode_destroy(lln_decode_state* state);
lln_status lln_decode_get_config(const lln_decode_state* state, lln_decode_config* config);
lln_status lln_decode_tokens(const lln_decode_state* state, int64_t sequence, int64_t* tokens);
lln_status lln_decode_reset(lln_decode_state* state);
lln_status lln_decode_reset_sequence(lln_decode_state* state, int64_t sequence);
lln_status lln_decode_append(lln_decode_state* state, const lln_attention_inputs* in,
                             const lln_view* o,  // or null: no rows are read
                             const lln_exec* exec);
lln_status lln_decode_read(const lln_decode_state* state, const lln_attention_inputs* in,
                           const lln_view* o, const lln_exec* exec);
lln_status lln_decode_step(lln_decode_state* state, const lln_attention_inputs* in,
                           const lln_view* o, const lln_exec* exec);
lln_status lln_decode_merge(lln_decode_state* state, const lln_decode_state* later);
lln_status lln_decode_copy(lln_decode_state* state, const lln_decode_state* from);
lln_status lln_decode_saved_bytes(const lln_decode_state* state, size_t* bytes);
lln_status lln_decode_save(const lln_decode_state* state, void* out, size_t bytes);
lln_status lln_decode_load(lln_decode_state* state, const void* saved, size_t bytes);
lln_status lln_decode_saved_config(const void* saved, size_t bytes, lln_decode_config* config);

#ifdef __cplusplus
}
#endif

#endif
