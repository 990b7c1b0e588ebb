// The temporal difference scan along a strided time of few steps: a thread takes several columns, words of neighbors
// where all operands have them, and asks for all operands of some steps at once. What it makes of them takes their
// registers, and is written as words, too. It takes every option.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/vector.cuh"
#include "returns/few_steps/params.cuh"
#include "returns/few_steps/rates.cuh"
#include "returns/serial_columns/column.cuh"

namespace dcs {

constexpr int kFewReturnsBlock = 256;

// kWide neighboring columns of a word. kTwo: there are two steps at most.
template <typename T, int kWide, ColumnForm kForm, bool kTwo>
struct FewReturns {
  using Acc = typename Types<T>::Acc;
  using Column = ColumnOf<T, kForm>;
  static constexpr bool kAll = has_all(kForm), kRatios = has_factors(kForm);
  static constexpr int kWords = few_returns_words(sizeof(T), kWide, kForm, kTwo), kUnit = kWords * kWide,
                       kSteps = few_returns_steps(kForm, kTwo);
  // Half-precision elements are unpacked, and packed, in pairs.
  static constexpr int kSome = sizeof(T) == 2 && kWide > 1 ? 2 : 1, kParts = kWide / kSome;
  using Part = Vector<T, kSome>;
  struct alignas(kWide * sizeof(T)) Word {
    Part parts[kParts];
  };
  using Bytes = std::conditional_t<kWide == 1, uint8_t, std::conditional_t<kWide == 2, uint16_t, uint32_t>>;
  struct alignas(kWide) FlagWord {
    Bytes bytes[kWide / sizeof(Bytes)];
  };
  struct alignas(kWide * sizeof(RateBits<T>)) RateWord {
    RateBits<T> bits[kWide];
  };
  using NarrowPart = std::conditional_t<kWide == 1, uint16_t, uint32_t>;
  struct alignas(kWide * 2) NarrowRates {
    NarrowPart parts[kWide == 1 ? 1 : kWide / 2];
  };

  // Some steps: their rewards, values and ratios are later results. Each batch is a new one: what a step that is not
  // there leaves as it was would be copied before it is loaded.
  struct Batch {
    Word r[kSteps][kWords], v[kSteps][kWords], rho[kRatios ? kSteps : 1][kWords], next[kAll ? kSteps : 1][kWords];
    RateWord gamma[kAll ? kSteps : 1][kWords], trace[kAll ? kSteps : 1][kWords];
    FlagWord terminates[kSteps][kWords], truncates[kSteps][kWords];
  };

  const FewReturnsParams<Acc>& all;
  const ReturnsColumnParams<Acc>& params;
  const uint32_t outer, first;  // word
  Acc y[kUnit], after[kUnit];
  Acc row_gammas[kUnit], row_traces[kUnit];

  __device__ __forceinline__ FewReturns(const FewReturnsParams<Acc>& given, uint32_t outer, uint32_t first)
      : all(given), params(given.call), outer(outer), first(first) {}

