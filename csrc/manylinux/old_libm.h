// Included before everything else: the versions of libm's functions that glibc 2.28 has (cmake/old_glibc.cmake). Those
// of 2.29 differ in that they do not call a handler of errors that a program may have set.
#pragma once

#if defined(__linux__) && defined(__x86_64__) && !defined(__CUDA_ARCH__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif
