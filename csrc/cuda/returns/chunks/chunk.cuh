// The temporal difference scan of any shape, along any dimension and with any strides. A block goes through a walk, or
// a chunk of one, tile by tile, from the last step back:
//   fill     all threads read neighboring memory and leave each step's difference, gate and cut in shared memory,
//   add up   a part of the threads scan some steps of a sequence from nothing,
//   exchange their pieces are scanned across the block, from what the tile before has left,
//   apply    the same threads scan their steps again from what enters them,
//   finish   all threads write neighboring memory.
// Where there are too few rows to fill the GPU, a first kernel finds the pieces of chunks, which for most of them are
// known from the episode that ends last; the second one begins each chunk from those before it. No block waits for
// another.
#pragma once

#include "returns/chunks/pieces.cuh"
#include "returns/chunks/words.cuh"

namespace dcs {

template <typename T, bool kGates>
struct ReturnsTileMemory {
  using Acc = typename Types<T>::Acc;
  static constexpr int kSlots = tile_slots(sizeof(T)), kPadding = 16 / sizeof(Acc),
                       kPadded = kSlots + kScanThreads * kPadding;
  alignas(16) Acc values[kPadded];  // what each step adds; then the results
  alignas(16) Acc gates[kGates ? kPadded : 4];
  alignas(16) Acc differences[kGates ? kPadded : 4];  // for policy-gradient advantages
  alignas(4) uint8_t cuts[kSlots / 4];                // four slots each: nothing is carried into those whose bit is set
  Piece<double> pieces[kScanThreads], warp_pieces[kScanThreads / 32];
  bool warp_begins[kScanThreads / 32];
  double carries[kScanThreads];         // into each part
  double entering[kScanThreads];        // into each sequence of the tile
  Piece<double> carried[kScanThreads];  // into each sequence of the next one
  Rates<Acc> rates[kScanThreads];       // of each sequence, where they differ
};

// kPieces: for the piece of the chunk alone.
template <typename T, bool kGates, bool kPieces>
struct ReturnsChunk {
  using Acc = typename Types<T>::Acc;
  using Memory = ReturnsTileMemory<T, kGates>;
  using Words = ReturnsWords<T, kGates>;
  using Four = Vector<Acc, 4>;

  const ReturnsChunksParams<Acc>& params;
  const ReturnsProblem& p = params.problem;
  const ReturnsPlan& plan = params.plan;
  Memory& memory;
  ReturnsPlaces<T, kGates> walk;
  const bool columns = plan.columns;
  int sequence, part;  // of the steps that the thread scans
  bool scans;
  uint32_t part_cuts = 0;  // a bit a step
  double part_power;

  __device__ __forceinline__ ReturnsChunk(const ReturnsChunksParams<Acc>& given, Memory& shared, uint32_t chunks)
      : params(given), memory(shared), walk(given, chunks) {
    const uint32_t thread = threadIdx.x;
    part = static_cast<int>(params.sequences.of(thread));
    sequence = static_cast<int>(thread) - part * plan.sequences;
    scans = part < plan.parts;
    part_power = plan.part_power;
    if (params.own_rates) find_rates();
  }
  __device__ __forceinline__ void find_rates() {
    const int row = static_cast<int>(threadIdx.x);
    if (row < walk.rows)
      memory.rates[row] = rates_of<Acc>(
          p.gamma, p.trace, walk.row_at(row, p.gamma.tensor.strides), walk.row_at(row, p.trace.tensor.strides));
    __syncthreads();
    if (scans)
      part_power = whole_power(rates_of_row(walk.row_of(sequence)).carried, static_cast<unsigned>(plan.part_steps));
  }

  __device__ __forceinline__ Rates<Acc> rates_of_row(int row) const {
    if (params.own_rates) return memory.rates[row];
    return params.rates;
  }
  // Of four slots in the tile's arrays: neighboring threads' steps fall on different banks.
  __device__ __forceinline__ int place_in_tile(int slot) const {
    return columns ? slot : slot + slot / scan_steps(sizeof(T)) * Memory::kPadding;
  }

