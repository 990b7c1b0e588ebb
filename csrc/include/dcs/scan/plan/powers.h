// Powers of a number gamma that are made on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dcs {

// The product of two powers of a base, which neither overflows nor vanishes but for a base of 0, as power_mul has it.
inline double bounded_product(double base, double a, double b) {
  constexpr double kLeast = 2.2250738585072014e-308, kMost = 1.7976931348623157e308;
  const double product = a * b;
  if (base == 0.0 || product != product) return product;
  return std::copysign(std::clamp(std::fabs(product), kLeast, kMost), product);
}

// A number's power, as bounded.
inline double bounded_power(double base, int64_t exponent) {
  double power = 1.0, square = base;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = bounded_product(base, power, square);
    square = bounded_product(base, square, square);
  }
  return power;
}

}  // namespace dcs
