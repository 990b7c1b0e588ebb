// The temporal difference scan of any shape, along any dimension and with any strides. A block goes through a walk, or
// a chunk of one, tile by tile, from the last step back:
//   fill     all threads read neighboring memory and leave each step's difference, gate and cut in shared memory,
//   add up   a thread scans some steps of a sequence from nothing,
//   exchange their pieces are scanned across the block, from what the tile before has left,
//   apply    the same threads scan their steps again from what enters them,
//   finish   all threads write neighboring memory.
// Rows are cut where they end, so that a tile may hold many short ones. Where rows are too long and too few for that, a
// first kernel finds the pieces of chunks, which for most of them are known from the episode that ends last; the second
// one begins each chunk from those before it. No block waits for another.
#pragma once

#include "returns/chunks/pieces.cuh"
#include "returns/chunks/steps.cuh"

namespace dcs {

template <typename T, bool kGates>
struct ReturnsTileMemory {
  using Acc = typename Types<T>::Acc;
  static constexpr int kSlots = tile_slots(sizeof(T)), kPadding = 16 / sizeof(Acc),
                       kPadded = kSlots + kChunkThreads * kPadding;
  alignas(16) Acc values[kPadded];  // what each step adds; then the results
  alignas(16) Acc gates[kGates ? kPadded : 4];
  uint32_t cuts[kSlots / 32];           // a bit a slot: nothing is carried into it
  Piece<double> pieces[kChunkThreads];  // then what enters each part, in place of its total
  Piece<double> warp_pieces[kChunkThreads / 32];
  bool warp_begins[kChunkThreads / 32];
  uint32_t closed[kChunkThreads / 32];    // a bit a part
  double entering[kColumnsOfTile];        // into each sequence of the tile
  Piece<double> carried[kColumnsOfTile];  // into each sequence of the next one
  Rates<Acc> rates[kColumnsOfTile];       // of each column, where they differ
};

// kPieces: for the piece of the chunk alone.
template <typename T, bool kGates, bool kPieces>
struct ReturnsChunk {
  using Acc = typename Types<T>::Acc;
  using Memory = ReturnsTileMemory<T, kGates>;
  using Four = Vector<Acc, 4>;
  static constexpr int kSteps = scan_steps(sizeof(T)), kColumnSteps = column_steps(sizeof(T)),
                       kUnit = column_unit(sizeof(T));

  const ReturnsChunksParams<Acc>& params;
  const ReturnsProblem& p = params.problem;
  const ReturnsPlan& plan = params.plan;
  Memory& memory;
  ReturnsPlaces<Acc> walk;
  const bool is_one = plan.is_one_piece();
  int sequence, part;  // of the steps that the thread scans
  bool scans;
  uint32_t part_cuts = 0;  // a bit a step
  double part_power;       // where rates are a column's own
  double lane_power;       // over the parts of the lanes up to the thread's, where they are numbers

  __device__ __forceinline__ ReturnsChunk(const ReturnsChunksParams<Acc>& given, Memory& shared, uint32_t chunks)
      : params(given), memory(shared), walk(given, chunks) {
    const uint32_t thread = threadIdx.x;
    part = static_cast<int>(params.sequences.of(thread));
    sequence = static_cast<int>(thread) - part * plan.sequences;
    scans = part < plan.parts;
    part_power = plan.powers[0];
    lane_power = 1.0;
#pragma unroll
    for (int k = 0; k < 6; ++k)
      if ((thread % 32 + 1) >> k & 1) lane_power = clamped_mul(lane_power, plan.powers[k]);
    if (params.own_rates) find_rates();
  }
  __device__ __forceinline__ void find_rates() {
    const int column = static_cast<int>(threadIdx.x);
    if (column < walk.columns)
      memory.rates[column] = rates_of<Acc>(p.gamma, p.trace, walk.at_row(0, column, p.gamma.tensor.strides),
          walk.at_row(0, column, p.trace.tensor.strides));
    else if (column < plan.sequences) memory.rates[column] = params.rates;
    __syncthreads();
    if (scans) part_power = whole_power(rates_of_sequence().carried, static_cast<unsigned>(plan.part_steps));
  }
  // The rates of a column of the walk.
  __device__ __forceinline__ const Rates<Acc>& rates_of_column(int column) const {
    if constexpr (kGates) {
      if (params.own_rates) return memory.rates[column];
    }
    return params.rates;
  }
  __device__ __forceinline__ const Rates<Acc>& rates_of_sequence() const {
    return rates_of_column(walk.column_of(sequence));
  }
  __device__ __forceinline__ const Rates<Acc>& rates_of_slot(int slot) const {
    return rates_of_column(kGates && params.own_rates ? walk.column_of_slot(slot) : 0);
  }
  // Of a slot in the tile's arrays: rows' steps are padded, so that neighboring threads' fall on different banks.
  __device__ __forceinline__ int place_in_tile(int slot) const {
    return is_one ? slot + static_cast<int>(static_cast<uint32_t>(slot) / kSteps) * Memory::kPadding : slot;
  }
  // Of slot j of some steps.
  template <typename Steps>
  __device__ __forceinline__ int place_of(const Steps& steps, int j) const {
    constexpr int kApart = kChunkThreads + kChunkThreads / kSteps * Memory::kPadding;
    if constexpr (Steps::kIn == Tile::kRows) return place_in_tile(steps.first) + j * kApart;
    if constexpr (Steps::kIn == Tile::kPiece) return place_in_tile(steps.first) + j * (is_one ? kApart : kChunkThreads);
    return steps.first + j * kChunkThreads;
  }

