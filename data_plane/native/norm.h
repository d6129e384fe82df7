// Norm and rotation of one row's vectors.
#pragma once

#include "vector.h"

template <class T>
static void rms_norm_row(const T* x, const T* weight, T* out, long width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < width; i += 16) {
        const __m512 value = load(x + i, first_lanes(width - i));
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 by =
        _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps));
    for (long i = 0; i < width; i += 16) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 normed = rounded(_mm512_mul_ps(load(x + i, mask), by), x);
        store(out + i, _mm512_mul_ps(load(weight + i, mask), normed), mask);
    }
}

// The rotated vector keeps the layout of x, pairs side by side or two halves (docs/decisions/0019).
template <class T>
static void rotate(const T* x, T* out, long dim, const float* cos, const float* sin,
                   bool is_interleaved) {
    const long half = dim / 2, step = is_interleaved ? 2 : 1, apart = is_interleaved ? 1 : half;
    for (long i = 0; i < half; ++i) {
        const long at = i * step;
        const float first = to_float(x[at]), second = to_float(x[at + apart]);
        set(out[at], first * cos[i] - second * sin[i]);
        set(out[at + apart], second * cos[i] + first * sin[i]);
    }
}
