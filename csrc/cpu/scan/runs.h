// Short runs of elements with gaps between them, copied one behind the other.
#pragma once

#include <cstdint>
#include <cstring>

namespace dcs::cpu {
namespace {

// Bytes of a copy without gaps that stays in a second-level cache until it is scanned.
constexpr int64_t kClosedBytes = 256 << 10;

template <int kBytes>
inline void copy_runs_of(char* to, const char* from, int64_t runs, int64_t apart) {
  for (int64_t i = 0; i < runs; ++i) std::memcpy(to + i * kBytes, from + i * apart, kBytes);
}
// Runs of so many bytes, the next one's begin so many bytes behind.
inline void copy_runs(char* to, const char* from, int64_t runs, int64_t apart, int64_t bytes) {
  switch (bytes) {
    case 2: return copy_runs_of<2>(to, from, runs, apart);
    case 3: return copy_runs_of<3>(to, from, runs, apart);
    case 4: return copy_runs_of<4>(to, from, runs, apart);
    case 6: return copy_runs_of<6>(to, from, runs, apart);
    case 8: return copy_runs_of<8>(to, from, runs, apart);
    case 12: return copy_runs_of<12>(to, from, runs, apart);
    case 16: return copy_runs_of<16>(to, from, runs, apart);
    case 24: return copy_runs_of<24>(to, from, runs, apart);
    default:
      for (int64_t i = 0; i < runs; ++i) std::memcpy(to + i * bytes, from + i * apart, static_cast<size_t>(bytes));
  }
}

}  // namespace
}  // namespace dcs::cpu
