// Which columns threads keep in registers (launch.cuh has the table).
#pragma once

#include <optional>

#include "softmax/launch_base.cuh"
#include "softmax/thread_columns.cuh"

namespace dcs {

template <typename T>
class ThreadLaunch : protected SoftmaxLaunchBase<T> {
 protected:
  using Base = SoftmaxLaunchBase<T>;
  using Base::Base;
  using Base::begins_early;
  using Base::device_;
  using Base::elements;
  using Base::is_view;
  using Base::kHalf;
  using Base::kSize;
  using Base::kVec;
  using Base::launch;
  using Base::launch_clusters;
  using Base::p_;
  using Base::slab;
  using typename Base::Acc;

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

  // Whether columns are few elements in all.
  bool is_small() const {
    const int64_t most = kSmallElements * (is_view() ? kViewTimes : 1) * device_.multiprocessors;
    return p_.inner > 1 && elements() <= most;
  }
  // If threads can hold them.
  std::optional<cudaError_t> run_small() const {
    // As wide as a block without a cluster can be.
    const int64_t wanted = kColumnThreads * kThreadSteps * kSize / p_.length;
    int64_t bytes = kUsualWindow;
    while (2 * bytes <= std::min<int64_t>(wanted, kColumnThreads * kSize)) bytes *= 2;
    for (; bytes >= kSize; bytes /= 2)
      if (const auto error = run_windows_of(std::min(bytes / kSize, p_.inner))) return error;
    return std::nullopt;
  }

 private:
  // Bytes of one of few steps, at least; such steps of a thread, at most where they take many registers, and else.
  static constexpr int64_t kLeastStepBytes = 128;
  static constexpr int kMostVectorSteps = 8, kMostSteps = 16;
  // Of a multiprocessor. 48 random problems on an H200: above it few steps take 0.6 to 1.1 of small tensors' time,
  // below it with more than four steps up to 1.4.
  static constexpr int64_t kFewElements = 1000;
  // Steps of a thread, of many steps: at most, and to begin with.
  static constexpr int64_t kMostThreadSteps = 16, kThreadSteps = 8;
  // Elements of a small tensor to a multiprocessor, at most; times as many of a view, as it is not copied first.
  static constexpr int64_t kSmallElements = 8000, kViewTimes = 4;
  // Bytes that memory gives at once, and of a window before narrower ones are tried. Windows of less than a sector ask
  // for each several times: with so many requests to a multiprocessor columns of many steps take half to nine tenths
  // of the time of slabs on an H200, with 1600 as long, with 3000 twice as long.
  static constexpr int64_t kSector = 32, kUsualWindow = 64, kMostRequests = 1200;

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
    SoftmaxColumns<T> params = columns();
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

  SoftmaxColumns<T> columns() const {
    auto columns = this->template operands<SoftmaxColumns<T>>();
    columns.length = p_.length, columns.inner = p_.inner;
    return columns;
  }

  // Of sectors, by so many windows of less than one.
  int64_t requests(int64_t windows) const {
    return p_.outer * p_.length * windows * std::min(kSector, p_.inner * kSize) / kSector;
  }

  // Windows of about so many columns, if threads can hold them.
  std::optional<cudaError_t> run_windows_of(int64_t about) const {
    // Whole sectors, but where much of the last window would be empty.
    const bool is_even = 8 * (round_up(p_.inner, about) - p_.inner) <= p_.inner;
    const int64_t width = is_even ? about : ceil_div(p_.inner, std::max<int64_t>(1, p_.inner / about)),
                  windows = ceil_div(p_.inner, width), tiles = p_.outer * windows,
                  groups = std::min<int64_t>(kColumnThreads / width, p_.length);
    const bool is_narrow = width * kSize < std::min(kSector, p_.inner * kSize);
    if (groups == 0 || (is_narrow && requests(windows) > kMostRequests * device_.multiprocessors)) return std::nullopt;
    const auto each = [&](int64_t blocks) { return ceil_div(ceil_div(p_.length, blocks), groups); };
    int blocks = 1;
    while (blocks < std::min(device_.cluster, 8) &&
        (each(blocks) > kMostThreadSteps || (tiles * blocks < device_.multiprocessors && each(blocks) > kThreadSteps)))
      blocks *= 2;
    if (each(blocks) > kMostThreadSteps) blocks = std::max(blocks, device_.cluster);
    if (each(blocks) > kMostThreadSteps) return std::nullopt;
    SoftmaxColumns<T> params = columns();
    params.steps = ceil_div(p_.length, blocks);
    params.windows = static_cast<int>(windows), params.width = static_cast<int>(width);
    params.groups = static_cast<int>(groups), params.blocks = blocks;
    params.joints = 1;
    while (groups > kMostJoined && params.joints * params.joints < groups) ++params.joints;
    params.by_windows = Divisor(static_cast<uint32_t>(windows));
    params.by_width = Divisor(static_cast<uint32_t>(width));
    params.by_groups = Divisor(static_cast<uint32_t>(groups));
    params.runs = this->runs();
    const int64_t threads = round_up(groups * width, 32),
                  shared = (2 * threads + (blocks > 1 ? blocks * width : 0)) * static_cast<int64_t>(sizeof(Part<Acc>));
    return Base::template with_room<4, 8, kMostThreadSteps>(each(blocks), [&](auto steps) {
      constexpr int kSteps = decltype(steps)::value;
      const auto kernel = p_.backward ? softmax_thread_columns_kernel<T, kSteps, true>
                                      : softmax_thread_columns_kernel<T, kSteps, false>;
      return launch_clusters(begins_early(tiles * blocks), kernel, params, tiles * blocks, threads, shared, blocks);
    });
  }
};

}  // namespace dcs