  // Filling, four slots at a time.

  // What the next state's value counts.
  __device__ __forceinline__ Acc weight_of(const Words& words, int j, int row, bool is_cut) const {
    const Rates<Acc> rates = rates_of_row(row);
    const bool whole = walk.has_own_values || is_cut;
    if constexpr (kGates) {
      if (walk.step_gamma || walk.step_trace) {
        const Acc gamma = walk.step_gamma ? words.gammas[j] : rates.gamma;
        return whole ? gamma : gamma - gamma * (walk.step_trace ? words.traces[j] : rates.trace);
      }
    }
    return whole ? rates.gamma : rates.rest;
  }
  // The tile's steps from `first_of_tile` on.
  __device__ __forceinline__ void fill(int first_of_tile) {
    walk.begin_tile(first_of_tile);
#pragma unroll 1
    for (int slot = 4 * static_cast<int>(threadIdx.x); slot < plan.slots; slot += 4 * kChunkThreads) {
      Words words(walk);
      words.read_all(slot);
      leave(words, slot);
    }
  }
  __device__ __forceinline__ void leave(const Words& words, int slot) {
    Four differences, deltas, factors;
    uint32_t cuts = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t flag = 0xffu << (24 - 8 * j);
      const bool terminates = (words.terminated & flag) != 0, ends = ((words.terminated | words.truncated) & flag) != 0,
                 is_cut = ends || (words.lasts >> j & 1);
      const Acc weight = weight_of(words, j, params.own_rates ? walk.place_of(slot + j).row : 0, is_cut);
      const bool drops = (p.next_values.data ? terminates : ends) || (!walk.has_own_values && weight == Acc(0));
      Acc difference = cast<Acc>(words.rewards[j]);
      if (!drops) difference += weight * cast<Acc>(words.next[j]);
      if (walk.has_own_values) difference -= cast<Acc>(words.values[j]);
      if (is_cut) cuts |= 1u << j;
      differences.set(j, difference);
      if constexpr (kGates) {
        deltas.set(j, words.ratio(words.rhos[j], p.clip_rho) * difference);
        factors.set(j, words.gammas[j] * words.traces[j] * words.ratio(words.rhos[j], p.clip_c));
      }
    }
    const int place = place_in_tile(slot);
    *reinterpret_cast<Four*>(&memory.values[place]) = kGates ? deltas : differences;
    if constexpr (kGates) {
      *reinterpret_cast<Four*>(&memory.gates[place]) = factors;
      if (!kPieces) *reinterpret_cast<Four*>(&memory.differences[place]) = differences;
    }
    memory.cuts[slot / 4] = static_cast<uint8_t>(cuts);
  }

  // Scanning.

