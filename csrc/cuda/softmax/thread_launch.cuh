// Which columns of few steps threads take alone (launch.cuh has the table).
#pragma once

#include "softmax/small_launch.cuh"
#include "softmax/thread_columns.cuh"

namespace dcs {

template <typename T>
class ThreadLaunch : protected SmallLaunch<T> {
 protected:
  using Base = SmallLaunch<T>;
  using Base::Base;
  using Base::device_;
  using Base::elements;
  using Base::is_view;
  using Base::kHalf;
  using Base::kSize;
  using Base::kVec;
  using Base::launch;
  using Base::p_;
  using Base::slab;

  // Whether a thread takes all steps of its columns: few steps, of so many bytes that its neighbors read beside it, and
  // of a view steps at one distance from each other.
  bool has_few_steps() const {
    return p_.inner > 1 && strip() * kSize >= kLeastStepBytes && p_.length <= most_few_steps() &&
        (!is_view() || p_.run % slab() == 0 || p_.inner % p_.run == 0);
  }
  // ... in whole vectors of all tensors.
  bool has_whole_steps() const { return step_word() == kVec && has_few_steps(); }
  // So few elements that threads with more than four steps would be too few: small tensors' are more.
  bool has_few_elements() const { return p_.length > 4 && elements() <= kFewElements * device_.multiprocessors; }
  cudaError_t run_few_steps() const {
    const int64_t word = step_word();
    if (word == kVec) return run_words<kVec>();
    if constexpr (kHalf) {
      if (word == 2) return run_words<2>();
    }
    return run_words<1>();
  }

 private:
  // Bytes of one of few steps, at least; such steps of a thread, at most where they take many registers, and else.
  static constexpr int64_t kLeastStepBytes = 128;
  static constexpr int kMostVectorSteps = 8, kMostSteps = 16;
  // Of a multiprocessor. 48 random problems on an H200: above it few steps take 0.6 to 1.1 of small tensors' time,
  // below it with more than four steps up to 1.4.
  static constexpr int64_t kFewElements = 1000;

  // Columns of an outer that lie side by side in all tensors, or all of those.
  int64_t strip() const { return is_view() ? std::min(p_.run, p_.inner) : p_.inner; }
  // The widest word of a step, in elements, that begins and ends at a multiple of its bytes in all tensors: a vector of
  // 16 bytes, a register of 4, or an element.
  int64_t step_word() const {
    const auto address = [](const void* tensor) { return reinterpret_cast<uintptr_t>(tensor); };
    uint64_t ends = address(p_.input) | address(p_.saved) | address(p_.output) | p_.inner * kSize;
    if (is_view()) ends |= p_.run * kSize | p_.gap * kSize;
    return ends % 16 == 0 ? kVec : ends % 4 == 0 ? std::max(4 / kSize, 1) : 1;
  }
  // As many as the registers have room for: backward these are two tensors', and half precision has eight elements in a
  // vector.
  int64_t most_few_steps() const {
    if (kHalf) return step_word() == kVec ? kMostVectorSteps : kMostSteps;
    return kSize == 8 || !p_.backward ? kMostSteps : kMostVectorSteps;
  }

  template <int kWord>
  cudaError_t run_words() const {
    auto params = this->template operands<SoftmaxColumns<T>>();
    params.length = p_.length, params.inner = p_.inner;
    params.runs = this->runs();
    // A view's runs have whole slabs, or some of them a step.
    params.input_step = p_.inner + (is_view() && p_.run < slab() ? p_.inner / p_.run * p_.gap : 0);
    params.strip_words = strip() / kWord;
    params.outer_strips = p_.inner / strip();
    params.strips = p_.outer * params.outer_strips;
    return p_.backward ? run_words_of<kWord, true>(params) : run_words_of<kWord, false>(params);
  }
  template <int kWord, bool kBackward>
  cudaError_t run_words_of(SoftmaxColumns<T>& params) const {
    const auto run = [this, &params](auto steps) {
      constexpr int kSteps = decltype(steps)::value;
      constexpr int kWords = few_steps_words(kWord * kSize, kSteps, kBackward);
      const int64_t warps = ceil_div(params.strip_words, int64_t{32} * kWords),
                    threads = params.strips * (kWords == 1 ? params.strip_words : 32 * warps);
      params.by_warps = Divisor(static_cast<uint32_t>(warps));
      return this->launch(softmax_few_steps_kernel<T, kWord, kSteps, kBackward>, params,
          ceil_div(threads, int64_t{kFewStepsThreads}), kFewStepsThreads);
    };
    constexpr bool kHasMore = kHalf ? kWord < kVec : kSize == 8 || !kBackward;
    if constexpr (kHasMore) return Base::template with_room<2, 4, kMostVectorSteps, kMostSteps>(p_.length, run);
    else return Base::template with_room<2, 4, kMostVectorSteps>(p_.length, run);
  }
};

}  // namespace dcs
