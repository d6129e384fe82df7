// Rows of dispatch and combine, between a batch and the regions of the exchange.
// The slow references are in data_plane/moe/rows.py.
#pragma once

#include "vector.h"

// Rows as they lie in memory: the first one, and how many values lie from one to the next.
template <class V>
struct Strided {
    V* first;
    long stride;

    V* at(long row) const { return first + row * stride; }
};

template <class T>
struct Region {
    int32_t* count;
    Strided<int64_t> number;
    Strided<float> weight;
    Strided<T> hidden;

    void put(long at, const T* x, const int64_t* numbers, const float* weights, long K,
             long X) const {
        memcpy(hidden.at(at), x, X * sizeof(T));
        memcpy(number.at(at), numbers, K * sizeof(int64_t));
        memcpy(weight.at(at), weights, K * sizeof(float));
    }
};

// Experts [B, K] become the numbers of their slots; -1 for a row that is not live. table [E, 64]:
// SlotNames of data_plane/moe/mixture.py.
static inline void name_slots(int64_t* expert, const bool* live, const int32_t* table, long B,
                              long K, long seat) {
    for (long i = 0; i < B * K; ++i) {
        const int32_t* of = table + expert[i] * 64;
        const long row = i / K;
        expert[i] = live[row] ? of[1 + (of[0] > 1 ? (row + seat) % of[0] : 0)] : -1;
    }
}

// For every instance: the rows that name a slot there (rows [N, B]), and how many they are
// (counts [N]). slots: of an instance. A region without a count is not written.
template <class T>
static void pack_rows(const T* x, const int64_t* number, const float* weight, long B, long K,
                      long X, long slots, long N, const Region<T>* regions, int64_t* rows,
                      int64_t* counts) {
    std::fill(counts, counts + N, 0);
    for (long b = 0; b < B; ++b) {
        if (number[b * K] < 0) continue;
        for (long k = 0; k < K; ++k) {
            const long owner = int32_t(number[b * K + k]) / int32_t(slots), at = counts[owner];
            if (at && rows[owner * B + at - 1] == b) continue;
            rows[owner * B + at] = b;
            ++counts[owner];
            if (regions[owner].count)
                regions[owner].put(at, x + b * X, number + b * K, weight + b * K, K, X);
        }
    }
    for (long n = 0; n < N; ++n)
        if (regions[n].count) *regions[n].count = int32_t(counts[n]);
}

// out [B, X]: x plus shared (which may be null), plus for every row the sum of what the instances
// returned, by ascending instance. A region without `hidden` is that of this instance, or of one
// that got no rows.
template <class T>
static void combine_sums(const T* x, const T* shared, const T* own_sum, const Region<T>* regions,
                         const int64_t* rows, const int64_t* counts, long N, long B, long X,
                         T* out) {
    float* wide = scratch<float, 20>(B * X);
    memset(wide, 0, B * X * sizeof(float));
    for (long n = 0; n < N; ++n)
        for (long i = 0; i < counts[n]; ++i) {
            const T* from = regions[n].hidden.first ? regions[n].hidden.at(i) : own_sum + i * X;
            float* to = wide + rows[n * B + i] * X;
            for (long at = 0; at < X; at += LANES) {
                const Mask mask = first_lanes(X - at);
                store(to + at, load(to + at, mask) + load(from + at, mask), mask);
            }
        }
    for (long at = 0; at < B * X; at += LANES) {
        const Mask mask = first_lanes(B * X - at);
        Vector sum = load(wide + at, mask);
        if (shared) sum = sum + load(shared + at, mask);
        store(out + at, load(x + at, mask) + sum, mask);
    }
}