  // Filling and finishing: visit(steps) for all of the tile's, some at a time.
  template <Tile kTile, typename Visit>
  __device__ __forceinline__ void each_steps_in(const Visit& visit) const {
    using Steps = ReturnsSteps<T, kGates, kTile>;
#pragma unroll 1
    for (int number = 0; number * kChunkThreads < plan.slots; number += Steps::kCount) {
      Steps steps(walk, number);
      visit(steps);
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void each_steps(const Visit& visit) const {
    // Whole tiles of doubles are too rare for code of their own.
    constexpr bool kWhole = sizeof(T) <= 4;
    if (!plan.linear) {
      if (!walk.is_even) each_steps_in<Tile::kAny>(visit);
      else if (kWhole && walk.there == plan.slots && walk.columns == plan.sequences)
        each_steps_in<kWhole ? Tile::kSpan : Tile::kSpanPart>(visit);
      else each_steps_in<Tile::kSpanPart>(visit);
    } else if (kWhole && is_one && walk.there == plan.slots) {
      each_steps_in<kWhole ? Tile::kRows : Tile::kPiece>(visit);
    } else {
      each_steps_in<Tile::kPiece>(visit);
    }
  }

  // The tile's steps from line `first` of the scan on.
  __device__ __forceinline__ void fill(int first) {
    walk.begin_tile(first);
    each_steps([this](auto& steps) {
      steps.read_all();
      leave(steps);
    });
  }
  template <typename Steps>
  __device__ __forceinline__ void leave(const Steps& steps) const {
    const uint32_t warp = static_cast<uint32_t>(steps.first) / 32;
    const bool is_first = threadIdx.x % 32 == 0, own = kGates && params.own_rates;
    const Weights<Acc> all(params.rates, walk.has_own_values);
#pragma unroll
    for (int j = 0; j < Steps::kCount; ++j) {
      const bool exists = steps.is_there(j);
      const int place = place_of(steps, j);
      const Weights<Acc> weights =
          own ? Weights<Acc>(rates_of_slot(steps.first + j * kChunkThreads), walk.has_own_values) : all;
      const Acc difference = exists ? steps.difference(j, weights) : Acc(0);
      memory.values[place] = kGates ? steps.ratio(j, p.clip_rho) * difference : difference;
      if constexpr (kGates)
        memory.gates[place] = exists ? steps.gammas[j] * steps.traces[j] * steps.ratio(j, p.clip_c) : Acc(1);
      const uint32_t cuts = __ballot_sync(0xffffffffu, exists && steps.is_cut(j));
      if (is_first) memory.cuts[warp + j * (kChunkThreads / 32)] = cuts;
    }
  }

  // Scanning.

  __device__ __forceinline__ int place_of_step(int i) const {
    return is_one ? static_cast<int>(threadIdx.x) * (kSteps + Memory::kPadding) + i
                  : (part * plan.part_steps + i) * plan.sequences + sequence;
  }
  // visit(step, what it adds, its gate) for all of the thread's steps; where kPut its result takes their place.
  template <bool kPut, typename Visit>
  __device__ __forceinline__ void each_step(const Visit& visit) const {
    const int first = place_of_step(0);
    if (is_one) {
#pragma unroll
      for (int i = 0; i < kSteps; i += 4) {
        Four* const at = reinterpret_cast<Four*>(&memory.values[first + i]);
        const Four deltas = *at;
        Four factors = deltas, results;
        if constexpr (kGates) factors = *reinterpret_cast<const Four*>(&memory.gates[first + i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) results.set(k, visit(i + k, deltas.get(k), factors.get(k)));
        if (kPut) *at = results;
      }
      return;
    }
    int at = first;
#pragma unroll
    for (int k = 0; k < kColumnSteps; k += kUnit) {
      if (k >= plan.part_steps) break;
#pragma unroll
      for (int i = k; i < k + kUnit; ++i, at += plan.sequences) {
        const Acc delta = memory.values[at];
        const Acc result = visit(i, delta, kGates ? memory.gates[at] : delta);
        if (kPut) memory.values[at] = result;
      }
    }
  }
  __device__ __forceinline__ void find_cuts() {
    part_cuts = 0;
    if (is_one) {
      const int slot = static_cast<int>(threadIdx.x) * kSteps;
      part_cuts = memory.cuts[slot / 32] >> slot % 32 & ((1u << kSteps) - 1);
      return;
    }
    uint32_t slot = static_cast<uint32_t>(place_of_step(0));
    const uint32_t apart = static_cast<uint32_t>(plan.sequences);
#pragma unroll
    for (int k = 0; k < kColumnSteps; k += kUnit) {
      if (k >= plan.part_steps) break;
#pragma unroll
      for (int i = k; i < k + kUnit; ++i, slot += apart) part_cuts |= (memory.cuts[slot / 32] >> slot % 32 & 1) << i;
    }
  }
  __device__ __forceinline__ Acc next(const Gate<Acc>& gate, int step, Acc delta, Acc factor, Acc y) const {
    if constexpr (kGates) y *= factor;
    return part_cuts >> step & 1 ? delta : gate.step(delta, y);
  }
  // The thread's steps, from nothing.
  __device__ __forceinline__ void add_up() {
    if (!scans) return;
    find_cuts();
    const Gate<Acc> gate = rates_of_sequence().gate;
    Acc y = 0, product = 1;
    each_step<false>([&](int i, Acc delta, Acc factor) {
      if constexpr (kGates) product *= factor;
      return y = next(gate, i, delta, factor, y);
    });
    double gates = static_cast<double>(product);
    if (kGates && part_cuts == 0 && !in_range(product)) {
      gates = 1.0;
      each_step<false>([&](int, Acc, Acc factor) {
        gates = clamped_mul(gates, static_cast<double>(factor));
        return factor;
      });
    }
    memory.pieces[sequence * plan.parts + part] = {
        static_cast<double>(y), clamped_mul(gates, part_power), part_cuts != 0};
  }

  // The threads' pieces, in order of sequences and parts: what enters each part, and each sequence of the next tile.
  __device__ __forceinline__ void exchange(bool of_chunks) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int own_sequence = static_cast<int>(params.parts.of(static_cast<uint32_t>(thread))),
              own_part = thread - own_sequence * plan.parts;
    const bool works = own_sequence < plan.sequences, begins = own_part == 0 || !works;
    Piece<double> piece = identity<double>();
    double entering = 0.0;
    if (works) piece = memory.pieces[thread];
    if (!kPieces && works && begins) {
      entering = memory.carried[own_sequence].total;
      piece = {after(piece, entering), 1.0, true};
      memory.entering[own_sequence] = entering;
    }
    double carry;
    if (!kGates && !of_chunks) carry = scan_totals_of_block(piece, begins);
    else carry = scan_pieces_of_block(piece, begins);
    if (works) memory.pieces[thread].total = own_part == 0 ? entering : carry;
    if (works && own_part == plan.parts - 1) {
      Piece<double>& carried = memory.carried[own_sequence];
      if (kPieces && !kGates) piece.gates = plan.tile_power, piece.closed = is_closed(own_sequence);
      // Of a chunk's piece the later tiles are there already.
      if constexpr (kPieces) carried = continued(carried, piece);
      else carried = piece;
    }
    __syncthreads();
  }
  // Each thread's piece with those before it in its sequence; returns the total of those before.
  __device__ __forceinline__ double scan_pieces_of_block(Piece<double>& piece, bool begins) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    scan_pieces(piece, begins);
    if (lane == 31) memory.warp_pieces[warp] = piece, memory.warp_begins[warp] = begins;
    __syncthreads();
    Piece<double> before = identity<double>();
    bool found = false;
    for (int w = warp - 1; w >= 0 && !found; --w) {
      before = w == warp - 1 ? memory.warp_pieces[w] : continued(before, memory.warp_pieces[w]);
      found = memory.warp_begins[w];
    }
    if (!begins) piece = continued(piece, before);
    const double carry = shuffle_up(piece.total, 1);
    return lane == 0 ? before.total : carry;
  }
  // The same where one power takes a carry over any part: of a piece that is not closed the gates are those of a tile.
  __device__ __forceinline__ double scan_totals_of_block(Piece<double>& piece, bool begins) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const uint32_t closed = __ballot_sync(0xffffffffu, piece.closed);
    if (lane == 0) memory.closed[warp] = closed;
    const bool is_open = scan_totals<32>(piece.total, begins || piece.closed, plan.powers);
    if (lane == 31) memory.warp_pieces[warp] = {piece.total, 1.0, is_open};
    __syncthreads();
    constexpr int kWarps = kChunkThreads / 32;
    const Piece<double> of_warp = memory.warp_pieces[min(lane, kWarps - 1)];
    double before = of_warp.total;
    scan_totals<kWarps>(before, !of_warp.closed, plan.powers + 5);
    before = shuffle(before, max(warp - 1, 0));
    if (is_open) piece.total = fold(piece.total, lane_power, before);
    const double carry = shuffle_up(piece.total, 1);
    return lane == 0 ? before : carry;
  }
  // Whether a part of the sequence is, of which the thread's is the last one.
  __device__ __forceinline__ bool is_closed(int own_sequence) const {
    const int first = own_sequence * plan.parts, last = first + plan.parts - 1;
    uint32_t closed = 0;
    for (int w = first / 32; w <= last / 32; ++w) {
      uint32_t bits = memory.closed[w];
      if (w == first / 32) bits &= ~0u << first % 32;
      if (w == last / 32) bits &= ~0u >> (31 - last % 32);
      closed |= bits;
    }
    return closed != 0;
  }

