// A tile of columns whose steps lie one behind the other (flat.cuh) in shared memory, whichever way time is scanned.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/tile_columns/params.cuh"
#include "scan/columns/tile_carries.cuh"
#include "scan/columns/tile_copy.cuh"

namespace dcs {

// A tile's memory. Steps: what a thread knows of a column (steps.cuh). The scan goes back from the last step in memory,
// or forward from the first one.
template <typename Steps, bool kGoesBack>
struct FlatTileMemory : Steps {
  using Steps::call;
  using Steps::kAll, Steps::kGates, Steps::kSteps;
  using typename Steps::Acc, typename Steps::Wide;
  using T = typename Steps::Element;
  static constexpr int kColumns = flat_tile_columns(sizeof(T)), kWarps = kColumnThreads / 32;
  using Carries = TileCarries<T, kGates, 2, kColumns>;

  const TileColumnsParams<Acc>& params;
  const ResidentColumnsPlan& t = params.carries.plan;
  char* const memory;
  uint32_t tile, strip;
  int first_line, lines;  // of the tile in its strip, in the order of memory
  int part, column;
  bool works;
  int first_step, count;  // in the order of the scan
  int own_line;           // of the first one in the tile, a line of it

  // Where in shared memory the next step's operands are.
  const char* at[kTileOperands];

  __device__ __forceinline__ FlatTileMemory(const TileColumnsParams<Acc>& given, unsigned char* shared)
      : Steps(given.call), params(given), memory(reinterpret_cast<char*>(shared)) {
    tile = params.carries.strips.of(blockIdx.x);
    strip = blockIdx.x - tile * params.carries.strips.divisor;
    const int thread = static_cast<int>(threadIdx.x), steps = t.parts * t.part_steps;
    const int own_part = static_cast<int>(threadIdx.x * t.span_inverse >> 16);
    const int before = static_cast<int>(tile) * steps;
    lines = min(steps, params.lines - before);
    first_line = kGoesBack ? params.lines - before - lines : before;
    works = own_part < t.parts;
    part = min(own_part, t.parts - 1);
    column = works ? thread - own_part * t.span : 0;
    first_step = (static_cast<int>(tile) * t.parts + part) * t.part_steps;
    own_line = part * t.part_steps;
    count = works ? max(0, min(t.part_steps, lines - own_line)) : 0;
    if constexpr (kGoesBack) own_line = lines - 1 - own_line;
    this->find_rates(static_cast<int>(strip), column);
  }

  // Steps of the scan from a row's first one to the part's; from there to the next row's.
  __device__ __forceinline__ uint32_t into_row() const {
    const auto step = static_cast<uint32_t>(first_step);
    return step - params.length.of(step) * params.length.divisor;
  }
  __device__ __forceinline__ int until_row(uint32_t into) const {
    return static_cast<int>(into == 0 ? 0 : params.length.divisor - into);
  }
  // So many steps on.
  __device__ __forceinline__ void move_on(int& until, int steps) const {
    until -= steps;
    if (until < 0) until += static_cast<int>(params.length.divisor);
  }

  // Tensors' lines before the tile's first one.
  __device__ __forceinline__ int64_t lines_before() const {
    return static_cast<int64_t>(strip) * params.lines + first_line;
  }
  __device__ __forceinline__ CopiedRange range_of(const TileTensor& tensor, int of_lines) const {
    return {tensor.data + lines_before() * tensor.row_bytes, of_lines * tensor.row_bytes, memory + tensor.slot};
  }
  // Asks for all operands.
  __device__ __forceinline__ void fetch() const {
    const int64_t all = static_cast<int64_t>(params.carries.strips.divisor) * params.lines;
#pragma unroll 1
    for (int i = 0; i < kTileOperands; ++i) {
      const TileTensor& tensor = params.tensors.of[i];
      if (!tensor.data) continue;
      const int more = min(tensor.more, params.lines - first_line - lines);
      range_of(tensor, lines + more).fetch(tensor.data, tensor.data + all * tensor.row_bytes, i % kWarps);
    }
    commit_copies();
  }
  __device__ __forceinline__ void copy_back() const {
#pragma unroll 1
    for (int i = kTileOperands; i < kTileTensors; ++i) {
      const TileTensor& tensor = params.tensors.of[i];
      if (tensor.data) range_of(tensor, lines).copy_back(i % kWarps);
    }
  }

