// Products, MLPs and attention, shared out among processors. Each element is computed as by one, so
// the result does not depend on how many there are.
#pragma once

#include "attention.h"
#include "experts.h"
#include "processors.h"

// Shorter products take less time than it takes to share them out.
constexpr long LEAST_SHARED = 1 << 15;

// See linear.h; a processor takes whole groups of columns.
template <class T, class W, class Out>
static void linear_on(Processors& on, const T* x, long x_stride, const W* w, long M, long N, long K,
                      Out* out, long out_stride) {
    const long groups = blocks(N, GROUP);
    const long parts = N * K < LEAST_SHARED ? 1 : std::min(2 * on.count(), groups);
    if (on.count() == 1 || parts < 2 || !M) return linear(x, x_stride, w, M, N, K, out, out_stride);
    on.for_each(parts, [&](long part) {
        const long begin = groups * part / parts * GROUP;
        const long end = std::min(groups * (part + 1) / parts * GROUP, N);
        linear(x, x_stride, w + packed_elements(begin, K, w), M, end - begin, K, out + begin,
               out_stride);
    });
}

// See experts.h.
template <class T, class W>
static void mlp_on(Processors& on, const T* x, const W* gate_up, const W* down, long M, long X,
                   long I, float limit, T* out) {
    float* wide = scratch<float, 28>(M * 2 * I);
    T* inner = scratch<T, 29>(M * I);
    linear_on(on, x, X, gate_up, M, 2 * I, X, wide, 2 * I);
    gated(wide, M, I, inner, I, limit);
    linear_on(on, inner, I, down, M, X, I, out, X);
}

// See attention.h; a processor takes some rows.
template <class T>
static void attention_on(Processors& on, const T* q, const T* pool, const int32_t* frames, long P,
                         const int32_t* lengths, long A, long H, long D, long R, long G,
                         long width, long value_at, float scale, T* out, float* lse) {
    const long parts = on.count() == 1 ? 1 : std::min(A, 4 * on.count());
    on.for_each(parts, [&](long part) {
        const long a = A * part / parts, count = A * (part + 1) / parts - a;
        attention(q + a * G * H * D, pool, frames + a * P, P, lengths + a, count, H, D, R, G, width,
                  value_at, scale, out + a * G * H * R, lse + a * G * H);
    });
}
