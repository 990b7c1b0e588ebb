# What is built on a newer system loads where glibc is 2.28 and libstdc++ that of GCC 8 (manylinux_2_28):
# - libm's functions have the version that is asked for (manylinux/old_libm.h);
# - those that libstdc++'s headers take from a newer libstdc++ are in the module (manylinux/newer_functions.cpp);
# - those of threads and of dlopen, which libcudart_static calls, moved to libc.so.6 with 2.34, and have a newer version
#   there. The linker takes the version of the library in which it finds a function first. So libraries without code, of
#   the names that glibc's own had and with their versions, come before libc. Nothing but the linker reads them.
include(CheckCXXSourceCompiles)
check_cxx_source_compiles("#include <features.h>\n#if __GLIBC_MINOR__ < 34\n#error older\n#endif\nint main() {}"
                          dcs_glibc_is_one_library)

set(dcs_old_libdl.so.2 "2.2.5" dlclose dlerror dlopen dlsym dlvsym "2.3.4" dlmopen)
set(dcs_old_librt.so.1 "2.2.5" shm_open shm_unlink)
set(dcs_old_libpthread.so.0 "2.2.5" sem_destroy sem_init sem_post sem_timedwait sem_trywait sem_wait)
foreach(
  name
  condattr_setpshared create detach getspecific join key_create key_delete kill mutex_trylock mutexattr_destroy
  mutexattr_init mutexattr_setpshared mutexattr_settype once rwlock_destroy rwlock_init rwlock_rdlock
  rwlock_timedrdlock rwlock_timedwrlock rwlock_tryrdlock rwlock_trywrlock rwlock_unlock rwlock_wrlock
  rwlockattr_destroy rwlockattr_init rwlockattr_setpshared setspecific spin_destroy spin_init spin_lock
  spin_trylock spin_unlock)
  list(APPEND dcs_old_libpthread.so.0 pthread_${name})
endforeach()

function(dcs_old_library target library)
  set(functions "")
  set(versions "")
  foreach(name IN LISTS dcs_old_${library})
    if(name MATCHES "^[0-9]")
      string(APPEND versions "}; GLIBC_${name} { global:\n")
    else()
      string(APPEND functions "void ${name}() {}\n")
      string(APPEND versions "${name};\n")
    endif()
  endforeach()
  string(REGEX REPLACE "^}; " "" versions "${versions}};\n")
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/old_glibc)
  file(CONFIGURE OUTPUT ${folder}/${library}.cpp CONTENT "extern \"C\" {\n@functions@}\n" @ONLY)
  file(CONFIGURE OUTPUT ${folder}/${library}.map CONTENT "@versions@" @ONLY)
  add_library(dcs_old_${library} SHARED ${folder}/${library}.cpp)
  set_target_properties(dcs_old_${library} PROPERTIES NO_SONAME ON CXX_VISIBILITY_PRESET default
                                                      LIBRARY_OUTPUT_DIRECTORY ${folder})
  target_compile_options(dcs_old_${library} PRIVATE -w -fno-builtin)
  target_link_options(dcs_old_${library} PRIVATE -nostdlib LINKER:-soname,${library}
                      LINKER:--version-script=${folder}/${library}.map)
  # Asked for by archives that come after it: not left out as not needed.
  target_link_libraries(${target} PRIVATE -Wl,--no-as-needed dcs_old_${library})
endfunction()

function(dcs_old_glibc target)
  target_sources(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/manylinux/newer_functions.cpp)
  target_compile_options(${target} PRIVATE "SHELL:-include ${CMAKE_CURRENT_SOURCE_DIR}/manylinux/old_libm.h")
endfunction()
