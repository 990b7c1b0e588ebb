# dcs_setting(NAME default): the CMake define NAME, else the environment variable NAME, else the default. Not cached from
# the environment, so a build folder that is used again follows a changed variable.
macro(dcs_setting name default)
  if(NOT DEFINED ${name})
    if(DEFINED ENV{${name}} AND NOT "$ENV{${name}}" STREQUAL "")
      set(${name} "$ENV{${name}}")
    else()
      set(${name} "${default}")
    endif()
  endif()
endmacro()

# dcs_write_build_info(cuda_omitted): installs torch_dcs_ops/_build_info.json, which says what was compiled and, if
# `cuda_omitted` is not empty, why CUDA was not. A pure-Python build has no such file.
function(dcs_write_build_info cuda_omitted)
  set(cpu "{\"built\": true, \"reason\": null, \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\"}")
  if(cuda_omitted)
    string(REPLACE "\"" "'" reason "${cuda_omitted}")
    set(cuda "{\"built\": false, \"reason\": \"${reason}\", \"compiler\": null, \"architectures\": []}")
  else()
    list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "(.+)" "\"\\1\"" OUTPUT_VARIABLE architectures)
    list(JOIN architectures ", " architectures)
    set(cuda "{\"built\": true, \"reason\": null, \"compiler\": \"nvcc ${CMAKE_CUDA_COMPILER_VERSION}\",")
    string(APPEND cuda " \"architectures\": [${architectures}]}")
  endif()
  file(
    CONFIGURE
    OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_build_info.json
    CONTENT
      [[{
  "version": "@SKBUILD_PROJECT_VERSION@",
  "built_with_torch": "@TORCH_VERSION@",
  "needs_torch": "2.11",
  "cpu": @cpu@,
  "cuda": @cuda@
}
]]
    @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_build_info.json DESTINATION torch_dcs_ops)
endfunction()
