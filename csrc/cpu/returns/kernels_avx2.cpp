#define DCS_RETURNS kReturnsAvx2
#define DCS_ISA "avx2"
#include "returns/kernel_table.h"
