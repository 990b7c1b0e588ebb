# Finds the compilers. A missing C++ compiler stops the build; a missing nvcc leaves CUDA out and says so; one that is
# there but broken stops the build, since a library that is silently absent is found out much later.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "torch_dcs_ops: no C++ compiler was found; install one (g++ or clang++) or name it in CXX, "
                      "${pure_python_hint}")
endif()
enable_language(CXX)
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  message(FATAL_ERROR "torch_dcs_ops: the compiled kernels are for Linux on x86-64, this is ${CMAKE_SYSTEM_NAME} on "
                      "${CMAKE_SYSTEM_PROCESSOR}; ${pure_python_hint}")
endif()

set(DCS_CUDA_OMITTED "")
set(oldest_nvcc 12.0)
if(DCS_CUDA STREQUAL "OFF" OR DCS_CUDA STREQUAL "0")
  set(DCS_CUDA_OMITTED "DCS_CUDA=OFF was set")
else()
  unset(nvcc_path CACHE)
  # $ENV{CUDACXX} first: it is what enable_language(CUDA) honors.
  find_program(
    nvcc_path
    NAMES $ENV{CUDACXX} ${CMAKE_CUDA_COMPILER} nvcc
    HINTS ENV CUDA_PATH ENV CUDA_HOME ENV CUDAToolkit_ROOT
    PATHS ${DCS_CUDA_ROOT}
    PATH_SUFFIXES bin
    NO_CMAKE_SYSTEM_PATH)
  if(NOT nvcc_path)
    set(DCS_CUDA_OMITTED "nvcc was not found when the package was built")
  else()
    execute_process(COMMAND ${nvcc_path} --version OUTPUT_VARIABLE nvcc_banner COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${nvcc_banner}")
    set(nvcc_release "${CMAKE_MATCH_1}")
    if(nvcc_release VERSION_LESS oldest_nvcc)
      set(DCS_CUDA_OMITTED "nvcc ${nvcc_release} is older than ${oldest_nvcc}")
    elseif(DCS_CUDA STREQUAL "GPU")
      execute_process(COMMAND nvidia-smi -L RESULT_VARIABLE no_gpu OUTPUT_QUIET ERROR_QUIET)
      if(no_gpu)
        set(DCS_CUDA_OMITTED "nvcc was found, but no GPU; DCS_CUDA=ON builds it all the same")
      endif()
    endif()
  endif()
endif()

if(DCS_CUDA_OMITTED AND (DCS_CUDA STREQUAL "ON" OR DCS_CUDA STREQUAL "1"))
  message(FATAL_ERROR "torch_dcs_ops: DCS_CUDA=ON, but ${DCS_CUDA_OMITTED}; install the CUDA toolkit >= ${oldest_nvcc} "
                      "or name nvcc in CUDACXX")
elseif(DCS_CUDA_OMITTED)
  message(NOTICE "torch_dcs_ops: the CUDA library is left out: ${DCS_CUDA_OMITTED}. The CPU library is built; on a GPU "
                 "the Triton kernels serve.")
else()
  set(DCS_CUDA_COMPRESSION balance)
  if(DCS_CUDA_ARCHITECTURES STREQUAL "release")
    set(DCS_CUDA_COMPRESSION size)  # a quarter of the bytes, for an eighth of the build's time
    # 100-virtual is the PTX that later GPUs compile at load time; nvcc knows sm_100 since 12.8.
    if(nvcc_release VERSION_LESS 12.8)
      set(DCS_CUDA_ARCHITECTURES "80-real;90-real;90-virtual")
    else()
      set(DCS_CUDA_ARCHITECTURES "80-real;90-real;100-real;100-virtual")
    endif()
  endif()
  set(CMAKE_CUDA_COMPILER ${nvcc_path})
  set(CMAKE_CUDA_ARCHITECTURES ${DCS_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  message(STATUS "torch_dcs_ops: CUDA library for ${CMAKE_CUDA_ARCHITECTURES} with nvcc ${nvcc_release}")
endif()
