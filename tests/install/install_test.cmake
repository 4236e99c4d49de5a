# Installs BUILD into an empty prefix, builds examples/ as an outside project against it, with
# find_package(lln CONFIG), and runs what came out: the examples in C++ and C, and the installed
# program. Where TORCH names a torch package, the same with the component torch.
# SPDX-License-Identifier: Apache-2.0
function(run)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
  message("${output}")
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "exit ${result}: ${command}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${SCRATCH}")
set(prefix "${SCRATCH}/prefix")
run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${prefix}" --config "${CONFIG}")

run(${CMAKE_COMMAND} -S "${SOURCE}/examples" -B "${SCRATCH}/build" -G "${GENERATOR}"
  -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_C_COMPILER=${C_COMPILER} -D CMAKE_BUILD_TYPE=${CONFIG} -D CMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build "${SCRATCH}/build" --config "${CONFIG}")
foreach(example hello streaming_decoder streaming_decoder_c)
  run("${SCRATCH}/build/${example}")
  if(output STREQUAL "")
    message(FATAL_ERROR "${example} printed nothing")
  endif()
endforeach()

# The package found must be the one installed here, not one that the machine had already.
file(STRINGS "${SCRATCH}/build/CMakeCache.txt" found REGEX "^lln_DIR:")
if(NOT found MATCHES "${prefix}/")
  message(FATAL_ERROR "find_package took another package: ${found}")
endif()

if(EXISTS "${prefix}/bin/lln")
  file(READ "${prefix}/share/lln/report.html" template)
  if(NOT template MATCHES "@DATA@")
    message(FATAL_ERROR "the installed report.html has no place for data")
  endif()
  run("${prefix}/bin/lln" --version)
  if(NOT output MATCHES "${VERSION}")
    message(FATAL_ERROR "lln --version does not say ${VERSION}: ${output}")
  endif()
  if(TORCH)
    run("${prefix}/bin/lln" zoo)
  endif()
endif()

# configure_torch(VARIABLE ARGUMENTS...): an outside project that wants lln::torch; its output, and
# "0" in VARIABLE where it was configured.
function(configure_torch result)
  execute_process(COMMAND ${CMAKE_COMMAND} --fresh -S "${SOURCE}/tests/install/torch"
      -B "${SCRATCH}/torch" -G "${GENERATOR}" -D CMAKE_CXX_COMPILER=${COMPILER}
      -D CMAKE_BUILD_TYPE=Debug -D CMAKE_PREFIX_PATH=${prefix} ${ARGN}
    OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  message("${text}")
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  set(output "${text}" PARENT_SCOPE)
  set(${result} "${status}" PARENT_SCOPE)
endfunction()

if(NOT TORCH)
  configure_torch(status)
  if(status EQUAL 0 OR NOT output MATCHES "this lln was built without LibTorch")
    message(FATAL_ERROR "the component torch was not refused with its reason")
  endif()
  return()
endif()

# Another version of torch is refused: a folder that has all files and another number.
set(other "${SCRATCH}/other_torch")
foreach(file include/torch/csrc/stable/library.h
    include/torch/csrc/api/include/torch/nn/module.h lib/libtorch_cpu.so)
  file(WRITE "${other}/${file}" "")
endforeach()
file(WRITE "${other}/version.py" "__version__ = '1.2.3+cpu'\n")
configure_torch(status -D LLN_TORCH_FOLDER=${other})
if(status EQUAL 0 OR NOT output MATCHES "is torch 1.2.3, and lln::torch was built with")
  message(FATAL_ERROR "another version of torch was not refused with its reason")
endif()
configure_torch(status -D LLN_TORCH_FOLDER=${SCRATCH}/nowhere)
if(status EQUAL 0 OR NOT output MATCHES "no torch package was found: let LLN_TORCH_FOLDER name")
  message(FATAL_ERROR "a torch that is missing was not refused with its reason")
endif()

configure_torch(status -D LLN_TORCH_FOLDER=${TORCH})
if(NOT status EQUAL 0)
  message(FATAL_ERROR "find_package(lln COMPONENTS torch) failed")
endif()
run(${CMAKE_COMMAND} --build "${SCRATCH}/torch")
run("${SCRATCH}/torch/uses_lln_torch")
if(NOT output MATCHES "k has shape .1, 2, 64, 8.: expected .1, 2, 64, 16.")
  message(FATAL_ERROR "the error of the core did not arrive: ${output}")
endif()
