// One token of each row in a linear attention layer, behind the input projections: convolution,
// late fold, the delta rule, and the norm and gate of heads' outputs.
//
// A key head and its value heads are one task: nothing passes between heads. A state is read once,
// and where a record is due it is written in the same pass. The slow reference is CarryPool.step of
// data_plane/kv/carry_pool.py.
#pragma once

#include "shared_out.h"

// A layer's weights, the model's widths and rules, and where the parts of a state begin, in bytes.
// DeltaFields of data_plane/native/calls.py has the same fields.
template <class T>
struct Delta {
    const T *conv, *norm;  // [S, C], of the oldest token first; [V]
    const float *rate, *bias;
    long J, H, K, V, D, S;
    long state_at, decay_at, key_at, u_at, channels_at, folded_at;
    float key_eps, norm_eps, decay_bound;  // a bound of 0: there is none
    int has_sigmoid_gate;
};

// What was projected of a row, its state, and the place of its heads' outputs.
template <class T>
struct DeltaRow {
    const T *channels, *gate, *decay, *beta;
    char* state;
    long position;
    bool is_due;
    T* out;

    float* floats(long at) const { return reinterpret_cast<float*>(state + at); }
};

// Write `width` channels' inputs to their place, and convolve them with those before them.
template <class T>
static void convolve(const Delta<T>& of, const DeltaRow<T>& row, long first, long width,
                     float* to) {
    const long C = 2 * of.J * of.K + of.H * of.V, places = of.S + 1;
    T* ring = reinterpret_cast<T*>(row.state + of.channels_at) + first;
    memcpy(ring + row.position % places * C, row.channels + first, width * sizeof(T));
    memset(to, 0, width * sizeof(float));
    for (long back = std::min(row.position, of.S - 1); back >= 0; --back) {
        const T* x = ring + (row.position - back) % places * C;
        const T* weight = of.conv + (of.S - 1 - back) * C + first;
        for (long i = 0; i < width; i += LANES) {
            const Mask mask = first_lanes(width - i);
            // The next head's part comes meanwhile.
            _mm_prefetch(reinterpret_cast<const char*>(x + width + i), _MM_HINT_T0);
            const Vector added = rounded(load(x + i, mask) * load(weight + i, mask), ring);
            store(to + i, load(to + i, mask) + added, mask);
        }
    }
    for (long i = 0; i < width; i += LANES) {
        const Mask mask = first_lanes(width - i);
        store(to + i, rounded(silu(rounded(load(to + i, mask), ring)), ring), mask);
    }
}

static float product(const float* a, const float* b, long width) {
    Vector sum = splat(0);
    for (long i = 0; i < width; i += LANES) {
        const Mask mask = first_lanes(width - i);
        sum = multiply_add(load(a + i, mask), load(b + i, mask), sum);
    }
    return sum_of(sum);
}

static void scale(float* x, long width, float by) {
    for (long i = 0; i < width; i += LANES) {
        const Mask mask = first_lanes(width - i);
        store(x + i, load(x + i, mask) * splat(by), mask);
    }
}

// e^decay for each of K channels, times x if there is one.
static void decayed(const float* x, const float* decay, long D, long K, float* to) {
    for (long i = 0; i < K; i += LANES) {
        const Mask mask = first_lanes(K - i);
        const Vector kept = exp_of(D == 1 ? splat(*decay) : load(decay + i, mask));
        store(to + i, x ? load(x + i, mask) * kept : kept, mask);
    }
}

// The due record's decay, key and correction; the decayed key and query that the state is asked.
struct Asked {
    const float *kept, *old_key, *old_u, *key, *q;
};

// Fold the record into some columns of a state [K, V], if it is due, and ask these columns.
template <int Wide, bool IsDue>
static void ask(float* state, long K, long V, const Asked by, long v, float* of_key, float* of_q) {
    Vector u[Wide], key_sum[Wide], q_sum[Wide];
    for (int i = 0; i < Wide; ++i) {
        u[i] = IsDue ? load(by.old_u + v + i * LANES) : splat(0);
        key_sum[i] = q_sum[i] = splat(0);
    }
    for (long k = 0; k < K; ++k) {
        float* row = state + k * V;
        const Vector key = splat(by.key[k]), q = splat(by.q[k]);
        for (int i = 0; i < Wide; ++i) {
            float* at = row + v + i * LANES;
            Vector s = load(at);
            // The next head comes meanwhile, in equal shares of all passes.
            if (i * LANES % 16 == 0)
                _mm_prefetch(reinterpret_cast<const char*>(at + K * V), _MM_HINT_T1);
            if constexpr (IsDue) {
                s = multiply_add(splat(by.old_key[k]), u[i], s * splat(by.kept[k]));
                store(at, s);
            }
            key_sum[i] = multiply_add(key, s, key_sum[i]);
            q_sum[i] = multiply_add(q, s, q_sum[i]);
        }
    }
    for (int i = 0; i < Wide; ++i) {
        store(of_key + v + i * LANES, key_sum[i]);
        store(of_q + v + i * LANES, q_sum[i]);
    }
}

static void ask_all(float* state, long K, long V, bool is_due, const Asked& by, float* of_key,
                    float* of_q) {
    // So many columns' sums fit the processor's registers.
    constexpr long MOST = LANES / 2;
    for (long v = 0; v < V; v += MOST * LANES)
        with_rows<1, MOST>(std::min((V - v) / LANES, MOST), [&](auto wide) {
            if (is_due)
                ask<wide, true>(state, K, V, by, v, of_key, of_q);
            else
                ask<wide, false>(state, K, V, by, v, of_key, of_q);
        });
}

