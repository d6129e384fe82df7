// Norm and rotation of one row's vectors.
#pragma once

#include "vector.h"

// Beside an fp32 weight a row in bf16 is rounded once, at the end (model/norm.py).
template <class T, class N>
static void weighed_row(const T* x, const N* weight, T* out, long width, float eps) {
    Vector squares = splat(0);
    for (long i = 0; i < width; i += LANES) {
        const Vector value = load(x + i, first_lanes(width - i));
        squares = multiply_add(value, value, squares);
    }
    const Vector by =
        splat(1 / std::sqrt(sum_of(squares) / float(width) + eps));
    for (long i = 0; i < width; i += LANES) {
        const Mask mask = first_lanes(width - i);
        const Vector normed = rounded(load(x + i, mask) * by, weight);
        store(out + i, load(weight + i, mask) * normed, mask);
    }
}

// The weight has the dtype of rows unless it is fp32.
template <class T>
static void rms_norm_row(const T* x, const void* weight, bool is_fp32, T* out, long width,
                         float eps) {
    if (is_fp32)
        weighed_row(x, static_cast<const float*>(weight), out, width, eps);
    else
        weighed_row(x, static_cast<const T*>(weight), out, width, eps);
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
