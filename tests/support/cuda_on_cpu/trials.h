// What the programs have in common that run random problems through kernels on a CPU: `PROGRAM CASES SEED` prints what
// is wrong; the exit status says whether anything was.
#pragma once

#include <cuda_bf16.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>

#include "common/element_types.cuh"

namespace trials {

// Complex numbers are real ones.
template <typename T>
constexpr bool kIsComplex = std::is_same_v<T, dcs::Complex<double>>;
template <typename T>
T narrowed(double value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16(static_cast<float>(value));
  else if constexpr (kIsComplex<T>) return {value, 0.0};
  else return static_cast<T>(value);
}
// Of the types of trials.
template <typename T>
constexpr dcs::ElementType element_type_of() {
  if (kIsComplex<T>) return dcs::ElementType::ComplexDouble;
  if (std::is_same_v<T, __half>) return dcs::ElementType::Half;
  return sizeof(T) == 2 ? dcs::ElementType::BFloat16
      : sizeof(T) == 4  ? dcs::ElementType::Float
                        : dcs::ElementType::Double;
}
template <typename T>
double widened(T value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat162float(value);
  else if constexpr (kIsComplex<T>) return value.re;
  else return static_cast<double>(value);
}

template <typename T>
struct Type {
  using type = T;
};

// `draw(number, random)` is a case; `run(case, Type<T>(), random)` says whether it is right in T, drawn too; kHalf: T
// may be __half.
template <bool kHalf = false, typename Draw, typename Run>
int run_all(int count, char** arguments, const Draw& draw, const Run& run) {
  if (count != 3) return 2;
  const int cases = std::atoi(arguments[1]);
  std::mt19937 random(static_cast<unsigned>(std::atoi(arguments[2])));
  int wrong = 0;
  for (int i = 0; i < cases; ++i) {
    const auto c = draw(i, random);
    const unsigned type = random() % (kHalf ? 4 : 3);
    bool is_right = true;
    if constexpr (kHalf) {
      if (type == 3) is_right = run(c, Type<__half>(), random);
    }
    if (type == 0) is_right = run(c, Type<float>(), random);
    if (type == 1) is_right = run(c, Type<__nv_bfloat16>(), random);
    if (type == 2) is_right = run(c, Type<double>(), random);
    wrong += !is_right;
  }
  printf("%d cases, %d wrong\n", cases, wrong);
  return wrong != 0;
}

// The same where a case draws its tensors from a seed of its own: `Trial<T>(draw(random)).run()` is one.
template <template <typename> class Trial, bool kHalf = false, typename Draw>
int run_seeded(int count, char** arguments, const Draw& draw) {
  return run_all<kHalf>(
      count, arguments, [&](int, std::mt19937& random) { return draw(random); },
      [](const auto& c, auto type, std::mt19937&) { return Trial<typename decltype(type)::type>(c).run(); });
}

}  // namespace trials
