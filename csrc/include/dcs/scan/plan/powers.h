// Powers of a number gamma that are made on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dcs {

// A number's power, which neither overflows nor vanishes but for a base of 0, as power_mul has it.
inline double bounded_power(double base, int64_t exponent) {
  constexpr double kLeast = 2.2250738585072014e-308, kMost = 1.7976931348623157e308;
  double power = 1.0, square = base;
  const auto bound = [&](double value) {
    if (base == 0.0 || value != value) return value;
    return std::copysign(std::clamp(std::fabs(value), kLeast, kMost), value);
  };
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = bound(power * square);
    square = bound(square * square);
  }
  return power;
}

}  // namespace dcs
