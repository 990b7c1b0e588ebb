// power(double) (csrc/cuda/common/exponential.cuh) on a CPU, against the exponential in long double:
// `power_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"

#include "common/arithmetic.cuh"

namespace {

int wrong = 0;

void check(double x, bool is_right) {
  if (is_right) return;
  ++wrong;
  printf("power(%a) is %a, exp %La\n", x, dcs::power(x), std::exp(static_cast<long double>(x)));
}

// In ulps of the result: its own rounding 0.5, that of r 0.20, that of what r is multiplied with 0.17 and of the sums
// in it 0.04, the polynomial's error 0.03.
bool is_close(double x) {
  constexpr long double kMostUlps = 0.94L;
  const long double wanted = std::exp(static_cast<long double>(x));
  const double found = dcs::power(x);
  if (wanted < 0x1p-1022L) return found == 0.0 || std::abs(found - wanted) <= 0x1p-1074L;
  if (wanted >= 0x1.fffffffffffff8p+1023L) return found == INFINITY;
  return std::abs(found - wanted) <= kMostUlps * std::ldexp(1.0L, std::ilogb(wanted) - 52);
}

double of_bits(uint64_t bits) { return bits_as<double>(bits); }

void check_special() {
  check(0.0, dcs::power(0.0) == 1.0);
  check(-0.0, dcs::power(-0.0) == 1.0);
  for (const double x : {double{INFINITY}, 1e308, 1e17, 1e9, 1e3, 710.0}) {
    check(x, dcs::power(x) == INFINITY);
    check(-x, dcs::power(-x) == 0.0);
  }
  for (const uint64_t sign : {uint64_t{0}, uint64_t{1} << 63})
    for (const uint64_t payload : {uint64_t{0}, uint64_t{1}, uint64_t{0xffffffff}, (uint64_t{1} << 51) - 1}) {
      const double x = of_bits(sign | 0x7ff8000000000000 | payload);
      check(x, std::isnan(dcs::power(x)));
    }
  // The largest and the smallest normal result, and what is beyond.
  for (const double x : {0x1.62e42fefa39efp+9, -0x1.6232bdd7abcd2p+9})
    for (const double to : {double{-INFINITY}, double{INFINITY}}) {
      check(x, is_close(x));
      check(std::nextafter(x, to), is_close(std::nextafter(x, to)));
    }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const int cases = std::atoi(arguments[1]);
  std::mt19937_64 random(static_cast<unsigned>(std::atoi(arguments[2])));
  std::uniform_real_distribution<double> any(-746, 711), small(-40, 1), sign(-1, 1);
  check_special();
  for (int i = 0; i < cases && wrong < 20; ++i) {
    const double halves = static_cast<double>(static_cast<int>(random() % 4200) - 2150);
    const double near = halves * 0x1.62e42fefa39efp-2 * (1 + 0x1p-48 * sign(random));
    const double tiny = std::ldexp(sign(random), -static_cast<int>(random() % 1080));
    for (const double x : {any(random), small(random), near, tiny}) check(x, is_close(x));
  }
  printf("%d cases, %d wrong\n", cases, wrong);
  return wrong != 0;
}
