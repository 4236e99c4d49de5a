# Install rules and the CMake package: find_package(lln CONFIG) gives lln::lln, and with COMPONENTS
# torch also lln::torch and lln::parallel where they were built; the same names that add_subdirectory
# gives.
# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

set(lln_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/lln")

install(TARGETS lln EXPORT lln-targets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
install(DIRECTORY include/lln DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h")
install(EXPORT lln-targets NAMESPACE lln:: DESTINATION "${lln_package_dir}")

if(TARGET lln_torch)
  set_target_properties(lln_torch PROPERTIES EXPORT_NAME torch)
  set_target_properties(lln_findings PROPERTIES EXPORT_NAME findings)
  set_target_properties(lln_parallel PROPERTIES EXPORT_NAME parallel)
  install(TARGETS lln_torch lln_parallel lln_findings EXPORT lln-torch-targets
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  install(DIRECTORY lln_torch/ops DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/lln_torch"
    FILES_MATCHING PATTERN "*.h" PATTERN "handles.h" EXCLUDE)
  install(DIRECTORY lln_torch/parallel DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/lln_torch"
    FILES_MATCHING PATTERN "*.h" PATTERN "gloo_types.h" EXCLUDE PATTERN "sequence_call.h" EXCLUDE)
  install(EXPORT lln-torch-targets NAMESPACE lln:: DESTINATION "${lln_package_dir}")
  install(FILES cmake/LlnTorch.cmake DESTINATION "${lln_package_dir}")
endif()

if(TARGET lln_cli)
  set_target_properties(lln_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS lln_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
if(TARGET lln_torch_cli)
  # The libraries of torch stay where they were found.
  set_target_properties(lln_torch_cli PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${LLN_TORCH_FOUND}/lib")
  install(TARGETS lln_torch_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

# A static library leaves its dependencies to the program that links it; a shared one brings them.
get_target_property(lln_type lln TYPE)
if(lln_type STREQUAL "STATIC_LIBRARY")
  set(LLN_STATIC TRUE)
else()
  set(LLN_STATIC FALSE)
endif()
configure_package_config_file(cmake/lln-config.cmake.in
  "${CMAKE_CURRENT_BINARY_DIR}/lln-config.cmake" INSTALL_DESTINATION "${lln_package_dir}")

# Before 1.0 the interface may change with every minor version.
if(PROJECT_VERSION VERSION_LESS 1.0)
  set(lln_compatibility SameMinorVersion)
else()
  set(lln_compatibility SameMajorVersion)
endif()
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/lln-config-version.cmake"
  COMPATIBILITY ${lln_compatibility})
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/lln-config.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/lln-config-version.cmake"
  DESTINATION "${lln_package_dir}")
