# How everything is compiled: build type, warnings, sanitizers. Warnings are errors only where
# CMAKE_COMPILE_WARNING_AS_ERROR says so (preset ci), so that a newer compiler breaks no build.
# SPDX-License-Identifier: Apache-2.0

if(PROJECT_IS_TOP_LEVEL)
  get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(NOT multi_config AND NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
  endif()
  # The hot loops are vectors already; -O3 would only lengthen the build. Flags given by hand stay.
  if(CMAKE_CXX_FLAGS_RELEASE STREQUAL "-O3 -DNDEBUG")
    set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
  endif()
  set(CMAKE_CXX_EXTENSIONS OFF)
endif()

# For every target, the tests included: a sanitizer that sees half a program reports nonsense.
if(LLN_SANITIZE)
  list(JOIN LLN_SANITIZE "," sanitizers)
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${sanitizers};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${sanitizers})
endif()

function(lln_compile_options target)
  set(warnings
    -Wall -Wextra -Wshadow
    # The structs of the API are filled by name, and what is not named keeps its default.
    -Wno-missing-field-initializers)
  # Nothing reads errno after a math function, and without it sqrt is one instruction.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:C,CXX>:${warnings};-Wpedantic;-fno-math-errno>")
  # nvcc hands these to the host compiler; its own glue code is not pedantic.
  list(JOIN warnings "," warnings)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${warnings}>")
endfunction()
