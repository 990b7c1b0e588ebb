#define DCS_RETURNS kReturnsDefault
#define DCS_ISA "default"
#include "returns_kernels.h"
