// The gate, the experts and their sums: what a mixture computes, on one thread. mixture.h shares it
// out among processors.
#pragma once

#ifdef __AMX_TILE__
#include "amx.h"
#else
#include "linear.h"
#endif
#include "rows.h"

// gate_up [M, 2 I] -> silu(gate) * up [M, I], of which rows are `stride` apart. limit: silu(gate) is
// at most it, up within it on both sides; infinity: neither has a limit.
template <class From, class T>
static void gated(const From* gate_up, long M, long I, T* out, long stride, float limit) {
    const Vector most = splat(limit), least = splat(-limit);
    for (long m = 0; m < M; ++m)
        for (long i = 0; i < I; i += LANES) {
            const Mask mask = first_lanes(I - i);
            const Vector gate = load(gate_up + m * 2 * I + i, mask),
                         up = load(gate_up + (m * 2 + 1) * I + i, mask);
            store(out + m * stride + i, lowest(silu(gate), most) * highest(lowest(up, most), least),
                  mask);
        }
}

// down(silu(gate) * up) of M rows; the sums in between stay fp32.
template <class T, class W, class Out>
static void mlp(const T* x, long x_stride, const W* gate_up, const W* down, long M, long X, long I,
                float limit, Out* out) {
    float* wide = scratch<float, 8>(M * 2 * I);
    T* inner = scratch<T, 9>(M * I);
    linear(x, x_stride, gate_up, M, 2 * I, X, wide, 2 * I);
    gated(wide, M, I, inner, I, limit);
    linear(inner, I, down, M, X, I, out, X);
}

// One row that visits the experts here, and the place of its sum.
template <class T>
struct Visitor {
    const T* x;
    const int64_t* number;
    const float* weight;
    T* sum;
};

// For every visitor: the weighted sum over those of its K slots that are here: `count` from number
// `first` on. loads [count]: visits are added to it; or null.
template <class T, class W>
static void experts(const Visitor<T>* visitors, const W* const* gate_up, const W* const* down,
                    long rows, long K, long first, long count, long X, long I, float limit,
                    int64_t* loads) {
    float* sums = scratch<float, 10>(rows * X);
    T* gathered = scratch<T, 11>(rows * X);
    float* outs = scratch<float, 12>(rows * X);
    int64_t* begin = scratch<int64_t, 13>(count + 1);
    int64_t* pair = scratch<int64_t, 14>(rows * K);
    memset(sums, 0, rows * X * sizeof(float));
    std::fill(begin, begin + count + 1, 0);
    const auto local = [&](long i) { return visitors[i / K].number[i % K] - first; };
    const auto is_here = [&](long i) { return local(i) >= 0 && local(i) < count; };
    for (long i = 0; i < rows * K; ++i)
        if (is_here(i)) ++begin[local(i) + 1];
    for (long e = 0; e < count; ++e) begin[e + 1] += begin[e];
    for (long i = 0; i < rows * K; ++i)
        if (is_here(i)) pair[begin[local(i)]++] = i;
    for (long e = 0, from = 0; e < count; from = begin[e++]) {
        const long M = begin[e] - from;
        if (!M) continue;
        if (loads) loads[e] += M;
        for (long m = 0; m < M; ++m)
            memcpy(gathered + m * X, visitors[pair[from + m] / K].x, X * sizeof(T));
        mlp(gathered, X, gate_up[e], down[e], M, X, I, limit, outs);
        for (long m = 0; m < M; ++m) {
            const long row = pair[from + m] / K;
            const Vector by = splat(visitors[row].weight[pair[from + m] % K]);
            float* to = sums + row * X;
            for (long i = 0; i < X; i += LANES) {
                const Mask mask = first_lanes(X - i);
                store(to + i, multiply_add(by, load(outs + m * X + i, mask), load(to + i, mask)),
                      mask);
            }
        }
    }
    for (long row = 0; row < rows; ++row)
        for (long i = 0; i < X; i += LANES) {
            const Mask mask = first_lanes(X - i);
            store(visitors[row].sum + i, load(sums + row * X + i, mask), mask);
        }
}

