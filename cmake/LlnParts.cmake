# The parts that may be left out of a build, CUDA and LibTorch: AUTO, ON or OFF, and the reason that
# `lln info` gives for a part that is not there. The values are compared as strings: AUTO is truthy.
# SPDX-License-Identifier: Apache-2.0

foreach(option LLN_CUDA LLN_TORCH)
  if(NOT "${${option}}" MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${option} must be AUTO, ON or OFF, found \"${${option}}\"")
  endif()
endforeach()

# CUDA: an nvcc that CMAKE_CUDA_COMPILER or the environment's CUDACXX names, one on the path, or one
# where NVIDIA's installer puts it. LLN_CUDA_REASON is empty where CUDA is built.
if(LLN_CUDA STREQUAL "OFF")
  set(LLN_CUDA_REASON "switched off by LLN_CUDA=OFF")
else()
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(LLN_NVCC nvcc PATHS /usr/local/cuda/bin DOC "The CUDA compiler that was found")
    mark_as_advanced(LLN_NVCC)
    if(LLN_NVCC)
      set(ENV{CUDACXX} "${LLN_NVCC}")
    endif()
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Code for Ampere and Hopper, and PTX that the driver compiles for everything newer.
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;80-virtual")
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(LLN_CUDA_REASON "")
  elseif(LLN_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "LLN_CUDA=ON, but no working nvcc was found: name one by CMAKE_CUDA_COMPILER or CUDACXX")
  else()
    set(LLN_CUDA_REASON "no working nvcc was found when it was configured")
  endif()
endif()
if(LLN_CUDA_REASON STREQUAL "")
  set(LLN_CUDA_BUILT TRUE)
else()
  set(LLN_CUDA_BUILT FALSE)
endif()

# LibTorch: the wheel that LLN_TORCH_FOLDER names, that of build/venv, or that of python3; and what the
# layer over it is made with. LLN_TORCH_REASON is empty where it is built, and has no semicolon: it
# becomes one of a list of definitions.
include(LlnTorch)
set(LLN_TORCH_REASON "")
if(LLN_TORCH STREQUAL "OFF")
  set(LLN_TORCH_REASON "switched off by LLN_TORCH=OFF")
else()
  lln_find_torch(LLN_TORCH_FOUND)
  find_package(tomlplusplus QUIET)
  find_package(JPEG QUIET)
  find_package(ICU QUIET COMPONENTS uc)
  find_package(LibArchive QUIET)
  find_library(LLN_SENTENCEPIECE sentencepiece)
  find_library(LLN_SENTENCEPIECE_TRAIN sentencepiece_train)
  mark_as_advanced(LLN_SENTENCEPIECE LLN_SENTENCEPIECE_TRAIN)
  if(NOT LLN_TORCH_FOUND)
    set(LLN_TORCH_REASON "no torch wheel was found when it was configured: make torch installs one")
  elseif(NOT tomlplusplus_FOUND OR NOT JPEG_FOUND OR NOT ICU_FOUND OR NOT LibArchive_FOUND
      OR NOT LLN_SENTENCEPIECE OR NOT LLN_SENTENCEPIECE_TRAIN)
    set(LLN_TORCH_REASON "toml++, SentencePiece, ICU, libjpeg or libarchive is missing: \
make torch installs them")
  endif()
  if(LLN_TORCH STREQUAL "ON" AND NOT LLN_TORCH_REASON STREQUAL "")
    message(FATAL_ERROR "LLN_TORCH=ON, but ${LLN_TORCH_REASON}")
  endif()
endif()
if(LLN_TORCH_REASON STREQUAL "")
  set(LLN_TORCH_BUILT TRUE)
  lln_import_torch("${LLN_TORCH_FOUND}")
  lln_torch_version("${LLN_TORCH_FOUND}" LLN_TORCH_VERSION)
else()
  set(LLN_TORCH_BUILT FALSE)
  set(LLN_TORCH_VERSION "")
endif()

# Hands what was found to the files that report it, so that changing it recompiles only those.
function(lln_define_parts target)
  set_property(SOURCE src/api/build_info.cc TARGET_DIRECTORY ${target}
    APPEND PROPERTY COMPILE_DEFINITIONS "LLN_TORCH_REASON=\"${LLN_TORCH_REASON}\"")
  if(LLN_CUDA_BUILT)
    list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
    set_property(SOURCE src/cuda/host.cc TARGET_DIRECTORY ${target}
      APPEND PROPERTY COMPILE_DEFINITIONS
      "LLN_CUDA_TOOLKIT=\"${CUDAToolkit_VERSION}\"" "LLN_CUDA_ARCHITECTURES=\"${architectures}\"")
  else()
    set_property(SOURCE src/cuda/host_absent.cc TARGET_DIRECTORY ${target}
      APPEND PROPERTY COMPILE_DEFINITIONS "LLN_CUDA_REASON=\"${LLN_CUDA_REASON}\"")
  endif()
endfunction()
