#define DCS_KERNELS kCrossEntropyAvx2
#define DCS_ISA "avx2"
#include "cross_entropy/kernel_table.h"
