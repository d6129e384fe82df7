// Queries and KV of attention over K/V heads (attention_kinds/gqa.py has the slow reference).
#pragma once

#include "norm.h"
#include "shared_out.h"

// A layer's packed projections with biases and norms, each null if it has none, and the model's
// widths. HeadsFields of data_plane/native/calls.py has the same fields.
template <class T, class W>
struct Heads {
    const void *input_norm, *q_norm, *k_norm;
    const T *q_bias, *kv_bias;
    const W *q, *kv;
    long X, H, G, E, P;
    float norm_eps, head_eps;
    int is_interleaved, norms_are_fp32;
};

template <class T>
static void add_bias(T* row, const T* bias, long width) {
    for (long i = 0; i < width; i += LANES) {
        const Mask mask = first_lanes(width - i);
        store(row + i, load(row + i, mask) + load(bias + i, mask), mask);
    }
}

// Norm each head of a row, and rotate the first P of its E elements, in place.
template <class T, class W>
static void turn_heads(const Heads<T, W>& of, T* row, long heads, const void* norm,
                       const float* cos, const float* sin) {
    for (long h = 0; h < heads; ++h) {
        T* head = row + h * of.E;
        if (norm) rms_norm_row(head, norm, of.norms_are_fp32, head, of.E, of.head_eps);
        rotate(head, head, of.P, cos, sin, of.is_interleaved);
    }
}

// normed [B, X] -> the queries [B, H, E].
template <class T, class W>
static void heads_queries(Processors& on, const Heads<T, W>& of, const T* normed,
                          const int64_t* position, const float* cos, const float* sin, long B,
                          T* q) {
    const long wide = of.H * of.E;
    linear_on(on, normed, of.X, of.q, B, wide, of.X, q, wide);
    for (long b = 0; b < B; ++b) {
        const long at = position[b] * (of.P / 2);
        if (of.q_bias) add_bias(q + b * wide, of.q_bias, wide);
        turn_heads(of, q + b * wide, of.H, of.q_norm, cos + at, sin + at);
    }
}

// x [B, X] -> the normed rows [B, X], the new KV [B, 2GE] (keys, then values), the queries [B, H, E].
template <class T, class W>
static void heads_rows(Processors& on, const Heads<T, W>& of, const T* x, const int64_t* position,
                       const float* cos, const float* sin, long B, T* normed, T* kv, T* q) {
    const long X = of.X, wide = 2 * of.G * of.E;
    for (long b = 0; b < B; ++b)
        rms_norm_row(x + b * X, of.input_norm, of.norms_are_fp32, normed + b * X, X, of.norm_eps);
    linear_on(on, normed, X, of.kv, B, wide, X, kv, wide);
    for (long b = 0; b < B; ++b) {
        const long at = position[b] * (of.P / 2);
        if (of.kv_bias) add_bias(kv + b * wide, of.kv_bias, wide);
        turn_heads(of, kv + b * wide, of.G, of.k_norm, cos + at, sin + at);
    }
    heads_queries(on, of, normed, position, cos, sin, B, q);
}
