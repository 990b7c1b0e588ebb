// Powers of a number gamma that are made on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dcs {

// A power of a base within double's range: it neither overflows nor vanishes but for a base of 0, as power_mul has it.
inline double bounded(double power, double base) {
  constexpr double kLeast = 2.2250738585072014e-308, kMost = 1.7976931348623157e308;
  if (base == 0.0 || power != power) return power;
  return std::copysign(std::clamp(std::fabs(power), kLeast, kMost), power);
}

inline double bounded_power(double base, int64_t exponent) {
  double power = 1.0, square = base;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = bounded(power * square, base);
    square = bounded(square * square, base);
  }
  return power;
}

}  // namespace dcs
