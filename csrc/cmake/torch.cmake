# Finds torch's headers without torch's CMake package, which wants a CUDA toolkit as soon as torch has CUDA.
find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/find_torch.py
                OUTPUT_VARIABLE TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT TORCH_ROOT)
  message(FATAL_ERROR "torch_dcs_ops: torch's headers were not found; install torch >= 2.11 first and pass "
                      "--no-build-isolation to pip, or name torch's folder in TORCH_DIR, ${pure_python_hint}")
endif()
set(TORCH_VERSION "")
if(EXISTS ${TORCH_ROOT}/version.py)
  file(STRINGS ${TORCH_ROOT}/version.py version_line REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+[^'\"]*" TORCH_VERSION "${version_line}")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" release "${TORCH_VERSION}")
if(release AND release VERSION_LESS 2.11)
  message(FATAL_ERROR "torch_dcs_ops: torch >= 2.11 is needed, ${TORCH_ROOT} is ${TORCH_VERSION}; upgrade it and pass "
                      "--no-build-isolation to pip, ${pure_python_hint}")
endif()
message(STATUS "torch_dcs_ops: torch ${TORCH_VERSION} in ${TORCH_ROOT}")

add_library(dcs_torch INTERFACE)
target_include_directories(dcs_torch SYSTEM INTERFACE ${TORCH_ROOT}/include)
# The oldest torch the library loads into: nothing newer than 2.11's shims is declared.
target_compile_definitions(dcs_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000ULL)
