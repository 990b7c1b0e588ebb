// The temporal difference scan along a strided time whose steps lie one behind the other, of fewer columns than a line
// of memory has room for: some steps of all columns are one range of memory, of every operand. It comes to shared
// memory in whole vectors whatever its alignment; threads go through their steps there twice, for their totals and
// from what enters them; results overwrite the operands and go back as they came. A row of few steps is cut off the
// one behind it in time, as one sequence.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/tile_columns/params.cuh"
#include "returns/tile_columns/steps.cuh"
#include "scan/columns/tile_carries.cuh"
#include "scan/columns/tile_copy.cuh"

namespace dcs {

template <typename T, ColumnForm kForm>
using FlatTileSteps = TileSteps<T, kForm, flat_tile_batch(kForm)>;

template <typename T, ColumnForm kForm>
struct FlatTile : FlatTileSteps<T, kForm> {
  using Steps = FlatTileSteps<T, kForm>;
  using Steps::call, Steps::cuts, Steps::drops, Steps::rates, Steps::results, Steps::rhos, Steps::values;
  using Steps::kAll, Steps::kGates, Steps::kSteps;
  using typename Steps::Acc, typename Steps::Step, typename Steps::Wide;
  static constexpr int kColumns = flat_tile_columns(sizeof(T)), kWarps = kColumnThreads / 32;
  using Carries = TileCarries<T, kGates, 1, 2, kColumns>;

  const TileColumnsParams<Acc>& params;
  const ResidentColumnsPlan& t = params.carries.plan;
  char* const memory;
  uint32_t tile, strip;
  int first_line, lines;  // of the tile in its strip, in the order of memory
  int part, column;
  bool works;
  int first_step, count;  // in the order of the scan
  int last_line;          // of the first one in the tile, a line of it

  // Of the steps to come.
  const char* at[kTileOperands];  // where in shared memory the next one's operands are
  int next_step;                  // in the order of the scan
  int until_last;                 // how many before one that is its row's last
  Acc behind;                     // the value of the state behind the next

