# The parts that may be left out of a build, CUDA and LibTorch: AUTO, ON or OFF, and the reason that
# `lln info` gives for a part that is not there. This version has neither, so only ON can fail.
# SPDX-License-Identifier: Apache-2.0

# Sets <option>_REASON in the caller's scope. The values are compared as strings: AUTO is truthy.
function(lln_resolve_part option what)
  if("${${option}}" STREQUAL "ON")
    message(FATAL_ERROR
      "${option}=ON, but lln ${PROJECT_VERSION} has no ${what}: use AUTO or OFF")
  elseif("${${option}}" STREQUAL "OFF")
    set(reason "switched off by ${option}=OFF")
  elseif("${${option}}" STREQUAL "AUTO")
    set(reason "version ${PROJECT_VERSION} has no ${what}")
  else()
    message(FATAL_ERROR "${option} must be AUTO, ON or OFF, found \"${${option}}\"")
  endif()
  set(${option}_REASON "${reason}" PARENT_SCOPE)
endfunction()

lln_resolve_part(LLN_CUDA "CUDA kernels")
lln_resolve_part(LLN_TORCH "LibTorch layer")

# Hands the reasons to the one file that reports them, so that changing them recompiles only that.
function(lln_define_parts target)
  set_property(SOURCE src/api/build_info.cc TARGET_DIRECTORY ${target}
    APPEND PROPERTY COMPILE_DEFINITIONS
    "LLN_CUDA_REASON=\"${LLN_CUDA_REASON}\"" "LLN_TORCH_REASON=\"${LLN_TORCH_REASON}\"")
endfunction()
