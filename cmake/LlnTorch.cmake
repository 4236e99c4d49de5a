# LibTorch out of a torch wheel: imported targets from its include and lib folders. torch's own CMake
# package is not used: it fails without a CUDA toolkit and with CMake 3.25. Installed beside
# lln-config.cmake, for users of lln::torch.
#   lln_find_torch(FOLDER_VARIABLE)             the folder of the torch package, or empty
#   lln_torch_version(FOLDER VERSION_VARIABLE)  its version
#   lln_import_torch(FOLDER)                    the target lln_libtorch
# SPDX-License-Identifier: Apache-2.0

set(LLN_TORCH_FOLDER "" CACHE PATH
  "The folder of the torch package, with include and lib; empty: that of build/venv, or of python3")

function(lln_find_torch result)
  set(candidates "${LLN_TORCH_FOLDER}")
  if(NOT LLN_TORCH_FOLDER)
    file(GLOB candidates "${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/torch")
    find_program(LLN_PYTHON3 python3)
    mark_as_advanced(LLN_PYTHON3)
    if(NOT candidates AND LLN_PYTHON3)
      execute_process(
        COMMAND "${LLN_PYTHON3}" -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE candidates OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
  foreach(folder IN LISTS candidates)
    if(EXISTS "${folder}/include/torch/csrc/stable/library.h"
        AND EXISTS "${folder}/include/torch/csrc/api/include/torch/nn/module.h"
        AND EXISTS "${folder}/lib/libtorch_cpu.so")
      set(${result} "${folder}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

function(lln_torch_version folder result)
  file(READ "${folder}/version.py" text)
  string(REGEX MATCH "__version__ = '([^']*)'" text "${text}")
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

function(lln_import_torch folder)
  # Imported: an installed lln::torch names it, and finds it again where it is used.
  add_library(lln_libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(lln_libtorch SYSTEM INTERFACE
    "${folder}/include" "${folder}/include/torch/csrc/api/include")
  # libstdc++ before it: libtorch carries functions of std::filesystem out of the compiler that it was
  # built with, and a program that finds those first jumps into nothing (remove_all of torch 2.11).
  # libtorch.so stands for the CPU part and, where the wheel has one, the CUDA part; nothing of ours
  # refers to the latter, so the linker would drop it.
  target_link_libraries(lln_libtorch INTERFACE
    -Wl,--push-state,--no-as-needed stdc++ "${folder}/lib/libtorch.so" -Wl,--pop-state
    "${folder}/lib/libtorch_cpu.so" "${folder}/lib/libc10.so")
  # torch brings headers of a newer fmt than the system has a library of.
  target_compile_definitions(lln_libtorch INTERFACE FMT_HEADER_ONLY)
  target_compile_features(lln_libtorch INTERFACE cxx_std_20)
endfunction()