  __device__ __forceinline__ bool is_cut(int slot) const { return (memory.cuts[slot >> 2] >> (slot & 3) & 1) != 0; }
  // The thread's steps i to i + 3, in one of the tile's arrays.
  __device__ __forceinline__ int place_of_step(int i) const {
    return columns ? (part * plan.part_steps + i) * plan.sequences + sequence
                   : static_cast<int>(threadIdx.x) * (plan.part_steps + Memory::kPadding) + i;
  }
  __device__ __forceinline__ Four steps_of(const Acc* values, int i) const {
    const Acc* const from = values + place_of_step(i);
    if (!columns) return *reinterpret_cast<const Four*>(from);
    Four four;
#pragma unroll
    for (int k = 0; k < 4; ++k) four.set(k, from[k * plan.sequences]);
    return four;
  }
  __device__ __forceinline__ void put_steps(Acc* values, int i, const Four& four) const {
    Acc* const to = values + place_of_step(i);
    if (!columns) {
      *reinterpret_cast<Four*>(to) = four;
      return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k * plan.sequences] = four.get(k);
  }
  template <typename Visit>
  __device__ __forceinline__ void each_four(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < scan_steps(sizeof(T)); i += 4) {
      if (i >= plan.part_steps) break;
      visit(i);
    }
  }
  __device__ __forceinline__ void find_cuts() {
    part_cuts = 0;
    each_four([&](int i) {
      if (columns) {
#pragma unroll
        for (int k = i; k < i + 4; ++k) part_cuts |= is_cut(place_of_step(k)) ? 1u << k : 0u;
      } else {
        part_cuts |= static_cast<uint32_t>(memory.cuts[(static_cast<int>(threadIdx.x) * plan.part_steps + i) >> 2])
            << i;
      }
    });
  }
  __device__ __forceinline__ Acc next(const Gate<Acc>& gate, int step, Acc delta, Acc factor, Acc y) const {
    if constexpr (kGates) y *= factor;
    return part_cuts >> step & 1 ? delta : gate.step(delta, y);
  }
  // The thread's steps, from nothing.
  __device__ __forceinline__ void add_up() {
    if (!scans) return;
    find_cuts();
    const Gate<Acc> gate = rates_of_row(walk.row_of(sequence)).gate;
    Acc y = 0, product = 1;
    each_four([&](int i) {
      const Four deltas = steps_of(memory.values, i), factors = kGates ? steps_of(memory.gates, i) : deltas;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        y = next(gate, i + k, deltas.get(k), factors.get(k), y);
        if constexpr (kGates) product *= factors.get(k);
      }
    });
    double gates = static_cast<double>(product);
    if (kGates && part_cuts == 0 && !in_range(product)) {
      gates = 1.0;
#pragma unroll 1
      for (int i = 0; i < plan.part_steps; i += 4) {
        const Four factors = steps_of(memory.gates, i);
#pragma unroll
        for (int k = 0; k < 4; ++k) gates = clamped_mul(gates, static_cast<double>(factors.get(k)));
      }
    }
    memory.pieces[sequence * plan.parts + part] = {
        static_cast<double>(y), clamped_mul(gates, part_power), part_cuts != 0};
  }

  // The threads' pieces, in order of sequences and parts: what enters each part, and each sequence of the next tile.
  __device__ __forceinline__ void exchange(bool of_chunks) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32,
              pieces = plan.sequences * plan.parts;
    const bool works = thread < pieces, helps = thread < kScanThreads;
    const int own_sequence = thread / plan.parts, own_part = thread - own_sequence * plan.parts;
    Piece<double> piece = identity<double>();
    bool begins = own_part == 0 || !works;
    double entering = 0.0;
    if (works) piece = memory.pieces[thread];
    if (!kPieces && works && begins) {
      entering = memory.carried[own_sequence].total;
      piece = {after(piece, entering), 1.0, true};
      memory.entering[own_sequence] = entering;
    }
    Piece<double> before = identity<double>();
    if (helps) {
      if (!kGates && !params.own_rates && !of_chunks) scan_totals(piece, begins, part_power, min(lane, own_part));
      else scan_pieces(piece, begins);
      if (lane == 31) memory.warp_pieces[warp] = piece, memory.warp_begins[warp] = begins;
    }
    __syncthreads();
    if (helps) {
      bool found = false;
      for (int w = warp - 1; w >= 0 && !found; --w) {
        before = w == warp - 1 ? memory.warp_pieces[w] : continued(before, memory.warp_pieces[w]);
        found = memory.warp_begins[w];
      }
      if (!begins) piece = continued(piece, before);
      double carry = shuffle_up(piece.total, 1);
      if (lane == 0) carry = before.total;
      if (works) memory.carries[thread] = own_part == 0 ? entering : carry;
      if (works && own_part == plan.parts - 1) {
        Piece<double>& carried = memory.carried[own_sequence];
        // Of a chunk's piece the later tiles are there already.
        if constexpr (kPieces) carried = continued(carried, piece);
        else carried = piece;
      }
    }
    __syncthreads();
  }

  // The thread's steps, from what enters them.
  __device__ __forceinline__ void apply() const {
    if (!scans) return;
    const Gate<Acc> gate = rates_of_row(walk.row_of(sequence)).gate;
    Acc y = static_cast<Acc>(memory.carries[sequence * plan.parts + part]);
    each_four([&](int i) {
      const Four deltas = steps_of(memory.values, i), factors = kGates ? steps_of(memory.gates, i) : deltas;
      Four results;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        y = next(gate, i + k, deltas.get(k), factors.get(k), y);
        results.set(k, y);
      }
      put_steps(memory.values, i, results);
    });
  }

  // Results.

  __device__ __forceinline__ void finish() const {
#pragma unroll 1
    for (int slot = 4 * static_cast<int>(threadIdx.x); slot < plan.slots; slot += 4 * kChunkThreads) {
      Words words(walk);
      words.template find<false>(slot);
      const int64_t at = !words.is_quad ? 0
          : params.linear               ? walk.output_at - slot
                                        : walk.offset(words.place, params.results);
      if (walk.has_own_values && p.targets.data) words.read_own_values(slot);
      const Four y = *reinterpret_cast<const Four*>(&memory.values[place_in_tile(slot)]);
      T results[4];
      if (p.advantages.data) {
#pragma unroll
        for (int j = 0; j < 4; ++j) results[j] = cast<T>(y.get(j));
        write(p.advantages, words, slot, at, results);
      }
      if (p.targets.data) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          results[j] = cast<T>(walk.has_own_values ? y.get(j) + cast<Acc>(words.values[j]) : y.get(j));
        write(p.targets, words, slot, at, results);
      }
      if constexpr (kGates) {
        if (p.pg_advantages.data) {
          policy_gradients(words, slot, results);
          write(p.pg_advantages, words, slot, at, results);
        }
      }
    }
  }
  // `at`: of a quad.
  __device__ __forceinline__ void write(
      const ReturnsOutput& output, const Words& words, int slot, int64_t at, const T (&from)[4]) const {
    T* const to = static_cast<T*>(output.data);
    if (words.is_quad) {
      store_quad(to + at, from);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto place = walk.place_of(slot + j);
      if (place.is_there) to[walk.offset(place, output.strides)] = from[j];
    }
  }
  __device__ __forceinline__ void policy_gradients(Words& words, int slot, T (&results)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) words.gammas[j] = words.traces[j] = 1, words.rhos[j] = cast<T>(Acc(0));
    if (words.is_quad) words.read_gates();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto place = walk.place_of(slot + j);
      if (!words.is_quad && place.is_there) words.read_gates_of(place, j);
      Acc value = memory.differences[place_in_tile(slot) + j];
      if (!is_cut(slot + j)) {
        const int before = slot + j - plan.sequences;
        const Acc y = before < 0 ? static_cast<Acc>(memory.entering[slot + j])
                                 : memory.values[place_in_tile(before & ~3) + (before & 3)];
        value = rates_of_row(place.row).gate.step(value, words.gammas[j] * words.traces[j] * y);
      }
      results[j] = cast<T>(words.ratio(words.rhos[j], p.clip_pg) * value);
    }
  }

  // What enters the chunk. Whether it is known: from the piece before, if an episode ends there in all sequences.
  __device__ __forceinline__ bool enter() {
    const int sequences = plan.sequences, thread = static_cast<int>(threadIdx.x);
    Piece<double> before{0.0, 1.0, true};
    if (walk.chunk > 0 && thread < sequences) before = pieces()[(walk.chunk - 1) * sequences + thread];
    const bool known = __syncthreads_and(before.closed);
    if (thread < sequences) memory.carried[thread] = known ? before : Piece<double>{0.0, 1.0, true};
    return known;
  }
  // Then the pieces before it are scanned as a tile's are: those of several chunks for each part.
  __device__ __forceinline__ void gather() const {
    if (!scans) return;
    const int share = (walk.chunk + plan.parts - 1) / plan.parts, last = min(walk.chunk, (part + 1) * share);
    Piece<double> piece = identity<double>();
#pragma unroll 4
    for (int j = part * share; j < last; ++j) piece = continued(pieces()[j * plan.sequences + sequence], piece);
    memory.pieces[sequence * plan.parts + part] = piece;
  }
  __device__ __forceinline__ Piece<double>* pieces() const {
    return params.pieces + walk.index * plan.chunks * plan.sequences;
  }
};

}  // namespace dcs