  // All steps.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int done = 0; done < params.length; done += kSteps) {
      Batch batch;
      load(batch, done);
      if (done == 0) begin();
      use(batch, done);
      store(batch, done);
    }
    if constexpr (is_gradient(kForm)) {
      if (params.bootstrap_gradient.last) store_bootstrap_gradient();
    }
  }

 private:
  template <typename Byte>
  __device__ __forceinline__ Byte* address(const ColumnTensor<Byte>& tensor, int w, int done) const {
    Byte* at = last_of_cell(tensor, outer, first) + static_cast<int64_t>(done) * tensor.back;
    return w == 0 ? at : at + static_cast<int64_t>(static_cast<int>(all.begins[w])) * tensor.cell;
  }
  // visit(step, word, its Element, whether there is such a step) of a tensor that is there.
  template <typename Element, typename Byte, typename Visit>
  __device__ __forceinline__ void each(const ColumnTensor<Byte>& tensor, int done, const Visit& visit) const {
    using Own = std::conditional_t<std::is_const_v<Byte>, const Element, Element>;
    const int left = params.length - done;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      Byte* const at = address(tensor, w, done);
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        visit(i, w, *reinterpret_cast<Own*>(at + static_cast<int64_t>(i) * tensor.back), i < left);
    }
  }
  // Zeros where there is no step: to leave what was there would be a copy, which waits for what has been loaded.
  template <typename Element>
  __device__ __forceinline__ void read(const ColumnTensor<const char>& tensor, int done, Element (*to)[kWords]) const {
    if (!tensor.last) {
      fill(to, Element{});
      return;
    }
    each<Element>(tensor, done, [&](int i, int w, const Element& element, bool is_step) {
      to[i][w] = {};
      if (is_step) to[i][w] = element;
    });
  }
  template <typename Element>
  __device__ __forceinline__ static void fill(Element (*to)[kWords], const Element& with) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w) to[i][w] = with;
  }
  __device__ __forceinline__ void read_rates(
      const ColumnTensor<const char>& tensor, bool is_narrow, int done, RateWord (*to)[kWords]) const {
    if (!tensor.last) {
      RateWord ones;
#pragma unroll
      for (int k = 0; k < kWide; ++k) ones.bits[k] = bits_of_one<T>();
      fill(to, ones);
      return;
    }
    if constexpr (sizeof(T) == 2) {
      if (is_narrow) {
        // As they are, for to take them apart would wait for them.
        each<NarrowRates>(tensor, done, [&](int i, int w, const NarrowRates& rates, bool is_step) {
          to[i][w] = {};
          if (!is_step) return;
          const NarrowRates word = rates;
#pragma unroll
          for (int k = 0; k < (kWide + 1) / 2; ++k) to[i][w].bits[k] = word.parts[k];
        });
        return;
      }
    }
    read(tensor, done, to);
  }
  __device__ __forceinline__ void read_flags(
      const ColumnTensor<const char>& tensor, bool is_bool, int done, FlagWord (*to)[kWords]) const {
    if (is_bool || !tensor.last) {
      read(tensor, done, to);
    } else {
      each<Word>(tensor, done, [&](int i, int w, const Word& numbers, bool is_step) {
        to[i][w] = {};
        if (!is_step) return;
        const Word word = numbers;
#pragma unroll
        for (int k = 0; k < kWide; ++k)
          if (cast<Acc>(word.parts[k / kSome].get(k % kSome)) != Acc(0))
            to[i][w].bytes[k / sizeof(Bytes)] |= 1u << 8 * (k % sizeof(Bytes));
      });
    }
  }
  // Asks for some steps.
  __device__ __forceinline__ void load(Batch& b, int done) const {
    read(params.rewards, done, b.r);
    read(params.values, done, b.v);
    if constexpr (kRatios) read(params.rhos, done, b.rho);
    if constexpr (kAll) {
      read(params.next_values, done, b.next);
      read_rates(params.gamma, params.gamma_is_narrow, done, b.gamma);
      read_rates(params.trace, params.trace_is_narrow, done, b.trace);
    }
    read_flags(params.terminated, params.terminated_is_bool, done, b.terminates);
    read_flags(params.truncated, params.truncated_is_bool, done, b.truncates);
  }

  // One number for every column.
  template <typename E>
  __device__ __forceinline__ void read_columns(
      const ColumnTensor<const char>& tensor, bool makes_words, Acc (&to)[kUnit]) const {
    using Element = Vector<E, kWide>;
    Element words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const char* const at = address(tensor, w, 0);
      if (makes_words) {
        words[w] = *reinterpret_cast<const Element*>(at);
      } else {
#pragma unroll
        for (int k = 0; k < kWide; ++k) words[w].set(k, *reinterpret_cast<const E*>(at + k * (tensor.cell / kWide)));
      }
    }
