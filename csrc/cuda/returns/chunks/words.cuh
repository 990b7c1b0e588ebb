// What a thread reads of four neighboring slots of a tile: whole words where they are neighbors in memory.
#pragma once

#include "common/vector.cuh"
#include "returns/chunks/places.cuh"

namespace dcs {

// Four slots of a tensor, from the highest address down: slot 0 is at `last`.
template <typename U>
__device__ __forceinline__ void load_quad(const U* last, U (&to)[4]) {
  const U* const from = last - 3;
  if (reinterpret_cast<uintptr_t>(from) % (4 * sizeof(U)) == 0) {
    const auto quad = *reinterpret_cast<const Vector<U, 4>*>(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = quad.get(3 - j);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = from[3 - j];
  }
}
template <typename U>
__device__ __forceinline__ void store_quad(U* last, const U (&from)[4]) {
  U* const to = last - 3;
  if (reinterpret_cast<uintptr_t>(to) % (4 * sizeof(U)) == 0) {
    Vector<U, 4> quad;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.set(3 - j, from[j]);
    *reinterpret_cast<Vector<U, 4>*>(to) = quad;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[3 - j] = from[j];
  }
}

template <typename T, bool kGates>
struct ReturnsWords {
  using Acc = typename Types<T>::Acc;
  using Walk = ReturnsPlaces<T, kGates>;
  using Place = typename Walk::Place;

  const Walk& walk;
  T rewards[4], values[4], next[4], rhos[4];
  Acc gammas[4], traces[4];
  uint32_t terminated, truncated;  // a byte each, that of the first one uppermost
  uint32_t lasts;                  // bits: of their rows
  bool is_quad;                    // neighbors in memory
  Place place;                     // of the first one, where the tile is not linear
  int64_t at;                      // of a quad, in the inputs

  __device__ __forceinline__ explicit ReturnsWords(const Walk& of) : walk(of) {}

  template <typename U>
  __device__ __forceinline__ static const U* pointer(const ReturnsInput& input, int64_t at) {
    return static_cast<const U*>(input.data) + at;
  }
  template <bool kLasts>
  __device__ __forceinline__ void find(int slot) {
    lasts = 0;
    if (walk.params.linear && slot + 3 < walk.slots) {
      is_quad = true;
      at = walk.input_at - slot;
      if (kLasts && walk.first == 0 && slot < walk.plan.sequences)
        lasts = (1u << min(4, walk.plan.sequences - slot)) - 1;
    } else {
      place = walk.place_of(slot);
      is_quad = walk.is_quad(place);
      if (is_quad) at = walk.offset(place, walk.p.rewards.strides);
      if (walk.is_last(place)) lasts = 15u;
    }
  }
  // Those of an operand that is there.
  template <typename U>
  __device__ __forceinline__ void read(const ReturnsInput& input, U (&to)[4]) const {
    if (input.data) load_quad(pointer<U>(input, at), to);
  }
  __device__ __forceinline__ static uint32_t flag_of(int j, bool is_set) { return is_set ? 1u << (24 - 8 * j) : 0u; }
  __device__ __forceinline__ uint32_t read_flags(const ReturnsInput& flag, bool is_bool) const {
    if (!flag.data) return 0;
    if (is_bool) {
      const uint8_t* const from = pointer<uint8_t>(flag, at) - 3;
      if (reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
      return from[0] | uint32_t{from[1]} << 8 | uint32_t{from[2]} << 16 | uint32_t{from[3]} << 24;
    }
    T numbers[4];
    read(flag, numbers);
    uint32_t flags = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) flags |= flag_of(j, cast<Acc>(numbers[j]) != Acc(0));
    return flags;
  }
  __device__ __forceinline__ T bootstrap_of(int slot) const {
    if (!walk.p.bootstrap_value.data) return cast<T>(Acc(0));
    return *pointer<T>(walk.p.bootstrap_value, walk.row_at(walk.place_of(slot).row, walk.p.bootstrap_value.strides));
  }
  __device__ __forceinline__ void read_quad(int slot) {
    read(walk.p.rewards, rewards);
    read(walk.p.values, values);
    terminated = read_flags(walk.p.terminated, walk.p.terminated_is_bool);
    truncated = read_flags(walk.p.truncated, walk.p.truncated_is_bool);
    if (walk.p.next_values.data) {
      read(walk.p.next_values, next);
    } else {
      if (!walk.p.values.data) {
      } else if (!walk.plan.columns) {
#pragma unroll
        for (int j = 1; j < 4; ++j) next[j] = values[j - 1];
        if (!(lasts & 1)) next[0] = pointer<T>(walk.p.values, at)[1];
      } else if (lasts == 0) {
        load_quad(pointer<T>(walk.p.values, at) + walk.p.values.strides.time, next);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (!(lasts >> j & 1)) next[j] = pointer<T>(walk.p.values, at)[walk.p.values.strides.time - j];
      }
      if (lasts) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (lasts >> j & 1) next[j] = bootstrap_of(slot + j);
      }
    }
    if constexpr (kGates) read_gates();
  }
  __device__ __forceinline__ void read_gates() {
    read(walk.p.rhos, rhos);
    if (walk.step_gamma) read(walk.p.gamma.tensor, gammas);
    if (walk.step_trace) read(walk.p.trace.tensor, traces);
  }
  // One of four slots that are no quad.
  __device__ __forceinline__ void read_one(int slot, int j) {
    const Place at = walk.place_of(slot + j);
    if (!at.is_there) return;
    const auto element = [&](const ReturnsInput& input, int64_t later) {
      return *pointer<T>(input, walk.offset(at, input.strides) + later);
    };
    const auto flag = [&](const ReturnsInput& input, bool is_bool) {
      if (!input.data) return 0u;
      const bool is_set = is_bool ? *pointer<uint8_t>(input, walk.offset(at, input.strides)) != 0
                                  : cast<Acc>(element(input, 0)) != Acc(0);
      return flag_of(j, is_set);
    };
    rewards[j] = element(walk.p.rewards, 0);
    if (walk.p.values.data) values[j] = element(walk.p.values, 0);
    terminated |= flag(walk.p.terminated, walk.p.terminated_is_bool);
    truncated |= flag(walk.p.truncated, walk.p.truncated_is_bool);
    if (walk.p.next_values.data) next[j] = element(walk.p.next_values, 0);
    else if (walk.is_last(at)) next[j] = bootstrap_of(slot + j);
    else if (walk.p.values.data) next[j] = element(walk.p.values, walk.p.values.strides.time);
    if (walk.is_last(at)) lasts |= 1u << j;
    if constexpr (kGates) read_gates_of(at, j);
  }
  __device__ __forceinline__ void read_gates_of(const Place& at, int j) {
    if (walk.p.rhos.data) rhos[j] = *pointer<T>(walk.p.rhos, walk.offset(at, walk.p.rhos.strides));
    const auto factor = [&](const ReturnsDiscount& rate, Acc(&to)[4]) {
      if (rate.kind == GammaKind::kStep) to[j] = *pointer<Acc>(rate.tensor, walk.offset(at, rate.tensor.strides));
    };
    factor(walk.p.gamma, gammas);
    factor(walk.p.trace, traces);
  }
  __device__ __forceinline__ void read_all(int slot) {
    find<true>(slot);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      rewards[j] = values[j] = next[j] = rhos[j] = cast<T>(Acc(0));
      gammas[j] = traces[j] = 1;
    }
    terminated = truncated = 0;
    if (is_quad) {
      read_quad(slot);
      return;
    }
    lasts = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) read_one(slot, j);
  }
  __device__ __forceinline__ Acc ratio(T rho, double most) const {
    return walk.p.rhos.data ? clipped(cast<Acc>(rho), static_cast<Acc>(most)) : Acc(1);
  }
  __device__ __forceinline__ void read_own_values(int slot) {
    if (is_quad) {
      read(walk.p.values, values);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Place own = walk.place_of(slot + j);
      values[j] = own.is_there ? *pointer<T>(walk.p.values, walk.offset(own, walk.p.values.strides)) : cast<T>(Acc(0));
    }
  }
};

}  // namespace dcs
