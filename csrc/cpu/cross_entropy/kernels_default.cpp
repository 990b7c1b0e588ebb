#define DCS_KERNELS kCrossEntropyDefault
#define DCS_ISA "default"
#include "cross_entropy/kernel_table.h"
