#define DCS_KERNELS kLogBmmDefault
#define DCS_ISA "default"
#include "log_bmm/kernel_table.h"
