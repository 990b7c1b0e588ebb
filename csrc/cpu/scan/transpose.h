// Rows to lines and back. A line holds one step of kAbreast rows, so that a step of all of them is a few vectors
// wherever the rows lie. Squares of 16 or 32 bytes a side are transposed in registers.
#pragma once

#include <immintrin.h>

#include "common/element.h"
#include "scan/kernels.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kSpill = 8;  // lines that may be written beyond those asked for

// The first `bytes` of `v` to memory: a multiple of the element's size, less than the whole.
DCS_INLINE void store_part(char* to, __m128i v, int64_t bytes) {
  if ((bytes & 8) != 0) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), v);
    to += 8;
    v = _mm_srli_si128(v, 8);
  }
  if ((bytes & 4) != 0) {
    const int32_t four = _mm_cvtsi128_si32(v);
    std::memcpy(to, &four, sizeof four);
    to += 4;
    v = _mm_srli_si128(v, 4);
  }
  if ((bytes & 3) != 0) {
    const int32_t rest = _mm_cvtsi128_si32(v);
    if ((bytes & 2) != 0) std::memcpy(to, &rest, 2);
    else std::memcpy(to, &rest, 1);
    const char last = static_cast<char>(rest >> 16);
    if ((bytes & 3) == 3) std::memcpy(to + 2, &last, 1);
  }
}

// kSide rows of kSide elements of kBytes each.
template <int kBytes>
struct Square;

struct Square128 {
  using Vector = __m128i;
  static DCS_INLINE Vector load(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static DCS_INLINE void store(char* to, Vector v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), v); }
  static DCS_INLINE void store_first(char* to, Vector v, int64_t bytes) { store_part(to, v, bytes); }
};

