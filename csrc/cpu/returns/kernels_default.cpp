#define DCS_RETURNS kReturnsDefault
#define DCS_ISA "default"
#include "returns/kernel_table.h"
