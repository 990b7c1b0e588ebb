// Scans along contiguous time. A block takes a tile: a piece of one row, or several whole short rows. A lane holds kChunks vectors of 16 bytes,
// 32 vectors apart, so that loads and stores are whole lines; a vector is scanned serially, vectors across the warp by shuffles, warps through
// shared memory, tiles of a long row by look-back. The last step runs the plain recurrence again from each vector's carry.
#pragma once

#include "cluster.cuh"
#include "lookback.cuh"
#include "plan.h"
#include "types.cuh"
#include "vector.cuh"

namespace dcs {

constexpr int kMaxWarps = 2 * kTileWarps;

struct RowsParams {
  ScanProblem problem;
  int64_t tiles;  // tiles of a row; 1 when packed
  int64_t rows;
  int64_t packed_rows;   // rows in a tile when rows are short and contiguous, else 0
  int64_t length;        // of a row, or of a tile's packed rows
  int64_t padded;        // that in whole vectors
  uint32_t whole_begin;  // tiles (packed: blocks) whole_begin .. whole_end - 1 have no position outside their rows
  uint32_t whole_end;
  bool one_gamma;  // of all rows
  void* statuses;       // look-back: tiles * rows, then groups * rows
  int64_t groups;
};

// What cuts a kernel looks for.
enum class Cuts {
  kPlain,    // a row is one tile, or those of a cluster of blocks: its start
  kPacked,   // whole short rows of whole vectors, one gamma or step gammas: starts at vectors
  kPackedEach,  // the same with a gamma for each row
  kGeneral,  // resets, initial values, short rows of any length, unaligned rows
};

// The general kernel reads its direction from the problem; in the others it is fixed, which saves a tenth of their instructions.
enum class Direction { kLeft, kRight, kEither };

// Vectors of a thread (plan.h, warp_elements). The registers they take bound how many blocks are in flight.
template <typename T>
constexpr int kChunksOf = sizeof(T) > 8 ? 2 : 4;

template <typename T, bool kStep, bool kBackward, Cuts kCuts, int kVec, Direction kDirection>
__global__ void __launch_bounds__(
    32 * (kCuts == Cuts::kPlain && !kStep && !kBackward ? kMaxWarps : kTileWarps),
    sizeof(T) > 4 || kCuts == Cuts::kGeneral || (kStep && kBackward) ? 2 : kStep || kBackward || kCuts == Cuts::kPackedEach ? 3 : kCuts == Cuts::kPlain ? 2 : 4)
    rows_kernel(const __grid_constant__ RowsParams params) {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  constexpr int kChunks = kChunksOf<T>;
  constexpr bool kGeneral = kCuts == Cuts::kGeneral, kPackedEach = kCuts == Cuts::kPackedEach;
  constexpr bool kAtVectors = kCuts == Cuts::kPacked || kPackedEach;
  constexpr bool kByChunk = kStep || kGeneral || kPackedEach;  // products of gates are not the same in all chunks
  const ScanProblem& p = params.problem;
  const uint32_t block = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int extent = warps * kChunks * 32 * kVec;  // elements of the tile
  const bool reverse = kDirection == Direction::kEither ? p.reverse : kDirection == Direction::kRight;
  const bool packed = kAtVectors || (kGeneral && params.packed_rows > 0);
  const bool has_reset = kGeneral && p.reset;
  const bool has_initial = kGeneral && p.initial;

  // Blocks take the first tiles of all rows, then the second tiles, ...: a tile's predecessors in its row have mostly finished before it starts.
  uint32_t tile = 0;
  int64_t row = block;
  if (packed) {
    row *= params.packed_rows;
  } else if (kGeneral && params.tiles > 1) {
    tile = block / static_cast<uint32_t>(params.rows);
    row = block - tile * static_cast<uint32_t>(params.rows);
  } else if (kCuts == Cuts::kPlain && params.tiles > 1) {  // the blocks of a cluster
    row = block / static_cast<uint32_t>(params.tiles);
    tile = block - static_cast<uint32_t>(row) * static_cast<uint32_t>(params.tiles);
    arrive_in_cluster();
  }
  const int64_t outer = p.inner == 1 ? row : row / p.inner;
  const int64_t inner = p.inner == 1 ? 0 : row - outer * p.inner;
  // A row, or the packed rows as one, is memory [0, length). Scan position s of this tile lies at memory position s, or extent - 1 - s, behind `base`;
  // vectors are aligned in memory, so a reversed row starts `pad` positions early. All positions are relative to the tile.
  const uint32_t place = packed ? block : tile;
  const bool whole = place >= params.whole_begin && place < params.whole_end;
  int64_t length = params.length, padded = params.padded;
  if (packed && !whole) {  // the last rows
    length = min(params.rows - row, params.packed_rows) * p.length;
    padded = (length + kVec - 1) / kVec * kVec;
  }
  const int64_t start = static_cast<int64_t>(tile) * extent;
  const int64_t base = reverse ? padded - start - extent : start;
  const int pad = reverse ? static_cast<int>(padded - length) : 0;
  int low = 0, high = extent;
  if (!whole) {
    low = static_cast<int>(max(int64_t{0}, -base));
    high = static_cast<int>(min(static_cast<int64_t>(extent), length - base));
  }
  const int time = static_cast<int>(min(p.length, int64_t{1} << 30));  // of a packed row
  const int first_vector = warp * kChunks * 32 + lane;
  const auto position = [&](int k) { return (first_vector + k * 32) * kVec; };
  const auto address = [&](int k) { return reverse ? extent - kVec - position(k) : position(k); };
  const auto inside = [&](int s) {
    const int at = reverse ? extent - 1 - s : s;
    return at >= low && at < high;
  };
  const auto row_of = [&](int s) -> int64_t {
    if (!packed) return row;
    const int at = reverse ? extent - 1 - s : s;
    return row + (max(low, min(at, high - 1)) + static_cast<int>(base)) / time;
  };
  const auto row_offset = [&](int64_t r, const Strides& strides) {
    return p.inner == 1 ? r * strides.outer : (r / p.inner) * strides.outer + (r % p.inner) * strides.inner;
  };
  const auto tile_of = [&](auto* pointer, const Strides& strides) {
    int64_t offset = outer * strides.outer + base;
    if (p.inner > 1) offset += inner * strides.inner;
    return pointer + offset;
  };

  const T* input = tile_of(static_cast<const T*>(p.input), p.input_strides);
  const T* gates = nullptr;
  if constexpr (kStep) gates = tile_of(static_cast<const T*>(p.gamma), p.gamma_strides);
  const bool* reset = has_reset ? tile_of(p.reset, p.reset_strides) : nullptr;

  // Load everything first.
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0);
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  using Word = Vector<T, kVec>;
  Word held[kTensors * kChunks];
  const auto fetch = [&](int tensor, const T* from) {
    const int stride = reverse ? -32 * kVec : 32 * kVec;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      held[tensor * kChunks + k] = whole ? *reinterpret_cast<const Word*>(from + address(0) + k * stride) : load_vector<T, kVec>(from, address(k), low, high);
    }
  };
  const auto word = [&](int tensor, int k) -> Word& { return held[tensor * kChunks + k]; };
  constexpr int kGateTensor = kStep ? 1 : 0, kSavedTensor = kTensors - 1;
  fetch(0, input);
  if constexpr (kStep) fetch(kGateTensor, gates);
  T saved_next[kBackward ? kChunks : 1];  // the last lane's: the scan position after its vector
  if constexpr (kBackward) {
    const T* saved = tile_of(static_cast<const T*>(p.saved), p.saved_strides);
    fetch(kSavedTensor, saved);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int64_t next = base + (reverse ? address(k) - 1 : address(k) + kVec);
      saved_next[k] = lane == 31 && next >= 0 && next < length ? saved[next - base] : cast<T>(cast<Acc>(0.0));
    }
  }
  // A vector in scan order.
  const auto in_order = [&](int tensor, int k) {
    Word values = word(tensor, k);
    turn(values, reverse);
    return values;
  };

  // Its values.
  const auto read = [&](int tensor, int k, Acc(&to)[kVec]) {
    if constexpr (kDirection == Direction::kEither) unpack(in_order(tensor, k), to);
    else unpack_in_order<kDirection == Direction::kRight>(word(tensor, k), to);
  };
  const auto in_memory_order = [&](const Acc(&values)[kVec]) {
    if constexpr (kDirection == Direction::kEither) {
      Word turned = pack<Acc, T, kVec>(values);
      turn(turned, reverse);
      return turned;
    } else {
      return pack_in_order<kDirection == Direction::kRight, T>(values);
    }
  };

  // Packed rows do not share a gamma when each has its own; their vectors do not cross rows then.
  const bool one_gamma = !kPackedEach && (!kGeneral || !packed || params.one_gamma);
  const auto gamma_at = [&](int s) -> Wide {
    if (p.gamma_kind == GammaKind::kNumber) return cast<Wide>(p.gamma_value);
    return load_gamma<Wide>(p.gamma, p.gamma_dtype, row_offset(row_of(s), p.gamma_strides), p.conjugate_gamma);
  };
  const auto initial_at = [&](int s) { return cast<Acc>(static_cast<const T*>(p.initial)[row_offset(row_of(s), p.initial_strides)]); };
  constexpr bool kShort = sizeof(T) == 2;
  Gate<Acc, kShort> gate{};
  Wide gamma = cast<Wide>(1.0);
  const auto set_gamma = [&](int s) {
    gamma = gamma_at(s);
    gate = make_gate<Acc, kShort>(gamma);
  };
  if constexpr (!kStep) {
    if (one_gamma) set_gamma(0);
  }
  const auto advance = [&](Acc value, Acc step_gate, Acc y) {
    if constexpr (kStep) return plain_step(value, step_gate, y);
    else return gate.step(value, y);
  };
  const auto step_gates = [&](int k, Acc(&to)[kVec]) {
    if constexpr (kStep) read(kGateTensor, k, to);
  };

  // Packed rows of `span` vectors. Where they fill a warp's chunks evenly, none crosses into the next chunk.
  const int span = kAtVectors ? time / kVec : 32;
  const bool apart = kAtVectors && 32 % span == 0;
  const int rows_here = packed ? static_cast<int>(length) / time : 1;

  // Each row's gamma, and its power over a vector.
  Gate<Acc, kShort> own_gate[kPackedEach ? kChunks : 1];
  Acc vector_power[kPackedEach ? kChunks : 1];
  if constexpr (kPackedEach) {
    const auto load_own = [&](const auto* gammas) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int r = min(position(k) / time, rows_here - 1);
        const Wide own = cast<Wide>(gammas[row_offset(reverse ? row + rows_here - 1 - r : row + r, p.gamma_strides)]);
        own_gate[k] = make_gate<Acc, kShort>(own);
        vector_power[k] = static_cast<Acc>(power_of<kVec>(own));
      }
    };
    switch (p.gamma_dtype) {
      case ScalarType::Half: load_own(static_cast<const __half*>(p.gamma)); break;
      case ScalarType::BFloat16: load_own(static_cast<const __nv_bfloat16*>(p.gamma)); break;
      case ScalarType::Float: load_own(static_cast<const float*>(p.gamma)); break;
      default: load_own(static_cast<const double*>(p.gamma));
    }
  }

  // Where rows start and resets cut.
  uint32_t cuts[kGeneral ? kChunks : 1] = {};    // bit i: the carry does not enter element i
  uint32_t starts[kGeneral ? kChunks : 1] = {};  // bit i: a row starts there
  int reach[kChunks] = {};                       // how many lanes back the carry of this lane's last element comes from
  uint32_t open = 0;                             // bit k: the carry into chunk k enters this lane
  uint32_t closed = 0;                           // bit k: and does not leave the chunk
  const auto is_cut = [&](int k, int i) {
    if constexpr (kGeneral) return (cuts[k] >> i & 1) != 0;
    else if constexpr (kAtVectors) return i == 0 && !(open >> k & 1) && reach[k] == 0;
    else return k == 0 && tile == 0 && first_vector == 0 && i == pad;
  };
  // The value that a row's first step starts from.
  const auto started = [&](Acc value, int k, int i, Acc step_gate) {
    if constexpr (kGeneral && !kBackward) {
      const int s = position(k) + i;
      if (!has_initial || !(starts[k] >> i & 1) || !inside(s)) return value;
      if (has_reset && reset[reverse ? extent - 1 - s : s]) return value;
      return advance(value, step_gate, initial_at(s));
    }
    return value;
  };
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if constexpr (kCuts == Cuts::kPlain) {
      reach[k] = lane;
      open |= 1u << k;
    } else if constexpr (kAtVectors) {
      const int before = static_cast<int>(static_cast<uint32_t>(position(k)) % static_cast<uint32_t>(time)) / kVec;  // vectors of its row before it
      reach[k] = min(lane, before);
      if (before > lane) open |= 1u << k;
      if (__any_sync(0xffffffffu, before <= lane)) closed |= 1u << k;
    } else {
      const int s0 = position(k);
      uint32_t flags = 0;
      if (has_reset) {
        const int at = address(k);
        flags = load_flags<kVec>(reset, at, low, high, reverse);
        if (p.shifted) {
          const int64_t before = base + (reverse ? at + kVec : at - 1);
          flags = flags << 1 | static_cast<uint32_t>(before >= 0 && before < length && reset[before - base]);
        }
      }
      if (packed) {
        int r = s0 >= pad ? (s0 - pad) % time : s0 - pad;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (r == 0) starts[k] |= 1u << i;
          if (++r == time) r = 0;
        }
      } else if (tile == 0 && s0 <= pad && pad < s0 + kVec) {
        starts[k] = 1u << (pad - s0);
      }
      cuts[k] = (flags | starts[k]) & ((1u << kVec) - 1);
      const uint32_t cut_lanes = __ballot_sync(0xffffffffu, cuts[k] != 0);
      const uint32_t upto = cut_lanes & (0xffffffffu >> (31 - lane));
      reach[k] = min(lane, upto ? lane - (31 - __clz(upto)) : 32);
      if ((cut_lanes & ((1u << lane) - 1)) == 0) open |= 1u << k;
      if (cut_lanes) closed |= 1u << k;
    }
  }

  // The gates of this scan's steps: conjugated, and of the step before in a shifted one.
  if constexpr (kStep) {
    constexpr bool kComplex = !std::is_floating_point_v<Acc>;
    if (p.shifted || kComplex) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        Word g = in_order(kGateTensor, k);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g.set(i, conj_if(p.conjugate_gamma, g.get(i)));
        if (p.shifted) {
          const int at = address(k);
          const int64_t before = base + (reverse ? at + kVec : at - 1);
          T previous = before >= 0 && before < length ? conj_if(p.conjugate_gamma, gates[before - base]) : cast<T>(cast<Acc>(0.0));
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const T mine = g.get(i);
            g.set(i, previous);
            previous = mine;
          }
        }
        turn(g, reverse);
        word(kGateTensor, k) = g;
      }
    }
  }

  // Scan each vector from a zero carry, then the vectors of each chunk across the warp.
  constexpr bool kTwoScans = std::is_same_v<Acc, float>;
  using Held = std::conditional_t<kTwoScans, float, Wide>;
  Held carry_in[kChunks];  // from the lanes before in the chunk
  Held chunk_total[kChunks];
  Wide lane_gates[kByChunk ? kChunks : 1];  // products of the gates of the lanes before
  Wide chunk_gates[kByChunk ? kChunks : 1];
  Acc vector_total[kChunks];
  Wide own_gamma[kGeneral && !kStep ? kChunks : 1];  // packed rows with a gamma each
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if constexpr (kGeneral && !kStep) {
      if (!one_gamma) set_gamma(position(k));
      own_gamma[k] = gamma;
    }
    if constexpr (kPackedEach) gate = own_gate[k];
    Acc values[kVec], factors[kVec];
    read(0, k, values);
    step_gates(k, factors);
    Acc y = cast<Acc>(0.0);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (is_cut(k, i)) y = started(values[i], k, i, factors[i]);
      else y = i == 0 ? values[i] : advance(values[i], factors[i], y);
    }
    vector_total[k] = y;
  }
  // A vector's gates as factors of the carry's products. No carry enters a row's first step, so its gate, which may be a NaN, has no part in them.
  const auto carry_gates = [&](int k, Acc(&to)[kVec]) {
    step_gates(k, to);
    if constexpr (kCuts == Cuts::kPlain) {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (is_cut(k, i)) to[i] = cast<Acc>(1.0);
    }
  };
  // In float where its range holds the products of a chunk's gates in full precision, else in the wide type. `bounded`: no product can overflow.
  // Carries of the wide scan may lie beyond float's range, where only the recurrence comes back from: they wait in local memory, which costs the
  // float scan nothing.
  bool narrow = false, bounded = false;
  if constexpr (std::is_same_v<Acc, float>) {
    if constexpr (kStep) {
      float most = 0.f;
      bool fits = true;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        float product = 1.f;
        Acc factors[kVec];
        carry_gates(k, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float factor = fabsf(factors[i]);
          most = fmaxf(most, factor);
          product *= factor;
        }
        const int exponent = static_cast<int>(__float_as_uint(product) >> 23) - 127;  // floor(log2), far below for 0
        fits = fits && __reduce_add_sync(0xffffffffu, exponent) >= -100;
      }
      bounded = __all_sync(0xffffffffu, most <= 1.f);
      narrow = bounded && fits;
    } else {
      const auto fits = [](double size) { return size > (kVec == 8 ? 0.77 : 0.6) && size <= 1.0; };  // size^(32 * kVec) >= 1e-30
      if constexpr (kPackedEach) {
        narrow = true;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          Acc most = fabsf(vector_power[k]);
          narrow = narrow && most <= 1.f;
          for (int d = 1; d < 32 && d < span; d *= 2) most *= most;
          narrow = narrow && most >= 1e-30f;
        }
        narrow = __all_sync(0xffffffffu, narrow);
      } else {
        narrow = fits(fabs(gamma));
      }
      if (kGeneral && !one_gamma) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) narrow = narrow && fits(fabs(own_gamma[k]));
        narrow = __all_sync(0xffffffffu, narrow);
      }
      bounded = narrow;
    }
  }
  Wide wide_storage[kTwoScans ? 2 * kChunks : 1];
  Wide* wide_carries = wide_storage;
  asm volatile("" : "+l"(wide_carries));  // keeps the array out of registers
  const auto scan_lanes = [&](auto kind) {
    using V = decltype(kind);
    V total[kChunks];
    V across[kByChunk ? kChunks : 1];
    Wide squared = cast<Wide>(1.0), lane_power = cast<Wide>(1.0);  // of one gamma
    const auto power_to = [&](Wide base) {  // base^kVec
#pragma unroll
      for (int e = 1; e < kVec; e *= 2) base = std::is_same_v<V, Wide> ? clamped_mul(base, base) : base * base;
      return base;
    };
    const auto times = [&](V a, V b) {
      if constexpr (std::is_same_v<V, Wide>) {
        if (!bounded) return clamped_mul(a, b);
      }
      return a * b;
    };
    if constexpr (!kStep && !kPackedEach) {
      squared = power_to(gamma);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      total[k] = cast<V>(vector_total[k]);
      if constexpr (kStep) {
        Acc factors[kVec];
        carry_gates(k, factors);
        V product = cast<V>(factors[0]);
#pragma unroll
        for (int i = 1; i < kVec; ++i) product = times(product, cast<V>(factors[i]));
        across[k] = product;
      } else if constexpr (kGeneral) {
        across[k] = cast<V>(power_to(own_gamma[k]));
      } else if constexpr (kPackedEach) {
        if constexpr (std::is_same_v<V, Wide>) across[k] = power_to(whole_gamma(own_gate[k]));
        else across[k] = vector_power[k];
        lane_gates[k] = cast<Wide>(1.0);
      }
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (kAtVectors && d >= span) break;  // no row reaches farther
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const V other = shuffle_up(total[k], d);
        V factor;
        if constexpr (kByChunk) factor = across[k];
        else factor = cast<V>(squared);
        if (reach[k] >= d) total[k] = fold(total[k], factor, other);
        if constexpr (kStep) {
          const V other_gates = shuffle_up(across[k], d);
          if (lane >= d) across[k] = times(across[k], other_gates);
        } else if constexpr (kGeneral) {
          if (d == 1) lane_gates[k] = cast<Wide>(1.0);
          if (lane & d) lane_gates[k] = clamped_mul(lane_gates[k], cast<Wide>(across[k]));
          across[k] = times(across[k], across[k]);
        } else if constexpr (kPackedEach) {
          if (!apart && (lane & d)) lane_gates[k] = clamped_mul(lane_gates[k], cast<Wide>(across[k]));
          across[k] = times(across[k], across[k]);
        }
      }
      if constexpr (!kByChunk) {
        if (lane & d) lane_power = std::is_same_v<V, Wide> ? clamped_mul(lane_power, squared) : lane_power * squared;
        squared = std::is_same_v<V, Wide> ? clamped_mul(squared, squared) : squared * squared;
      }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const V previous = shuffle_up(total[k], 1);
      const V entering = lane == 0 ? cast<V>(0.0) : previous;
      const V leaving = shuffle(total[k], 31);
      if constexpr (std::is_same_v<V, Held>) {
        carry_in[k] = entering;
        chunk_total[k] = leaving;
      } else {
        wide_carries[2 * k] = entering;
        wide_carries[2 * k + 1] = leaving;
      }
      if constexpr (kStep) {
        const V previous_gates = shuffle_up(across[k], 1);
        lane_gates[k] = lane == 0 ? cast<Wide>(1.0) : cast<Wide>(previous_gates);
        chunk_gates[k] = cast<Wide>(shuffle(across[k], 31));
      } else if constexpr (kGeneral || kPackedEach) {
        chunk_gates[k] = cast<Wide>(across[k]);  // a chunk that the carry passes lies in one row: any lane has its gamma
      }
    }
    if constexpr (!kByChunk) {
      lane_gates[0] = lane_power;
      chunk_gates[0] = squared;
    }
  };
  if constexpr (std::is_same_v<Acc, float>) {
    if (narrow) scan_lanes(Acc{});
    else scan_lanes(Wide{});
  } else {
    scan_lanes(Wide{});
  }
  const auto total_of = [&](int k) { return kTwoScans && !narrow ? wide_carries[2 * k + 1] : cast<Wide>(chunk_total[k]); };
  const auto carry_into = [&](int k) { return kTwoScans && !narrow ? wide_carries[2 * k] : cast<Wide>(carry_in[k]); };
  const auto chunk_piece = [&](int k) -> Piece<Wide> { return {total_of(k), chunk_gates[kByChunk ? k : 0], (closed >> k & 1) != 0}; };

  // Across the warps of the block.
  __shared__ Wide warp_totals[kMaxWarps];
  __shared__ Wide warp_gates[kMaxWarps];
  __shared__ bool warp_closed[kMaxWarps];
  __shared__ Wide groups_carry;
  __shared__ Piece<Wide> group_before, tiles_before;
  Wide carry = cast<Wide>(0.0);
  if (warps > 1 && !apart) {
    Wide warp_power = cast<Wide>(1.0);
    if constexpr (!kByChunk) {
      warp_power = chunk_gates[0];
#pragma unroll
      for (int e = 1; e < kChunks; e *= 2) warp_power = narrow ? warp_power * warp_power : clamped_mul(warp_power, warp_power);
    }
    const auto warp_piece = [&](int w) {
      Wide factor;
      if constexpr (kByChunk) factor = warp_gates[w];
      else factor = warp_power;
      bool stops = false;
      if constexpr (kCuts != Cuts::kPlain) stops = warp_closed[w];
      return Piece<Wide>{warp_totals[w], factor, stops};
    };
    Piece<Wide> mine = chunk_piece(0);
#pragma unroll
    for (int k = 1; k < kChunks; ++k) {
      const Piece<Wide> next = chunk_piece(k);
      mine.total = after(next, mine.total);
      if constexpr (kByChunk) mine.gates = clamped_mul(mine.gates, next.gates);
      mine.closed = mine.closed || next.closed;
    }
    if (lane == 0) {
      warp_totals[warp] = mine.total;
      if constexpr (kByChunk) warp_gates[warp] = mine.gates;
      if constexpr (kCuts != Cuts::kPlain) warp_closed[warp] = mine.closed;
    }
    __syncthreads();
    if constexpr (kCuts == Cuts::kPlain) {
      if (params.tiles > 1) {
        // Each block leaves its total with all blocks of its row.
        __shared__ Wide cluster_totals[kMaxCluster], cluster_gates[kMaxCluster];
        Wide tile_power = warp_power;
        if constexpr (!kStep)
          for (int e = 1; e < warps; e *= 2) tile_power = narrow ? tile_power * tile_power : clamped_mul(tile_power, tile_power);
        wait_for_cluster();  // all blocks have started
        if (threadIdx.x < params.tiles) {
          Piece<Wide> own = warp_piece(0);
          for (int w = 1; w < warps; ++w) {
            const Piece<Wide> next = warp_piece(w);
            own.total = after(next, own.total);
            if constexpr (kStep) own.gates = clamped_mul(own.gates, next.gates);
          }
          store_in_cluster(&cluster_totals[tile], threadIdx.x, own.total);
          if constexpr (kStep) store_in_cluster(&cluster_gates[tile], threadIdx.x, own.gates);
        }
        arrive_in_cluster();
        wait_for_cluster();
        for (uint32_t t = 0; t < tile; ++t) carry = fold(cluster_totals[t], kStep ? cluster_gates[t] : tile_power, carry);
      }
    }
    if constexpr (kGeneral) {
      if (params.tiles > 1) {
        Status<Wide>* statuses = static_cast<Status<Wide>*>(params.statuses);
        const Chain<Wide> chain{statuses + row * params.tiles, statuses + params.rows * params.tiles + row * params.groups, tile, params.tiles};
        Piece<Wide> own, whole_group;
        if (warp == 0) {
          own = warp_piece(0);
          for (int w = 1; w < kTileWarps; ++w) {  // a chain's tiles are full
            const Piece<Wide> next = warp_piece(w);
            own.total = after(next, own.total);
            if constexpr (kStep || kGeneral) own.gates = clamped_mul(own.gates, next.gates);
            own.closed = own.closed || next.closed;
          }
          if constexpr (!kStep && !kGeneral) own.gates = power_of<kTileWarps>(warp_power);
          if (lane == 0) chain.publish(own);
        }
        if (warp == 0) {
          const Piece<Wide> before = chain.fold_before(own, whole_group, lane);
          if (lane == 0) tiles_before = before;
        } else if (warp == 1) {
          const Wide prefix = chain.groups_before(lane);
          if (lane == 0) groups_carry = prefix;
        } else if (warp == 2) {
          const Piece<Wide> before = chain.group_before(lane);
          if (lane == 0) group_before = before;
        }
        __syncthreads();
        const Wide prefix = after(group_before, groups_carry);
        if (chain.closes_group() && threadIdx.x == 0) chain.publish_prefix(whole_group, prefix);
        carry = after(tiles_before, prefix);
      }
    }
    for (int w = 0; w < warp; ++w) carry = after(warp_piece(w), carry);
  }

  // The gradient of the gamma of a packed row, the r-th that the scan meets.
  const auto store_row_sum = [&](int r, Acc value) {
    Acc* to = static_cast<Acc*>(p.grad_gamma) + row_offset(reverse ? row + rows_here - 1 - r : row + r, p.grad_gamma_strides);
    for (int64_t j = 0; j < p.partials; ++j) to[j] = j ? cast<Acc>(0.0) : value;
  };

  // The recurrence from each vector's carry.
  Acc* vector_sums = reinterpret_cast<Acc*>(dynamic_shared);  // packed backward: one a vector of the tile
  T* output = tile_of(static_cast<T*>(p.output), p.output_strides);
  Acc sum = cast<Acc>(0.0);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int at = address(k);
    if constexpr (kGeneral && !kStep) gate = make_gate<Acc, kShort>(own_gamma[k]);
    if constexpr (kPackedEach) gate = own_gate[k];
    // Halves stay packed between the two readings: as floats they would take twice the registers.
    if constexpr (sizeof(T) == 2 && kVec == 8) {
      Word& here = word(0, k);
      asm volatile("" : "+r"(here.words[0]), "+r"(here.words[1]), "+r"(here.words[2]), "+r"(here.words[3]));
    }
    const bool entered = open >> k & 1;
    Acc y = entered ? cast<Acc>(fold(carry_into(k), lane_gates[kByChunk ? k : 0], carry)) : cast<Acc>(carry_into(k));
    if (!apart) carry = after(chunk_piece(k), carry);
    Acc values[kVec], factors[kVec];
    read(0, k, values);
    step_gates(k, factors);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (is_cut(k, i)) y = started(values[i], k, i, factors[i]);
      else y = advance(values[i], factors[i], y);
      values[i] = y;
    }
    const Word turned = in_memory_order(values);
    if (whole) *reinterpret_cast<Word*>(output + address(0) + k * (reverse ? -32 * kVec : 32 * kVec)) = turned;
    else store_vector<T, kVec>(output, at, low, high, turned);

    if constexpr (kBackward) {
      // grad_gamma[t] = output[t] * conj(saved[next(t)]).
      Acc rounded[kVec], after_each[kVec], terms[kVec];
      if constexpr (kDirection == Direction::kEither) {
        Word result = turned;
        turn(result, reverse);
        unpack(result, rounded);
      } else {
        unpack_in_order<kDirection == Direction::kRight>(turned, rounded);
      }
      read(kSavedTensor, k, after_each);
      const Acc following = shuffle_down(after_each[0], 1);
      const Acc beyond = lane == 31 ? cast<Acc>(saved_next[k]) : following;
      uint32_t resets = 0;
      if (has_reset) resets = load_flags<kVec>(reset, at, low, high, reverse);
      Acc vector_sum = cast<Acc>(0.0);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int s = position(k) + i;
        Acc other = i + 1 < kVec ? after_each[(i + 1) % kVec] : beyond;
        bool last = false;  // the adjoint's last step of a row is the forward's first: its carry was `initial`
        if (packed) last = s >= pad && (kVec == 1 || kGeneral || i + 1 == kVec) && (s - pad) % time == time - 1;
        else last = start + s - pad == length - 1;
        if (last) other = has_initial ? initial_at(s) : cast<Acc>(0.0);
        Acc term = cast<Acc>(0.0);
        if (inside(s) && !(resets >> i & 1)) term = plain_step(term, conj_if(true, other), rounded[i]);
        terms[i] = term;
        vector_sum = vector_sum + term;
      }
      if constexpr (kStep) {
        store_vector<T, kVec>(tile_of(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides), at, low, high, in_memory_order(terms));
      }
      if (!kStep && apart) {
        for (int d = span / 2; d > 0; d /= 2) vector_sum = vector_sum + shuffle(vector_sum, lane ^ d);
        const int r = (first_vector + k * 32) / span;
        if (lane % span == 0 && r < rows_here) store_row_sum(r, vector_sum);
      } else if (!kStep && packed) {
        vector_sums[first_vector + k * 32] = vector_sum;
      } else {
        sum = sum + vector_sum;
      }
    }
  }
  if constexpr (kBackward && !kStep) {
    Acc* grad_gamma = static_cast<Acc*>(p.grad_gamma);
    if (apart) {
      // Stored already.
    } else if (packed) {
      // Eight lanes a row add its vectors' sums (a vector lies in one row, and no row is padded).
      __syncthreads();
      const int per_row = time / kVec;
      for (int r = threadIdx.x / 8; r < (rows_here + 3) / 4 * 4; r += blockDim.x / 8) {
        Acc part = cast<Acc>(0.0);
        if (r < rows_here)
          for (int v = threadIdx.x % 8; v < per_row; v += 8) part = part + vector_sums[r * per_row + v];
#pragma unroll
        for (int d = 4; d > 0; d /= 2) part = part + shuffle(part, lane / 8 * 8 + (lane + d) % 8);
        if (threadIdx.x % 8 == 0 && r < rows_here) store_row_sum(r, part);
      }
    } else {
      __shared__ Acc sums[kMaxWarps];
      sum = block_sum(sum, sums, lane, warp, warps);
      Acc* partials = grad_gamma + outer * p.grad_gamma_strides.outer + inner * p.grad_gamma_strides.inner;
      if (threadIdx.x == 0) partials[tile] = sum;
      if (tile == 0)
        for (int64_t j = params.tiles + threadIdx.x; j < p.partials; j += blockDim.x) partials[j] = cast<Acc>(0.0);
    }
  }
}

}  // namespace dcs
