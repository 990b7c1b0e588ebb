// e^x in double: on sm_90 22 instructions, 16 of them in double, without a branch, so that those of several elements
// interleave. CUDA's exp has 33, of which a branch skips 12 where the result is a normal number.
#pragma once

#include <cuda_runtime.h>

namespace dcs {

// x, but -709 or 710, to 2^-11, where it is beyond. Of one sign, high words compare as integers like magnitudes; the
// bias takes NaNs (quiet ones, as arithmetic gives) past the last word of their sign, so that they stay.
__device__ __forceinline__ double bounded_exponent(double x) {
  constexpr int kBias = 0x80000, kMost = 0x40863000;
  constexpr unsigned kLeast = 0xc0862800;
  const unsigned high = static_cast<unsigned>(__double2hiint(x)) + kBias;
  const unsigned from_above = static_cast<unsigned>(min(static_cast<int>(high), kMost + kBias));
  return __hiloint2double(static_cast<int>(min(from_above, kLeast + kBias) - kBias), __double2loint(x));
}

// To 1 ulp where the result is a normal number; below 0, or down to 2^-1022.5 the subnormal number. A NaN stays one.
__device__ __forceinline__ double power(double exponent) {
  // 2 e^r, from r^11 down to 1: the minimax polynomial (Remez) of those that begin with 2 + 2 r, for |r| <= ln(2) / 2
  // and the error relative to e^r, which is 2^-57.9.
  constexpr double kTerms[] = {0x1.add8ce56a319dp-25, 0x1.28aedd7ffbd1fp-21, 0x1.71def3c16306ep-18,
      0x1.a019988aebae9p-15, 0x1.a01a013d62661p-12, 0x1.6c16c184b5d2ep-9, 0x1.1111111124d28p-6, 0x1.5555555550605p-4,
      0x1.5555555555503p-2, 0x1.000000000000ap+0, 2.0, 2.0};
  // x = n ln(2) + r, with ln(2) in two parts (W. J. Cody and W. Waite, "Software Manual for the Elementary Functions",
  // 1980). Beside 1.5 * 2^52 an integer is left, in the low word.
  const double x = bounded_exponent(exponent), shifted = fma(x, 0x1.71547652b82fep+0, 0x1.8p+52);
  const double n = shifted - 0x1.8p+52;
  const double r = fma(n, -0x1.abc9e3b39803fp-56, fma(n, -0x1.62e42fefa39efp-1, x));
  double twice = kTerms[0];
#pragma unroll
  for (int i = 1; i < 12; ++i) twice = fma(twice, r, kTerms[i]);
  // Times 2^(n - 1): a number for n = 1024 too, for n = -1022 a subnormal one, and 0 for n = -1023. Adding n to the
  // bits of the exponent would lose NaNs. The low word of n is 0.
  const unsigned integer = static_cast<unsigned>(__double2loint(shifted));
  const int normal = static_cast<int>((integer + 1022) << 20), subnormal = static_cast<int>((integer + 1023) << 19);
  return twice * __hiloint2double(max(normal, subnormal), __double2loint(n));
}

}  // namespace dcs