#pragma unroll
    for (int c = 0; c < kUnit; ++c) to[c] = cast<Acc>(cast<typename Types<E>::Acc>(words[c / kWide].get(c % kWide)));
  }
  __device__ __forceinline__ void read_row_rates(const FewReturnsRate<Acc>& rate, Acc (&to)[kUnit]) const {
    if (!rate.rows.last) {
#pragma unroll
      for (int c = 0; c < kUnit; ++c) to[c] = rate.value;
    } else if (rate.dtype == ElementType::Float) {
      read_columns<float>(rate.rows, rate.makes_words, to);
    } else if (rate.dtype == ElementType::BFloat16) {
      read_columns<__nv_bfloat16>(rate.rows, rate.makes_words, to);
    } else {
      read_columns<__half>(rate.rows, rate.makes_words, to);
    }
  }
  // What a column begins with.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int c = 0; c < kUnit; ++c) y[c] = after[c] = 0;
    if (params.row_rates) {
      read_row_rates(all.gamma, row_gammas);
      read_row_rates(all.trace, row_traces);
    }
    if (params.bootstrap.last) read_columns<T>(params.bootstrap, all.bootstrap_makes_words, after);
  }

  __device__ __forceinline__ static Acc rate_of(const RateWord& word, int k, bool is_narrow) {
    if constexpr (sizeof(T) == 2 && kWide > 1)
      return rate_of_bits<T>(is_narrow ? word.bits[k / 2] >> 16 * (k % 2) : word.bits[k], is_narrow);
    else return rate_of_bits<T>(word.bits[k], is_narrow);
  }
  __device__ __forceinline__ static uint32_t flag_of(const FlagWord& word, int k) {
    return word.bytes[k / sizeof(Bytes)] & 0xffu << 8 * (k % sizeof(Bytes));
  }
  // Some steps, whose operands have come, of some columns at a time.
  __device__ __forceinline__ void use(Batch& b, int done) {
#pragma unroll
    for (int c = 0; c < kUnit; c += kSome) use_part(b, done, c);
  }
  __device__ __forceinline__ void use_part(Batch& b, int done, int first_column) {
    const int w = first_column / kWide, part = first_column % kWide / kSome;
    Column columns[kSome];
#pragma unroll
    for (int u = 0; u < kSome; ++u) {
      const int c = first_column + u;
      columns[u].y = y[c];
      columns[u].after = after[c];
      columns[u].rates = params.row_rates
          ? rates_of_row(SplitRate<Acc>{row_gammas[c], all.gamma.rest}, SplitRate<Acc>{row_traces[c], all.trace.rest})
          : params.rates;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= params.length - done) break;
      Acc reward[kSome], value[kSome], next_value[kSome], ratios[kSome] = {};
      unpack(b.r[i][w].parts[part], reward);
      unpack(b.v[i][w].parts[part], value);
      Part following = b.v[i][w].parts[part];
      if constexpr (kAll) {
        if (params.next_values.last) following = b.next[i][w].parts[part];
      }
      unpack(following, next_value);
      if constexpr (kRatios) unpack(b.rho[i][w].parts[part], ratios);
      const bool is_last = is_gradient(kForm) ? done + i + 1 == params.length : i == 0 && done == 0;
      Acc advantage[kSome], target[kSome], pg[kSome];
#pragma unroll
      for (int u = 0; u < kSome; ++u) {
        const int k = part * kSome + u;
        const auto results = columns[u].step(params,
            {reward[u], value[u], next_value[u], ratios[u], flag_of(b.terminates[i][w], k),
                flag_of(b.truncates[i][w], k), is_last},
            [&] {
              return ColumnStepRates<Acc>{rate_of(b.gamma[kAll ? i : 0][w], k, params.gamma_is_narrow),
                  rate_of(b.trace[kAll ? i : 0][w], k, params.trace_is_narrow)};
            });
        advantage[u] = results.advantage, target[u] = results.target, pg[u] = results.pg;
      }
      b.r[i][w].parts[part] = pack<Acc, T, kSome>(advantage);
      b.v[i][w].parts[part] = pack<Acc, T, kSome>(target);
      if constexpr (kRatios) b.rho[i][w].parts[part] = pack<Acc, T, kSome>(pg);
    }
#pragma unroll
    for (int u = 0; u < kSome; ++u) {
      y[first_column + u] = columns[u].y;
      after[first_column + u] = columns[u].after;
    }
  }
  __device__ __forceinline__ void store(const Batch& b, int done) const {
    const auto write = [&](const ColumnTensor<char>& tensor, const Word(*from)[kWords]) {
      if (tensor.last)
        each<Word>(tensor, done, [&](int i, int w, Word& to, bool is_step) {
          if (is_step) to = from[i][w];
        });
    };
    write(params.advantages, b.r);
    write(params.targets, b.v);
    if constexpr (kRatios) write(params.pg_advantages, b.rho);
  }
  __device__ __forceinline__ void store_bootstrap_gradient() const {
#pragma unroll
    for (int c = 0; c < kUnit; ++c)
      *reinterpret_cast<T*>(address(params.bootstrap_gradient, c / kWide, 0) +
          c % kWide * (params.bootstrap_gradient.cell / kWide)) = cast<T>(after[c]);
  }
};

template <typename T, int kWide, ColumnForm kForm, bool kTwo>
__global__ void __launch_bounds__(kFewReturnsBlock, 2)
    few_returns_kernel(const __grid_constant__ FewReturnsParams<typename Types<T>::Acc> params) {
  overlap_launches();
  const ReturnsColumnParams<typename Types<T>::Acc>& call = params.call;
  const uint32_t thread = blockIdx.x * kFewReturnsBlock + threadIdx.x;
  if (thread >= call.cells) return;
  const uint32_t outer = call.cells == call.in_line.divisor ? 0 : call.in_line.of(thread);
  FewReturns<T, kWide, kForm, kTwo>(params, outer, thread - outer * call.in_line.divisor).run();
}

}  // namespace dcs
