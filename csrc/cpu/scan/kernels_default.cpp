#define DCS_KERNELS kKernelsDefault
#define DCS_ISA "default"
#include "scan/kernel_table.h"