  // Where in shared memory the thread's element is of its first step.
  template <typename Element>
  __device__ __forceinline__ char* address_in(TileTensorOf which) const {
    const TileTensor& tensor = params.tensors.of[which];
    const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tensor.data)) +
        static_cast<uint32_t>(lines_before()) * static_cast<uint32_t>(tensor.row_bytes);
    return memory + tensor.slot + static_cast<int>(address % 16) + own_line * tensor.row_bytes +
        column * static_cast<int>(sizeof(Element));
  }
  __device__ __forceinline__ void find_addresses() {
    const auto flags_in = [&](TileTensorOf which, bool is_bool) {
      at[which] = is_bool ? address_in<uint8_t>(which) : address_in<T>(which);
    };
    for (const TileTensorOf which : {kRewardsTensor, kValuesTensor, kNextTensor}) at[which] = address_in<T>(which);
    if constexpr (kGates) at[kRhosTensor] = address_in<T>(kRhosTensor);
    flags_in(kTerminatedTensor, call.terminated_is_bool);
    flags_in(kTruncatedTensor, call.truncated_is_bool);
    if constexpr (kAll) {
      const auto rates_in = [&](TileTensorOf which, bool is_narrow) {
        at[which] = sizeof(T) == 2 && is_narrow ? address_in<T>(which) : address_in<Acc>(which);
      };
      rates_in(kGammaTensor, call.gamma_is_narrow);
      rates_in(kTraceTensor, call.trace_is_narrow);
    }
  }

  // The operand's next steps.
  template <int kSome, typename Element>
  __device__ __forceinline__ void read(TileTensorOf which, Element (&to)[kSome]) {
#pragma unroll
    for (int i = 0; i < kSome; ++i) {
      to[i] = *reinterpret_cast<const Element*>(at[which]);
      const int row = params.tensors.of[which].row_bytes;
      at[which] += kGoesBack ? -row : row;
    }
  }
  template <int kSome>
  __device__ __forceinline__ void read_rates(TileTensorOf which, bool is_narrow, RateBits<T> (&to)[kSome]) {
    read_rate_bits<T>(is_narrow, [&](auto bits) {
      decltype(bits) found[kSome];
      read(which, found);
#pragma unroll
      for (int i = 0; i < kSome; ++i) to[i] = found[i];
    });
  }
  template <int kSome>
  __device__ __forceinline__ void read_flags(TileTensorOf which, bool is_there, bool is_bool, uint32_t& bits) {
    if (!is_there) return;
    const auto add = [&](auto element) {
      decltype(element) flags[kSome];
      read(which, flags);
#pragma unroll
      for (int i = 0; i < kSome; ++i) this->add_flag(i, flags[i], bits);
    };
    if (is_bool) add(uint8_t{});
    else add(T{});
  }

  // Goes through the part's steps: visit(how many are next, whether the first of them is the part's).
  template <typename Visit>
  __device__ __forceinline__ void each_batch(const Visit& visit) const {
    int left = count;
#pragma unroll 1
    for (; left >= kSteps; left -= kSteps) visit(std::integral_constant<int, kSteps>{}, left == count);
#pragma unroll 1
    for (; left > 0; --left) visit(std::integral_constant<int, 1>{}, left == count);
  }

  // What enters the thread's part.
  __device__ __forceinline__ Acc enter(const Carries& carries, const Segment<Wide>& segment) const {
    if (works) carries.store(part, column, segment);
    carries.exchange({static_cast<int>(strip), 0});
    return static_cast<Acc>(carries.entering(part, column));
  }

  // Writes some results from `to` on, which it moves on.
  template <int kSome, typename Result>
  __device__ __forceinline__ void write(char*& to, bool is_there, const Result& result) const {
    if (!is_there) return;
    const int row = t.span * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kSome; ++i, to += kGoesBack ? -row : row) *reinterpret_cast<T*>(to) = result(i);
  }
};

// A Tile's kernel.
template <typename Tile, typename Params>
__device__ __forceinline__ void run_flat_tile(const Params& params) {
  using Wide = typename Tile::Wide;
  extern __shared__ __align__(16) unsigned char flat_columns_shared[];
  __shared__ CarryExchange<Wide, Tile::kGates, Tile::kColumns> exchange;
  static_assert(sizeof(exchange) <= resident_exchange_bytes(sizeof(Wide), Tile::kGates, Tile::kColumns));
  overlap_launches();
  Tile tile(params, flat_columns_shared);
  tile.fetch();
  const typename Tile::Carries carries(params.carries, exchange, tile.tile, tile.strip, params.carries.plan.span);
  if (params.carries.plan.tiles > 1 && threadIdx.x == 0) exchange.tag = tag_of_launch(params.carries.tag);
  carries.store_powers(tile.works, tile.part, tile.column, static_cast<Wide>(tile.rates.carried));
  wait_for_copies<0>();
  __syncthreads();
  const Segment<Wide> segment = tile.add_up();
  tile.finish(tile.enter(carries, segment));
  __syncthreads();
  tile.copy_back();
}

}  // namespace dcs
