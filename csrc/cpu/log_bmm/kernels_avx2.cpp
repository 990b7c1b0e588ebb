#define DCS_KERNELS kLogBmmAvx2
#define DCS_ISA "avx2"
#include "log_bmm/kernel_table.h"
