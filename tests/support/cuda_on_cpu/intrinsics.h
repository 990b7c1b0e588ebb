// CUDA's intrinsics (emulation.h).
#pragma once

template <typename T>
T __shfl_up_sync(unsigned, T value, int delta, int width = 32) {
  return emulation::shuffle(
      value, "a shuffle up", [=](int lane) { return lane % width >= delta ? lane - delta : lane; });
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int delta, int width = 32) {
  return emulation::shuffle(
      value, "a shuffle down", [=](int lane) { return lane % width + delta < width ? lane + delta : lane; });
}
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  return emulation::shuffle(value, "a shuffle", [=](int lane) { return lane / width * width + from % width; });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return emulation::shuffle(value, "a shuffle across", [=](int lane) { return lane ^ mask; });
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const uint64_t* const values = emulation::exchange(predicate != 0, "a ballot");
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(values[lane]) << lane;
  return bits;
}
inline int __reduce_max_sync(unsigned, int value) {
  const uint64_t* const values = emulation::exchange(static_cast<uint64_t>(value), "a maximum");
  for (int lane = 0; lane < 32; ++lane) value = std::max(value, static_cast<int>(values[lane]));
  return value;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const uint64_t* const values = emulation::exchange(value, "a sum");
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(values[lane]);
  return sum;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }
inline void __syncwarp(unsigned = 0xffffffffu) { emulation::exchange(0, "the warp"); }
inline void __syncthreads() {
  emulation::Block& block = emulation::current();
  const unsigned generation = block.generation;
  if (++block.arrived == block.threads) {
    block.arrived = 0;
    ++block.generation;
    ++emulation::progress;
  } else {
    while (block.generation == generation) emulation::wait_for("the block");
  }
}
inline int __syncthreads_and(int predicate) {
  emulation::Block& block = emulation::current();
  const unsigned generation = block.generation % 2;
  block.all[generation] = block.all[generation] && predicate != 0;
  if (block.arrived + 1 == block.threads) block.all[1 - generation] = true;
  __syncthreads();
  return block.all[generation];
}
inline int __syncthreads_or(int predicate) { return !__syncthreads_and(!predicate); }
// A block's fibers take turns: nothing comes between.
template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
template <typename T>
T atomicAnd(T* to, T bits) {
  const T before = *to;
  *to &= bits;
  return before;
}
template <typename T>
T atomicOr(T* to, T bits) {
  const T before = *to;
  *to |= bits;
  return before;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &value, sizeof(To));
  return to;
}
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (value >> i & 1) << (31 - i);
  return reversed;
}
inline unsigned long long __brevll(unsigned long long value) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(value))) << 32 |
      __brev(static_cast<unsigned>(value >> 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __uint_as_float(unsigned value) { return bits_as<float>(value); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline float __int_as_float(int value) { return bits_as<float>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline double __longlong_as_double(long long value) { return bits_as<double>(value); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline unsigned __float2uint_rn(float value) { return static_cast<unsigned>(std::nearbyint(value)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, int shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline int __double2hiint(double value) { return static_cast<int>(__double_as_longlong(value) >> 32); }
inline int __double2loint(double value) { return static_cast<int>(__double_as_longlong(value)); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned to = 0;
  for (int i = 0; i < 4; ++i) to |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return to;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> (8 * i) & 0xff) * (b >> (8 * i) & 0xff);
  return sum;
}
template <typename T>
void __stcs(T* to, const T& value) {
  *to = value;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
