# Installs BUILD into an empty prefix, builds examples/ as an outside project against it, with
# find_package(lln CONFIG), and runs what came out: the examples in C++ and C, and the installed
# program.
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
endif()
