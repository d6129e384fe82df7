// Vectors of sixteen lanes of fp32: AVX-512, and for products of bf16 its BF16 instructions.
#pragma once

#include "bf16.h"

constexpr long LANES = 16;
using Vector = __m512;
using Mask = __mmask16;

static inline Mask first_lanes(long count) {
    return count >= LANES ? Mask(0xFFFF) : Mask((1u << count) - 1);
}

static inline Vector splat(float value) { return _mm512_set1_ps(value); }

// GCC keeps a mask of all lanes, and products of fp32 would run at 0.4 of their speed.
static inline Vector load(const float* from) { return _mm512_loadu_ps(from); }

static inline Vector load(const float* from, Mask mask) {
    return _mm512_maskz_loadu_ps(mask, from);
}

static inline Vector load(const bf16* from, Mask mask = 0xFFFF) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store(float* to, Vector value, Mask mask = 0xFFFF) {
    _mm512_mask_storeu_ps(to, mask, value);
}

static inline void store(bf16* to, Vector value, Mask mask = 0xFFFF) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

static inline Vector rounded(Vector value, const float*) { return value; }

static inline Vector rounded(Vector value, const bf16*) {
    const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

// c - a * b.
static inline Vector subtract_product(Vector a, Vector b, Vector c) {
    return _mm512_fnmadd_ps(a, b, c);
}

static inline Vector highest(Vector a, Vector b) { return _mm512_max_ps(a, b); }

static inline Vector lowest(Vector a, Vector b) { return _mm512_min_ps(a, b); }

static inline float highest_lane(Vector value) { return _mm512_reduce_max_ps(value); }

static inline float sum_of(Vector value) { return _mm512_reduce_add_ps(value); }

// The sums of four vectors, stored side by side.
static inline void store_sums(float* to, const Vector* of) {
    __m256 half[4];
    for (int i = 0; i < 4; ++i)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256(of[i]), _mm512_extractf32x8_ps(of[i], 1));
    const __m256 sums =
        _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

static inline Vector choose(Mask mask, Vector if_set, Vector if_not) {
    return _mm512_mask_blend_ps(mask, if_not, if_set);
}

static inline Vector nearest_integers(Vector value) { return _mm512_roundscale_ps(value, 0); }

// value * 2^power, and 0 where x is below least; power is whole.
static inline Vector scaled(Vector value, Vector power, Vector x, float least) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(least), _CMP_GE_OQ), value, power);
}

// One bf16 of each of sixteen pairs, widened: the first ones, or the second.
static inline Vector widened(const bf16* pairs, bool is_second) {
    const __m512i words = _mm512_loadu_si512(pairs);
    return _mm512_castsi512_ps(
        is_second ? _mm512_and_si512(words, _mm512_set1_epi32(int(0xFFFF0000)))
                  : _mm512_slli_epi32(words, 16));
}

// Twelve rows by 32 columns fill the 32 registers.
constexpr long COLUMNS = 32, ROWS = 12;
constexpr int MOST_TOGETHER = 2;

// What rows of T are multiplied as.
template <class T>
using FactorOf = T;

template <>
struct Products<bf16, bf16> {
    static constexpr int PARTS = 1;
    static __m512i weight(const bf16* w, int) { return _mm512_loadu_si512(w); }
    static __m512i value(const bf16* x, long step, int) {
        int32_t pair;
        memcpy(&pair, x + step * 2, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static Vector add(Vector sum, __m512i value, __m512i weight) {
        return _mm512_dpbf16_ps(sum, (__m512bh)value, (__m512bh)weight);
    }
};