  // The thread's steps, from what enters them.
  __device__ __forceinline__ void apply() const {
    if (!scans) return;
    const Gate<Acc> gate = rates_of_sequence().gate;
    Acc y = static_cast<Acc>(memory.pieces[sequence * plan.parts + part].total);
    each_step<true>([&](int i, Acc delta, Acc factor) { return y = next(gate, i, delta, factor, y); });
  }

  // Results.

  __device__ __forceinline__ void finish() const {
    each_steps([this](auto& steps) {
      using Steps = std::remove_reference_t<decltype(steps)>;
      constexpr int kCount = Steps::kCount;
#pragma unroll
      for (int j = 0; j < kCount; ++j) steps.values[j] = cast<T>(Acc(0));
      if (walk.has_own_values && p.targets.data) steps.read_values();
      Acc y[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) y[j] = memory.values[place_of(steps, j)];
      T results[kCount];
      if (p.advantages.data) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) results[j] = cast<T>(y[j]);
        steps.write(params.advantages, results);
      }
      if (p.targets.data) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) results[j] = cast<T>(y[j] + cast<Acc>(steps.values[j]));
        steps.write(params.targets, results);
      }
      if constexpr (kGates) {
        if (p.pg_advantages.data) policy_gradients(steps);
      }
    });
  }
  template <typename Steps>
  __device__ __forceinline__ void policy_gradients(Steps& steps) const {
    steps.read_all();
    T results[Steps::kCount];
#pragma unroll
    for (int j = 0; j < Steps::kCount; ++j) {
      const int slot = steps.first + j * kChunkThreads, before = slot - plan.sequences;
      const Rates<Acc>& rates = rates_of_slot(slot);
      Acc value = steps.difference(j, {rates, walk.has_own_values});
      if (steps.is_there(j) && !steps.is_cut(j)) {
        const Acc y = before < 0 ? static_cast<Acc>(memory.entering[slot]) : memory.values[place_in_tile(before)];
        value = rates.gate.step(value, steps.gammas[j] * steps.traces[j] * y);
      }
      results[j] = cast<T>(steps.ratio(j, p.clip_pg) * value);
    }
    steps.write(params.pg_advantages, results);
  }

  // What enters the chunk. Whether it is known: from the piece before, if an episode ends there in all sequences.
  __device__ __forceinline__ bool enter() {
    const int sequences = plan.sequences, thread = static_cast<int>(threadIdx.x);
    Piece<double> before{0.0, 1.0, true};
    if (!plan.whole && walk.chunk > 0 && thread < sequences) before = pieces()[(walk.chunk - 1) * sequences + thread];
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
    return params.pieces + walk.walk * plan.chunks * plan.sequences;
  }
};

}  // namespace dcs
