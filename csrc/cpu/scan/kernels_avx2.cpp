#define DCS_KERNELS kKernelsAvx2
#define DCS_ISA "avx2"
#include "scan/kernel_table.h"