  __device__ __forceinline__ FlatTile(const TileColumnsParams<Acc>& given, unsigned char* shared)
      : Steps(given.call), params(given), memory(reinterpret_cast<char*>(shared)) {
    tile = params.carries.strips.of(blockIdx.x);
    strip = blockIdx.x - tile * params.carries.strips.divisor;
    const int thread = static_cast<int>(threadIdx.x), steps = t.parts * t.part_steps;
    const int own_part = static_cast<int>(threadIdx.x * t.span_inverse >> 16);
    const int end = params.lines - static_cast<int>(tile) * steps;
    first_line = max(0, end - steps);
    lines = end - first_line;
    works = own_part < t.parts;
    part = min(own_part, t.parts - 1);
    column = works ? thread - own_part * t.span : 0;
    first_step = (static_cast<int>(tile) * t.parts + part) * t.part_steps;
    last_line = lines - 1 - part * t.part_steps;
    count = works ? max(0, min(t.part_steps, last_line + 1)) : 0;
    this->find_rates(static_cast<int>(strip), column);
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
    return memory + tensor.slot + static_cast<int>(address % 16) + last_line * tensor.row_bytes +
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
    for (int i = 0; i < kSome; ++i, at[which] -= params.tensors.of[which].row_bytes)
      to[i] = *reinterpret_cast<const Element*>(at[which]);
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

  // The value behind a row whose last step this is.
  __device__ __forceinline__ Acc bootstrap_of(int step) const {
    if (!call.bootstrap.last) return 0;
    const uint32_t line = (strip + 1) * static_cast<uint32_t>(params.lines) - 1 - static_cast<uint32_t>(step);
    return cast<Acc>(*reinterpret_cast<const T*>(
        last_of_cell(call.bootstrap, params.length.of(line), static_cast<uint32_t>(column))));
  }

  // Before the first step.
  __device__ __forceinline__ void begin() {
    const uint32_t length = params.length.divisor, step = static_cast<uint32_t>(first_step),
                   over = step - params.length.of(step) * length;
    next_step = first_step;
    until_last = static_cast<int>(over == 0 ? 0 : length - over);
    find_addresses();
    T value{};
    if (over != 0 && count > 0 && !call.has_next_values && call.values.last)
      value = *reinterpret_cast<const T*>(at[kValuesTensor] + params.tensors.of[kValuesTensor].row_bytes);
    behind = cast<Acc>(value);
  }
  // The next steps.
  template <int kSome>
  __device__ __forceinline__ void load() {
    T rewards[kSome], own[kSome] = {}, ratios[kSome];
    Acc own_values[kSome], following[kSome];
    RateBits<T> gammas[kSome], traces[kSome];
    read(kRewardsTensor, rewards);
    if (call.values.last) read(kValuesTensor, own);
    if constexpr (kGates) {
      if (call.rhos.last) read(kRhosTensor, ratios);
    }
    if constexpr (kAll) {
#pragma unroll
      for (int i = 0; i < kSome; ++i) gammas[i] = traces[i] = bits_of_one<T>();
      if (call.gamma.last) read_rates(kGammaTensor, call.gamma_is_narrow, gammas);
      if (call.trace.last) read_rates(kTraceTensor, call.trace_is_narrow, traces);
    }
    uint32_t truncates = 0;
    const uint32_t lasts = until_last < kSome ? 1u << until_last : 0;
    drops = 0;
    read_flags<kSome>(kTerminatedTensor, call.terminated.last, call.terminated_is_bool, drops);
    read_flags<kSome>(kTruncatedTensor, call.truncated.last, call.truncated_is_bool, truncates);
    this->set_flags(truncates, lasts);
#pragma unroll
    for (int i = 0; i < kSome; ++i) own_values[i] = cast<Acc>(own[i]);
    if (call.has_next_values) {
      T next[kSome];
#pragma unroll
      for (int i = 0; i < kSome; ++i) next[i] = own[i];
      if (call.next_values.last) read(kNextTensor, next);
#pragma unroll
      for (int i = 0; i < kSome; ++i) following[i] = cast<Acc>(next[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSome; ++i) following[i] = i == 0 ? behind : own_values[i - 1];
      if (lasts) {
        const Acc last = bootstrap_of(next_step + until_last);
#pragma unroll
        for (int i = 0; i < kSome; ++i) following[i] = lasts & 1u << i ? last : following[i];
      }
      behind = own_values[kSome - 1];
    }
    next_step += kSome;
    until_last -= kSome;
    if (until_last < 0) until_last += static_cast<int>(params.length.divisor);
#pragma unroll
    for (int i = 0; i < kSome; ++i) {
      Acc own_gamma = 1, own_trace = 1;
      if constexpr (kAll) {
        own_gamma = rate_of_bits<T>(gammas[i], call.gamma_is_narrow);
        own_trace = rate_of_bits<T>(traces[i], call.trace_is_narrow);
      }
      this->set_step(i, cast<Acc>(rewards[i]), call.has_own_values, own_values[i], following[i], own_gamma, own_trace);
      values.set(i, own[i]);
      if constexpr (kGates) rhos.set(i, ratios[i]);
    }
  }
  // Goes through the part's steps: visit(how many are set, whether the first of them is the part's).
  template <typename Visit>
  __device__ __forceinline__ void each_batch(const Visit& visit) {
    int left = count;
#pragma unroll 1
    for (; left >= kSteps; left -= kSteps) {
      load<kSteps>();
      visit(std::integral_constant<int, kSteps>{}, left == count);
    }
#pragma unroll 1
    for (; left > 0; --left) {
      load<1>();
      visit(std::integral_constant<int, 1>{}, left == count);
    }
  }

  // The part's segment, from nothing.
  __device__ __forceinline__ Segment<Wide> add_up() {
    begin();
    const int first_until_last = until_last;
    const Acc first_behind = behind;  // results take its place
    Acc y = 0;
    Wide product = 1.0;
    uint32_t closed = 0;
    if constexpr (kGates)
      product = call.row_rates ? whole_power(rates.carried, static_cast<unsigned>(t.part_steps)) : t.powers[0];
    each_batch([&](auto some, bool is_first) {
      [[maybe_unused]] Wide of_some;  // four floats' product is within a double
#pragma unroll
      for (int i = 0; i < some(); ++i) {
        const Step step = this->step_of(i);
        const bool begins = i == 0 && is_first;
        y = begins || step.is_cut ? step.delta : this->gated(step.delta, step.factor * y);
        if constexpr (kGates) {
          const Wide factor = static_cast<Wide>(step.factor);
          of_some = i % kTileBatch == 0 ? factor : of_some * factor;
          if (sizeof(T) > 4 || i % kTileBatch == kTileBatch - 1 || i + 1 == some())
            product = power_mul(product, sizeof(T) > 4 ? factor : of_some);
        }
      }
      closed |= cuts;
    });
    behind = first_behind;
    next_step = first_step;
    until_last = first_until_last;
    return {static_cast<Wide>(y), product, closed != 0};
  }

  // What enters the thread's part.
  __device__ __forceinline__ Acc enter(const Carries& carries, const Segment<Wide>& segment) const {
    if (works) carries.store(part, column, segment);
    carries.exchange({static_cast<int>(strip), 0});
    return static_cast<Acc>(carries.entering(part, column));
  }

  // All results, from what enters the part.
  __device__ __forceinline__ void finish(Acc y) {
    find_addresses();
    char *advantages = address_in<T>(kAdvantagesTensor), *targets = address_in<T>(kTargetsTensor),
         *pg_advantages = kGates ? address_in<T>(kPgTensor) : nullptr;
    const int row = params.tensors.of[kRewardsTensor].row_bytes;
    each_batch([&](auto some, bool) {
      Acc pg[some()];
#pragma unroll
      for (int i = 0; i < some(); ++i) pg[i] = this->finish_step(i, y);
      const auto store = [&](char*& to, bool is_there, const auto& result) {
        if (!is_there) return;
#pragma unroll
        for (int i = 0; i < some(); ++i, to -= row) *reinterpret_cast<T*>(to) = result(i);
      };
      if constexpr (kGates) store(pg_advantages, call.pg_advantages.last, [&](int i) { return cast<T>(pg[i]); });
      store(advantages, call.advantages.last, [&](int i) { return cast<T>(results[i]); });
      store(targets, call.targets.last, [&](int i) { return this->target_of(i); });
    });
  }
};

template <typename T, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    flat_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  using Tile = FlatTile<T, kForm>;
  using Wide = typename Tile::Wide;
  extern __shared__ __align__(16) unsigned char flat_columns_shared[];
  __shared__ CarryExchange<Wide, Tile::kGates, 1, Tile::kColumns> exchange;
  static_assert(sizeof(exchange) <= resident_exchange_bytes(sizeof(Wide), 1, Tile::kGates, Tile::kColumns));
  overlap_launches();
  Tile tile(params, flat_columns_shared);
  tile.fetch();
  const typename Tile::Carries carries(params.carries, exchange, tile.tile, tile.strip, params.carries.plan.span);
  if (params.carries.plan.tiles > 1 && threadIdx.x == 0) exchange.tag = tag_of_launch(params.carries.tag);
  const Wide carried[] = {tile.rates.carried};
  carries.store_powers(tile.works, tile.part, tile.column, carried);
  wait_for_copies<0>();
  __syncthreads();
  const Segment<Wide> segment = tile.add_up();
  tile.finish(tile.enter(carries, segment));
  __syncthreads();
  tile.copy_back();
}

}  // namespace dcs
