// The arguments of a C call as those of the C++ call: null pointers and constants out of range are
// collected, so that one Error names them all; everything else is checked behind this border.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "api/faults.h"
#include "c/status.h"
#include "lln/c.h"
#include "lln/lln.h"

struct lln_threads {
  lln::ThreadPool pool;
};

struct lln_running_moments {
  lln::RunningMoments value;
};

namespace lln::c {

class Arguments {
 public:
  explicit Arguments(const char* call) noexcept : call_(call) {}

  // Each conversion notes what is wrong and gives a default in its place.
  void required(const char* name, const void* pointer);
  void in_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most);
  void add(std::string fault) { faults_.add(std::move(fault)); }
  AttentionInputs inputs(const lln_attention_inputs* in);
  AttentionOutputs outputs(const lln_attention_outputs* out);
  AttentionGradients gradients(const lln_attention_gradients* grads);
  AttentionOptions options(const lln_attention_options* options);  // null: the defaults
  MomentsInputs moments(const lln_moments_inputs* in);
  MatchingInputs matching(const lln_matching_inputs* in);
  MatchingOutputs matching(const lln_matching_outputs* out);
  MatchingOptions matching(const lln_matching_options* options);  // null: the defaults
  DeviceRunningMoments running(const lln_device_running_moments* running);
  DecodeConfig decode(const lln_decode_config* config);
  Exec exec(const lln_exec* exec);  // null: the defaults
  Op op(lln_op op);
  Device device(const std::string& name, const lln_device& device);
  View output(const char* name, const lln_view& view);
  View required_output(const char* name, const lln_view* view);
  void text(const char* text, std::size_t size);

  // Throws where a conversion found a fault; called after all of them and before the work.
  void check() const { faults_.throw_any(call_, "its arguments"); }

 private:
  template <class Enum>
  Enum constant(const std::string& name, std::int32_t value, Enum last);
  ConstView input(const char* name, const lln_view& view);
  IndexView index(const char* name, const lln_index_view& view);
  MaskView mask(const char* name, const lln_mask_view& view);
  AttentionSaved saved(const lln_attention_saved& saved);

  const char* call_;
  Faults faults_;
  DeviceRunningMoments running_;  // that the options of matching point to
};

// Runs body(arguments); nothing that it throws gets further than this.
template <class Body>
lln_status guarded(const char* call, const Body& body) noexcept {
  try {
    Arguments arguments(call);
    body(arguments);
    return LLN_OK;
  } catch (const Error& e) {
    return fail(e.code(), "", e.what());
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::out_of_memory, call, "no memory");
  } catch (const std::length_error&) {  // of a vector: more than there can ever be
    return fail(ErrorCode::out_of_memory, call, "no memory");
  } catch (const std::exception& e) {
    return fail(ErrorCode::internal, call, e.what());
  } catch (...) {
    return fail(ErrorCode::internal, call, "an exception of unknown type");
  }
}

// As snprintf: see lln/c.h.
void put_text(const std::string& from, char* text, std::size_t size, std::size_t* length) noexcept;

}  // namespace lln::c
