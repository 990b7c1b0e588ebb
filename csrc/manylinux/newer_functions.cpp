// What the headers of libstdc++ take from a libstdc++ newer than GCC 8's, or a glibc newer than 2.28, defined here, so
// that the library loads with those (cmake/old_glibc.cmake has the functions whose older version will do).
#include <new>
#include <sstream>

#if defined(__GLIBCXX__) && defined(__linux__)

#define DCS_HIDDEN __attribute__((visibility("hidden")))

// GLIBC_2.32: whether there is one thread alone, when counts of std::shared_ptr need not be atomic. Never said here.
extern "C" DCS_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

// GLIBCXX_3.4.26; before it, these had an argument.
template DCS_HIDDEN basic_stringstream<char>::basic_stringstream();
template DCS_HIDDEN basic_ostringstream<char>::basic_ostringstream();

}  // namespace std

// GLIBCXX_3.4.29: std::__throw_bad_array_new_length(), whose declaration would not let it be hidden. Weak: a compiler
// that links libstdc++ as an archive brings its own.
extern "C" [[noreturn]] DCS_HIDDEN __attribute__((weak)) void _ZSt28__throw_bad_array_new_lengthv() {
  throw std::bad_array_new_length();
}

#endif
