// Vectors of eight lanes of fp32: AVX2 and FMA. All products are of fp32.
#pragma once

#include "bf16.h"

constexpr long LANES = 8;
using Vector = __m256;
// A number of lanes, the first ones. A masked store is slow on some processors, and bf16 has none.
using Mask = long;

static inline Mask first_lanes(long count) { return std::min(count, LANES); }

static inline Vector splat(float value) { return _mm256_set1_ps(value); }

static inline __m256i bits_of(Vector value) { return _mm256_castps_si256(value); }

static inline Vector load(const float* from, Mask mask = LANES) {
    if (mask >= LANES) return _mm256_loadu_ps(from);
    float lanes[LANES] = {};
    memcpy(lanes, from, mask * sizeof(float));
    return _mm256_loadu_ps(lanes);
}

static inline Vector load(const bf16* from, Mask mask = LANES) {
    bf16 lanes[LANES] = {};
    if (mask < LANES) from = (const bf16*)memcpy(lanes, from, mask * sizeof(bf16));
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline void store(float* to, Vector value, Mask mask = LANES) {
    if (mask >= LANES) return _mm256_storeu_ps(to, value);
    float lanes[LANES];
    _mm256_storeu_ps(lanes, value);
    memcpy(to, lanes, mask * sizeof(float));
}

static inline Vector rounded(Vector value, const float*) { return value; }

// To the nearest bf16, ties to even. What is not a number stays none, unless its payload is odd:
// arithmetic makes no such.
static inline Vector rounded(Vector value, const bf16*) {
    const __m256i bits = bits_of(value), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xFFFF0000))));
}

static inline void store(bf16* to, Vector value, Mask mask = LANES) {
    const __m256i high = _mm256_srli_epi32(bits_of(rounded(value, to)), 16);
    const __m128i lanes =
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    if (mask >= LANES) return _mm_storeu_si128((__m128i*)to, lanes);
    memcpy(to, &lanes, mask * sizeof(bf16));
}

static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

// c - a * b.
static inline Vector subtract_product(Vector a, Vector b, Vector c) {
    return _mm256_fnmadd_ps(a, b, c);
}

static inline Vector highest(Vector a, Vector b) { return _mm256_max_ps(a, b); }

static inline Vector lowest(Vector a, Vector b) { return _mm256_min_ps(a, b); }

static inline float highest_lane(Vector value) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline float sum_of(Vector value) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// The sums of four vectors, stored side by side.
static inline void store_sums(float* to, const Vector* of) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

static inline Vector choose(Mask mask, Vector if_set, Vector if_not) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i is_set = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(mask)), lane);
    return _mm256_blendv_ps(if_not, if_set, _mm256_castsi256_ps(is_set));
}

static inline Vector nearest_integers(Vector value) {
    return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// value * 2^power, and 0 where x is below least; power is whole, from -126 to 127.
static inline Vector scaled(Vector value, Vector power, Vector x, float least) {
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
    const Vector is_kept = _mm256_cmp_ps(x, splat(least), _CMP_GE_OQ);
    return _mm256_and_ps(is_kept, value * _mm256_castsi256_ps(exponent));
}

// One bf16 of each of eight pairs, widened: the first ones, or the second.
static inline Vector widened(const bf16* pairs, bool is_second) {
    const __m256i words = _mm256_loadu_si256((const __m256i*)pairs);
    return _mm256_castsi256_ps(
        is_second ? _mm256_and_si256(words, _mm256_set1_epi32(int(0xFFFF0000)))
                  : _mm256_slli_epi32(words, 16));
}

// Six rows by 16 columns fill the 16 registers.
constexpr long COLUMNS = 16, ROWS = 6;
constexpr int MOST_TOGETHER = 4;

// What rows of any type are multiplied as.
template <class T>
using FactorOf = float;
