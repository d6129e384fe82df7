// Sixteen lanes of fp32, loaded from and stored to fp32 or bf16, and the few functions of them that
// the kernels need.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

struct bf16 {
    uint16_t bits;
};

static inline __mmask16 first_lanes(long count) {
    return count >= 16 ? 0xFFFF : __mmask16((1u << count) - 1);
}

static inline __m512 load(const float* from, __mmask16 mask = 0xFFFF) {
    return _mm512_maskz_loadu_ps(mask, from);
}

static inline __m512 load(const bf16* from, __mmask16 mask = 0xFFFF) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store(float* to, __m512 value, __mmask16 mask = 0xFFFF) {
    _mm512_mask_storeu_ps(to, mask, value);
}

static inline void store(bf16* to, __m512 value, __mmask16 mask = 0xFFFF) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

static inline __m512 rounded(__m512 value, const float*) { return value; }

static inline __m512 rounded(__m512 value, const bf16*) {
    __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static inline void set(float& to, float value) { to = value; }

static inline void set(bf16& to, float value) { store(&to, _mm512_set1_ps(value), 1); }

// e^x for x <= 88, within 2 units in the last place; 0 far below.
static inline __m512 exp16(__m512 x) {
    const __m512 whole =
        _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 poly = _mm512_set1_ps(1.9875691500e-4f);
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(1.3981999507e-3f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(8.3334519073e-3f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(4.1665795894e-2f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(1.6666665459e-1f));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(5.0000001201e-1f));
    poly =
        _mm512_fmadd_ps(poly, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    // Below e^-87 the result is 0, also for -inf, whose remainder is not a number.
    const __mmask16 is_kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    return _mm512_maskz_scalef_ps(is_kept, poly, whole);
}

static inline __m512 silu16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    // e^88 is the largest power that fp32 holds.
    const __m512 down =
        exp16(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(88.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(one, down));
}

// Memory that a thread allocates once and keeps, so that no step allocates.
template <class T, int Use>
static T* scratch(size_t count) {
    static thread_local std::vector<char> memory;
    const size_t needed = count * sizeof(T) + 64;
    if (memory.size() < needed) memory.resize(needed);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<T*>((address + 63) & ~uintptr_t(63));
}
