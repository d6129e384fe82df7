// Vectors of LANES fp32, loaded from and stored to fp32 or bf16, and the few functions of them that
// the kernels need. The compiler's flags choose the instructions (data_plane/native/build.py).
#pragma once

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

// e^x for x <= 88, within 2 units in the last place; 0 far below.
static inline Vector exp_of(Vector x) {
    const Vector whole = nearest_integers(x * splat(1.44269504088896341f));
    Vector rest = subtract_product(whole, splat(0.693359375f), x);
    rest = subtract_product(whole, splat(-2.12194440e-4f), rest);
    Vector poly = splat(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f})
        poly = multiply_add(poly, rest, splat(next));
    poly = multiply_add(poly, rest * rest, rest + splat(1.0f));
    // Below e^-87 the result is 0, also for -inf, whose remainder is not a number.
    return scaled(poly, whole, x, -87.0f);
}

static inline Vector silu(Vector x) {
    // e^88 is the largest power that fp32 holds.
    return x / (splat(1.0f) + exp_of(lowest(splat(0.0f) - x, splat(88.0f))));
}

static inline Vector sigmoid(Vector x) {
    return splat(1.0f) / (splat(1.0f) + exp_of(lowest(splat(0.0f) - x, splat(88.0f))));
}

// ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^-|x|. The series of the latter in y / (2 + y), at
// most a third, keeps its bits also where it is small.
static inline Vector softplus(Vector x) {
    const Vector y = exp_of(lowest(x, splat(0.0f) - x)), part = y / (splat(2.0f) + y);
    const Vector square = part * part;
    Vector series = splat(2.0f / 15);
    for (float next : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f})
        series = multiply_add(series, square, splat(next));
    return multiply_add(series, part, highest(x, splat(0.0f)));
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