// The rows `own` of the batch and those that arrived visit the experts here. Sums of own rows go to
// own_sum, those of the others into the answers. counts [num_regions]: rows that came from each.
template <class T, class W>
static void visit_experts(const T* x, const int64_t* number, const float* weight,
                          const int64_t* own, long num_own, long K, long num_regions,
                          const Region<T>* arrived, const Region<T>* answers,
                          const W* const* gate_up, const W* const* down, long first, long count,
                          long X, long I, float limit, int64_t* loads, T* own_sum,
                          int64_t* counts) {
    long rows = num_own;
    for (long n = 0; n < num_regions; ++n) rows += counts[n] = *arrived[n].count;
    Visitor<T>* visitors = scratch<Visitor<T>, 24>(rows);
    long at = 0;
    for (; at < num_own; ++at)
        visitors[at] = {x + own[at] * X, number + own[at] * K, weight + own[at] * K,
                        own_sum + at * X};
    for (long n = 0; n < num_regions; ++n)
        for (long i = 0; i < counts[n]; ++i, ++at) {
            const Region<T>& from = arrived[n];
            visitors[at] = {from.hidden.at(i), from.number.at(i), from.weight.at(i),
                            answers[n].hidden.at(i)};
        }
    experts(visitors, gate_up, down, rows, K, first, count, X, I, limit, loads);
}

// Take the `count` highest of `values`, highest first and of equal ones the lowest index first.
// What is taken becomes -inf.
static void take_highest(float* values, long size, long count, long* taken) {
    for (long k = 0; k < count; ++k) {
        taken[k] = std::max_element(values, values + size) - values;
        values[taken[k]] = -std::numeric_limits<float>::infinity();
    }
}

// x [B, X] -> the K experts of each row and their weights; see data_plane/moe/gate.py.
template <class T>
static void gate(const T* x, const float* w, const float* bias, long B, long X, long E, long G,
                 long groups, long K, bool is_softmax, bool is_normalised, float scale,
                 int64_t* expert, float* weight) {
    float* wide = scratch<float, 15>(B * X);
    float* score = scratch<float, 16>(B * E + 16);
    float* choice = scratch<float, 17>(E);
    float* group_score = scratch<float, 18>(G);
    long* taken = scratch<long, 19>(std::max(K, groups) + 2);
    for (long i = 0; i < B * X; i += LANES) {
        const Mask mask = first_lanes(B * X - i);
        store(wide + i, load(x + i, mask), mask);
    }
    linear(wide, X, w, B, E, X, score, E);
    for (long b = 0; b < B; ++b) {
        float* row = score + b * E;
        if (is_softmax) {
            const float highest = *std::max_element(row, row + E);
            float sum = 0;
            for (long e = 0; e < E; ++e) sum += row[e] = std::exp(row[e] - highest);
            for (long e = 0; e < E; ++e) row[e] /= sum;
        } else {
            for (long e = 0; e < E; ++e) row[e] = 1 / (1 + std::exp(-row[e]));
        }
        for (long e = 0; e < E; ++e) choice[e] = bias ? row[e] + bias[e] : row[e];
        if (groups < G) {
            const long size = E / G, best = is_softmax ? 1 : 2;
            for (long g = 0; g < G; ++g) {
                float* of_group = choice + g * size;
                take_highest(of_group, size, best, taken);
                group_score[g] = 0;
                for (long k = 0; k < best; ++k) {
                    const long e = g * size + taken[k];
                    choice[e] = bias ? row[e] + bias[e] : row[e];
                    group_score[g] += choice[e];
                }
            }
            take_highest(group_score, G, groups, taken);
            for (long g = 0; g < G; ++g)
                if (group_score[g] != -std::numeric_limits<float>::infinity())
                    std::fill(choice + g * size, choice + (g + 1) * size,
                              -std::numeric_limits<float>::infinity());
        }
        take_highest(choice, E, K, taken);
        float sum = 1e-20f;
        for (long k = 0; k < K; ++k) sum += row[taken[k]];
        for (long k = 0; k < K; ++k) {
            expert[b * K + k] = taken[k];
            weight[b * K + k] = (is_normalised ? row[taken[k]] / sum : row[taken[k]]) * scale;
        }
    }
}
