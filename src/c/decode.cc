// The decode state for C.
// SPDX-License-Identifier: Apache-2.0
#include "lln/decode.h"

#include <fmt/format.h>

#include "c/arguments.h"

using lln::c::Arguments;
using lln::c::guarded;

struct lln_decode_state {
  lln::DecodeState value;
};

namespace {

lln_decode_config to_c(const lln::DecodeConfig& from) {
  return {.batch = from.batch,
          .heads = from.heads,
          .heads_k = from.heads_k,
          .dim = from.dim,
          .dim_v = from.dim_v,
          .diag_block = from.diag_block,
          .kind = static_cast<lln_kind>(from.kind),
          .feature = static_cast<lln_feature>(from.feature),
          .power = from.power,
          .mix = from.mix};
}

lln_status state_bytes(const char* call, const lln_decode_config* config, lln_device device,
                       size_t* bytes) {
  return guarded(call, [&](Arguments& arguments) {
    const lln::DecodeConfig from = arguments.decode(config);
    const lln::Device where = arguments.device("state", device);
    arguments.required("bytes", bytes);
    arguments.check();
    *bytes = lln::decode_state_bytes(from, where);
  });
}

lln_status create(const char* call, const lln_decode_config* config, void* memory, size_t bytes,
                  lln_device device, void* stream, lln_decode_state** state) {
  return guarded(call, [&](Arguments& arguments) {
    const lln::DecodeConfig from = arguments.decode(config);
    const lln::Device where = arguments.device("state", device);
    arguments.required("memory", memory);
    arguments.required("state", state);
    arguments.check();
    *state = new lln_decode_state{
        lln::DecodeState(from, {static_cast<std::byte*>(memory), bytes}, where, stream)};
  });
}

}  // namespace

lln_status lln_decode_config_init(lln_decode_config* config) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("config", config);
    arguments.check();
    *config = to_c(lln::DecodeConfig());
  });
}

lln_status lln_decode_state_bytes(const lln_decode_config* config, size_t* bytes) {
  return state_bytes(__func__, config, {LLN_DEVICE_CPU, 0}, bytes);
}

lln_status lln_decode_state_bytes_on(const lln_decode_config* config, lln_device device,
                                     size_t* bytes) {
  return state_bytes(__func__, config, device, bytes);
}

lln_status lln_decode_create(const lln_decode_config* config, void* memory, size_t bytes,
                             lln_decode_state** state) {
  return create(__func__, config, memory, bytes, {LLN_DEVICE_CPU, 0}, nullptr, state);
}

lln_status lln_decode_create_on(const lln_decode_config* config, void* memory, size_t bytes,
                                lln_device device, void* stream, lln_decode_state** state) {
  return create(__func__, config, memory, bytes, device, stream, state);
}

void lln_decode_destroy(lln_decode_state* state) { delete state; }

lln_status lln_decode_get_config(const lln_decode_state* state, lln_decode_config* config) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("config", config);
    arguments.check();
    *config = to_c(state->value.config());
  });
}

lln_status lln_decode_tokens(const lln_decode_state* state, int64_t sequence, int64_t* tokens) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("tokens", tokens);
    arguments.check();
    *tokens = state->value.tokens(sequence);
  });
}

lln_status lln_decode_reset(lln_decode_state* state) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.check();
    state->value.reset();
  });
}

lln_status lln_decode_reset_sequence(lln_decode_state* state, int64_t sequence) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.check();
    state->value.reset(sequence);
  });
}

lln_status lln_decode_append(lln_decode_state* state, const lln_attention_inputs* in,
                             const lln_view* o, const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::View rows = o == nullptr ? lln::View() : arguments.output("o", *o);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    state->value.append(inputs, rows, how);
  });
}

lln_status lln_decode_read(const lln_decode_state* state, const lln_attention_inputs* in,
                           const lln_view* o, const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::View rows = arguments.required_output("o", o);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    state->value.read(inputs, rows, how);
  });
}

lln_status lln_decode_step(lln_decode_state* state, const lln_attention_inputs* in,
                           const lln_view* o, const lln_exec* exec) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    const lln::AttentionInputs inputs = arguments.inputs(in);
    const lln::View rows = arguments.required_output("o", o);
    const lln::Exec how = arguments.exec(exec);
    arguments.check();
    state->value.step(inputs, rows, how);
  });
}

lln_status lln_decode_merge(lln_decode_state* state, const lln_decode_state* later) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("later", later);
    arguments.check();
    state->value.merge(later->value);
  });
}

lln_status lln_decode_copy(lln_decode_state* state, const lln_decode_state* from) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("from", from);
    arguments.check();
    state->value.copy_from(from->value);
  });
}

lln_status lln_decode_saved_bytes(const lln_decode_state* state, size_t* bytes) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("bytes", bytes);
    arguments.check();
    *bytes = state->value.saved_bytes();
  });
}

lln_status lln_decode_save(const lln_decode_state* state, void* out, size_t bytes) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("out", out);
    arguments.check();
    state->value.save({static_cast<std::byte*>(out), bytes});
  });
}

lln_status lln_decode_load(lln_decode_state* state, const void* saved, size_t bytes) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("state", state);
    arguments.required("saved", saved);
    arguments.check();
    state->value.load({static_cast<const std::byte*>(saved), bytes});
  });
}

lln_status lln_decode_saved_config(const void* saved, size_t bytes, lln_decode_config* config) {
  return guarded(__func__, [&](Arguments& arguments) {
    arguments.required("saved", saved);
    arguments.required("config", config);
    arguments.check();
    *config = to_c(lln::saved_decode_config({static_cast<const std::byte*>(saved), bytes}));
  });
}
