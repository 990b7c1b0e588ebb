#define DCS_KERNELS kKernelsAvx512
#define DCS_ISA "avx512"
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsics headers leave a don't-care operand uninitialized (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "scan/kernel_table.h"