template <>
struct Square<1> : Square128 {
  static constexpr int kSide = 8;
  static DCS_INLINE Vector load(const char* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static DCS_INLINE void store(char* to, Vector v) { _mm_storel_epi64(reinterpret_cast<__m128i*>(to), v); }
  static DCS_INLINE void transpose(Vector* v) {
    Vector pairs[4], fours[4];
    for (int i = 0; i < 4; ++i) pairs[i] = _mm_unpacklo_epi8(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 2; ++i) {
      fours[i] = _mm_unpacklo_epi16(pairs[2 * i], pairs[2 * i + 1]);
      fours[2 + i] = _mm_unpackhi_epi16(pairs[2 * i], pairs[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      v[4 * i] = _mm_unpacklo_epi32(fours[2 * i], fours[2 * i + 1]);
      v[4 * i + 1] = _mm_srli_si128(v[4 * i], 8);
      v[4 * i + 2] = _mm_unpackhi_epi32(fours[2 * i], fours[2 * i + 1]);
      v[4 * i + 3] = _mm_srli_si128(v[4 * i + 2], 8);
    }
  }
};

template <>
struct Square<2> : Square128 {
  static constexpr int kSide = 8;
  static DCS_INLINE void transpose(Vector* v) {
    Vector pairs[8], fours[8];
    for (int i = 0; i < 4; ++i) {
      pairs[i] = _mm_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
      pairs[4 + i] = _mm_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
      fours[i / 2 * 4 + i % 2] = _mm_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
      fours[i / 2 * 4 + 2 + i % 2] = _mm_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = _mm_unpacklo_epi64(fours[2 * i], fours[2 * i + 1]);
      v[2 * i + 1] = _mm_unpackhi_epi64(fours[2 * i], fours[2 * i + 1]);
    }
  }
};

#if defined(__AVX2__)
struct Square256 {
  using Vector = __m256i;
  static DCS_INLINE Vector load(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static DCS_INLINE void store(char* to, Vector v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
  static DCS_INLINE void store_first(char* to, Vector v, int64_t bytes) {
    __m128i part = _mm256_castsi256_si128(v);
    if (bytes >= 16) {
      Square128::store(to, part);
      part = _mm256_extracti128_si256(v, 1);
      to += 16;
    }
    store_part(to, part, bytes % 16);
  }
};

template <>
struct Square<4> : Square256 {
  static constexpr int kSide = 8;
  static DCS_INLINE void transpose(Vector* v) {
    Vector pairs[8], fours[8];
    for (int i = 0; i < 4; ++i) {
      pairs[i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
      pairs[4 + i] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    // Steps 0 and 4, 1 and 5, 2 and 6, 3 and 7 of rows 0 to 3, and of rows 4 to 7.
    for (int i = 0; i < 2; ++i)
      for (int half = 0; half < 2; ++half) {
        fours[4 * half + 2 * i] = _mm256_unpacklo_epi64(pairs[4 * i + 2 * half], pairs[4 * i + 2 * half + 1]);
        fours[4 * half + 2 * i + 1] = _mm256_unpackhi_epi64(pairs[4 * i + 2 * half], pairs[4 * i + 2 * half + 1]);
      }
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x20);
      v[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x31);
    }
  }
};

template <>
struct Square<8> : Square256 {
  static constexpr int kSide = 4;
  static DCS_INLINE void transpose(Vector* v) {
    const Vector a = _mm256_unpacklo_epi64(v[0], v[1]), b = _mm256_unpackhi_epi64(v[0], v[1]);
    const Vector c = _mm256_unpacklo_epi64(v[2], v[3]), d = _mm256_unpackhi_epi64(v[2], v[3]);
    v[0] = _mm256_permute2x128_si256(a, c, 0x20);
    v[1] = _mm256_permute2x128_si256(b, d, 0x20);
    v[2] = _mm256_permute2x128_si256(a, c, 0x31);
    v[3] = _mm256_permute2x128_si256(b, d, 0x31);
  }
};
#else
template <>
struct Square<4> : Square128 {
  static constexpr int kSide = 4;
  static DCS_INLINE void transpose(Vector* v) {
    const Vector a = _mm_unpacklo_epi32(v[0], v[1]), b = _mm_unpacklo_epi32(v[2], v[3]);
    const Vector c = _mm_unpackhi_epi32(v[0], v[1]), d = _mm_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm_unpacklo_epi64(a, b);
    v[1] = _mm_unpackhi_epi64(a, b);
    v[2] = _mm_unpacklo_epi64(c, d);
    v[3] = _mm_unpackhi_epi64(c, d);
  }
};

template <>
struct Square<8> : Square128 {
  static constexpr int kSide = 2;
  static DCS_INLINE void transpose(Vector* v) {
    const Vector first = _mm_unpacklo_epi64(v[0], v[1]);
    v[1] = _mm_unpackhi_epi64(v[0], v[1]);
    v[0] = first;
  }
};
#endif

// Where rows lie: element k of row r at base + r * stride + k, in bytes, and no row reads at or beyond `end`.
struct RowBytes {
  const char* base;
  int64_t stride;
  const char* end;
};

// The squares of kAbreast rows, at `count` steps; the last one ends with the rows where they are as long as a square.
template <int kBytes>
DCS_INLINE void square_to_lines(char* lines, const char* const* rows, int64_t count) {
  using S = Square<kBytes>;
  constexpr int64_t kPerLine = 64 / kBytes;  // of the cache
  for (int64_t k = 0; k < count; k += S::kSide) {
    const int64_t at = k + S::kSide <= count || count < S::kSide ? k : count - S::kSide;
    // The next batch's: no prefetcher follows as many rows as are read in turn here.
    if (k % kPerLine == 0 && count >= kPerLine)
      for (int r = 0; r < kAbreast; ++r) _mm_prefetch(rows[r] + (count + k) * kBytes, _MM_HINT_T0);
    for (int r = 0; r < kAbreast; r += S::kSide) {
      typename S::Vector v[S::kSide];
      for (int i = 0; i < S::kSide; ++i) v[i] = S::load(rows[r + i] + at * kBytes);
      S::transpose(v);
      for (int i = 0; i < S::kSide; ++i) S::store(lines + ((at + i) * kAbreast + r) * kBytes, v[i]);
    }
  }
}

// `count` steps of `rows` adjacent rows, kAbreast of them together and `apart` lines from group to group; lanes beyond
// the last row repeat it.
template <int kBytes>
DCS_SHARED void to_lines(char* lines, int64_t apart, const RowBytes& from, int64_t rows, int64_t count) {
  constexpr int64_t kWhole = Square<kBytes>::kSide * kBytes;
  for (int64_t first = 0; first < rows; first += kAbreast, lines += apart * kAbreast * kBytes) {
    const char* row[kAbreast];
    const int64_t left = rows - first < kAbreast ? rows - first : kAbreast;
    for (int64_t r = 0; r < kAbreast; ++r) row[r] = from.base + (first + (r < left ? r : left - 1)) * from.stride;
    const char* last = from.stride < 0 ? row[0] : row[kAbreast - 1];
    if (count * kBytes >= kWhole || last + kWhole <= from.end) {
      square_to_lines<kBytes>(lines, row, count);
      continue;
    }
    for (int64_t k = 0; k < count; ++k)
      for (int64_t r = 0; r < kAbreast; ++r)
        std::memcpy(lines + (k * kAbreast + r) * kBytes, row[r] + k * kBytes, kBytes);
  }
}

// The same way back, exactly `count` steps of each row.
template <int kBytes>
DCS_SHARED void from_lines(const char* lines, int64_t apart, char* base, int64_t stride, int64_t rows, int64_t count) {
  using S = Square<kBytes>;
  for (int64_t first = 0; first < rows; first += kAbreast, lines += apart * kAbreast * kBytes) {
    const int64_t left = rows - first < kAbreast ? rows - first : kAbreast;
    for (int64_t k = 0; k < count; k += S::kSide) {
      const int64_t at = k + S::kSide <= count || count < S::kSide ? k : count - S::kSide;
      for (int64_t r = 0; r < left; r += S::kSide) {
        typename S::Vector v[S::kSide];
        for (int i = 0; i < S::kSide; ++i) v[i] = S::load(lines + ((at + i) * kAbreast + r) * kBytes);
        S::transpose(v);
        char* to = base + (first + r) * stride + at * kBytes;
        for (int i = 0; i < S::kSide; ++i, to += stride) {
          if (r + i >= left) break;
          if (count < S::kSide) S::store_first(to, v[i], count * kBytes);
          else S::store(to, v[i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace dcs::cpu