// A value head behind its key head's query and key.
template <class T>
static void value_head(const Delta<T>& of, const DeltaRow<T>& row, long h, const float* q,
                       const float* key, const float* old_key) {
    const long K = of.K, V = of.V, D = of.D, place = row.position % 2, HD = of.H * D;
    float* kept = scratch<float, 31>(3 * K + 3 * V);
    float *asked_key = kept + K, *asked_q = asked_key + K;
    float *value = asked_q + K, *of_key = value + V, *of_q = of_key + V;
    convolve(of, row, 2 * of.J * K + h * V, V, value);
    float* decay = row.floats(of.decay_at) + place * HD + h * D;
    const Vector rate = splat(of.rate[h]);
    for (long i = 0; i < D; i += LANES) {
        const Mask mask = first_lanes(D - i);
        const Vector x = load(row.decay + h * D + i, mask) + load(of.bias + h * D + i, mask);
        const Vector power = of.decay_bound ? splat(of.decay_bound) * sigmoid(rate * x)
                                            : splat(0) - rate * softplus(x);
        store(decay + i, power, mask);
    }
    decayed(nullptr, row.floats(of.decay_at) + (1 - place) * HD + h * D, D, K, kept);
    decayed(key, decay, D, K, asked_key);
    decayed(q, decay, D, K, asked_q);
    float *us = row.floats(of.u_at) + h * V, *u = us + place * of.H * V;
    const float* old_u = us + (1 - place) * of.H * V;
    ask_all(row.floats(of.state_at) + h * K * V, K, V, row.is_due,
            {kept, old_key, old_u, asked_key, asked_q}, of_key, of_q);
    const Vector own = splat(product(q, key, K));
    const Vector beta = sigmoid(splat(to_float(row.beta[h])));
    for (long i = 0; i < V; i += LANES) {
        const Vector corrected = (load(value + i) - load(of_key + i)) * beta;
        store(u + i, corrected);
        store(of_q + i, multiply_add(own, corrected, load(of_q + i)));
    }
    const Vector by = splat(1 / std::sqrt(product(of_q, of_q, V) / float(V) + of.norm_eps));
    for (long i = 0; i < V; i += LANES) {
        const Vector gate = load(row.gate + h * V + i);
        const Vector opened = of.has_sigmoid_gate ? sigmoid(gate) : silu(gate);
        store(row.out + h * V + i, load(of_q + i) * by * load(of.norm + i) * opened);
    }
}

template <class T>
static void key_head(const Delta<T>& of, const DeltaRow<T>& row, long j) {
    const long K = of.K, keys = of.J * K, place = row.position % 2, group = of.H / of.J;
    float *q = scratch<float, 30>(2 * K), *key = q + K;
    convolve(of, row, j * K, K, q);
    convolve(of, row, keys + j * K, K, key);
    scale(q, K, 1 / std::sqrt((product(q, q, K) + of.key_eps) * float(K)));
    scale(key, K, 1 / std::sqrt(product(key, key, K) + of.key_eps));
    float* records = row.floats(of.key_at) + j * K;
    memcpy(records + place * keys, key, K * sizeof(float));
    for (long h = j * group; h < (j + 1) * group; ++h)
        value_head(of, row, h, q, key, records + (1 - place) * keys);
}

// A step of B rows. Returns 0, or having changed nothing 1 if a state is ahead of its row, and 2 if
// it lacks tokens. states: of this layer in the first frame. Of rows that are not live only the
// output is written, as 0. Strides are in elements.
template <class T>
static long delta(Processors& on, const Delta<T>& of, char* states, long frame_bytes,
                  const int64_t* frame, const int64_t* position, const bool* live, long B,
                  const T* channels, const T* beta, long stride, const T* gate, long gate_stride,
                  const T* decay, long decay_stride, T* out) {
    const long width = of.H * of.V, tasks = B * of.J;
    const auto folded = [&](long b) {
        return reinterpret_cast<int32_t*>(states + frame[b] * frame_bytes + of.folded_at);
    };
    for (long b = 0; b < B; ++b) {
        const long behind = live[b] ? position[b] - *folded(b) : 0;
        if (behind < 0 || behind > 1) return behind < 0 ? 1 : 2;
    }
    const long parts = on.count() == 1 ? 1 : std::min(tasks, 4 * on.count());
    on.for_each(parts, [&](long part) {
        for (long task = tasks * part / parts; task < tasks * (part + 1) / parts; ++task) {
            const long b = task / of.J, j = task % of.J, share = width / of.J;
            const DeltaRow<T> row{channels + b * stride, gate + b * gate_stride,
                                  decay + b * decay_stride, beta + b * stride,
                                  states + frame[b] * frame_bytes, position[b],
                                  position[b] != *folded(b), out + b * width};
            if (live[b])
                key_head(of, row, j);
            else
                std::fill(row.out + j * share, row.out + (j + 1) * share, T{});
        }
    });
    // All heads have folded, and nothing from their first fold to here can fail.
    for (long b = 0; b < B; ++b)
        if (live[b]) std::fill_n(folded(b), of.H, int32_t(position[b]));
    return 0;
}
