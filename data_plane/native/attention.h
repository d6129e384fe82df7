// Attention of one row over its pages: of all heads over latent KV, or of each group of heads over
// its K/V head. A group reads each page once.
//
// One page at a time, with a running maximum and sum of each head (online softmax). One thread.
#pragma once

#include "linear.h"

constexpr long PAGE = 64;

struct Softmax {
    float highest = -std::numeric_limits<float>::infinity(), sum = 0;
};

// Turn one head's scores of a page into weights, 0 from `tokens` on. Returns the factor by which
// the sums so far must be multiplied.
static float weigh(float* score, long tokens, float scale, Softmax& state) {
    constexpr long V = PAGE / LANES;
    const Vector none = splat(-std::numeric_limits<float>::infinity()), by = splat(scale);
    Vector scaled[V], top = splat(state.highest), sum = splat(0);
    for (long v = 0; v < V; ++v) {
        const Mask mask = first_lanes(std::max(tokens - v * LANES, 0L));
        scaled[v] = choose(mask, load(score + v * LANES) * by, none);
        top = highest(top, scaled[v]);
    }
    const float now = highest_lane(top), kept = std::exp(state.highest - now);
    for (long v = 0; v < V; ++v) {
        const Vector weight = exp_of(scaled[v] - splat(now));
        store(score + v * LANES, weight);
        sum = sum + weight;
    }
    state.sum = state.sum * kept + sum_of(sum);
    state.highest = now;
    return kept;
}

// What is read next: `lines` of the cache of each token, `width` elements apart. A token's part of a
// page is too short for the processor to guess. Each pass over the tokens fetches a share of every
// token's lines: fetched all at once they would wait for each other, and the processor for them.
template <class T>
struct Ahead {
    const T* from;
    long width, lines, passes;
    long pass = 0, first = 0, last = 0;

    void begin_pass() {
        first = last;
        last = lines * ++pass / passes;
    }

    void prefetch(long token) const {
        const char* begin = reinterpret_cast<const char*>(from + token * width);
        for (long line = first; line < last; ++line)
            _mm_prefetch(begin + line * 64, _MM_HINT_T1);
    }
};

// Scores of some heads and four tokens, or one.
template <int Heads, int Tokens, class T>
static void scores(const float* q, const T* keys, long D, long width, float* score) {
    Vector sum[Heads][Tokens];
    for (int h = 0; h < Heads; ++h)
        for (int t = 0; t < Tokens; ++t) sum[h][t] = splat(0);
    for (long d = 0; d < D; d += LANES) {
        Vector key[Tokens];
        for (int t = 0; t < Tokens; ++t) key[t] = load(keys + t * width + d);
        for (int h = 0; h < Heads; ++h) {
            const Vector query = load(q + h * D + d);
            for (int t = 0; t < Tokens; ++t) sum[h][t] = multiply_add(query, key[t], sum[h][t]);
        }
    }
    for (int h = 0; h < Heads; ++h) {
        if constexpr (Tokens == 4)
            store_sums(score + h * PAGE, sum[h]);
        else
            score[h * PAGE] = sum_of(sum[h][0]);
    }
}

template <int Heads, class T>
static void values_of(const float* weight, const float* kept, const T* values, long width, long R,
                      long tokens, Ahead<T>& ahead, float* out) {
    for (long r = 0; r < R; r += 2 * LANES) {
        ahead.begin_pass();
        Vector sum[Heads][2];
        for (int h = 0; h < Heads; ++h)
            for (int v = 0; v < 2; ++v)
                sum[h][v] = splat(kept[h]) * load(out + h * R + r + v * LANES);
        for (long t = 0; t < tokens; ++t) {
            ahead.prefetch(t);
            const T* from = values + t * width + r;
            const Vector v0 = load(from), v1 = load(from + LANES);
            for (int h = 0; h < Heads; ++h) {
                const Vector by = splat(weight[h * PAGE + t]);
                sum[h][0] = multiply_add(by, v0, sum[h][0]);
                sum[h][1] = multiply_add(by, v1, sum[h][1]);
            }
        }
        for (int h = 0; h < Heads; ++h)
            for (int v = 0; v < 2; ++v) store(out + h * R + r + v * LANES, sum[h][v]);
    }
}

// How pages of T are attended to: what a call begins and ends with, the queries of H heads in the
// form that `page` reads, and a page, whose weighted values are added to `out`.
template <class T>
struct Pages {
    // So many heads' sums fit the processor's registers.
    static constexpr int SCORED = LANES / 4, SUMMED = LANES / 2;

    static void begin() {}
    static void end() {}

    static const float* queries(const T* q, long H, long D) {
        if constexpr (std::is_same_v<T, float>) return q;
        float* wide = scratch<float, 5>(H * D);
        for (long i = 0; i < H * D; i += LANES) store(wide + i, load(q + i));
        return wide;
    }

    template <int Heads>
    static void score(const float* q, const T* keys, long width, long tokens, long D,
                      Ahead<T>& ahead, float* to) {
        ahead.begin_pass();
        long t = 0;
        for (; t + 4 <= tokens; t += 4) {
            for (long i = 0; i < 4; ++i) ahead.prefetch(t + i);
            scores<Heads, 4>(q, keys + t * width, D, width, to + t);
        }
        for (; t < tokens; ++t) scores<Heads, 1>(q, keys + t * width, D, width, to + t);
    }

    static void page(const float* q, const T* keys, const T* values, const T* next, long width,
                     long tokens, long H, long D, long R, float scale, Softmax* state,
                     float* out) {
        // While keys are read, the values come; while these are, the next keys. If keys are values
        // too, the next ones come all the time.
        const long scored = H / SCORED + H % SCORED;
        const long summed =
            (H / SUMMED + H % SUMMED / (SUMMED / 2) + H % (SUMMED / 2)) * R / (2 * LANES);
        const long next_lines = next ? D * long(sizeof(T)) / 64 : 0;
        const bool is_latent = values == keys;
        Ahead<T> ahead = {next, width, next_lines, scored + summed};
        if (!is_latent) ahead = {values, width, R * long(sizeof(T)) / 64, scored};
        float* weight = scratch<float, 2>(H * PAGE);
        float* kept = scratch<float, 3>(H);
        long h = 0;
        for (; h + SCORED <= H; h += SCORED)
            score<SCORED>(q + h * D, keys, width, tokens, D, ahead, weight + h * PAGE);
        for (; h < H; ++h) score<1>(q + h * D, keys, width, tokens, D, ahead, weight + h * PAGE);
        if (!is_latent) ahead = {next, width, next_lines, summed};
        for (h = 0; h < H; ++h) kept[h] = weigh(weight + h * PAGE, tokens, scale, state[h]);
        const auto add = [&](auto heads) {
            for (; h + heads <= H; h += heads)
                values_of<heads>(weight + h * PAGE, kept + h, values, width, R, tokens, ahead,
                                 out + h * R);
        };
        h = 0;
        add(Constant<SUMMED>());
        add(Constant<SUMMED / 2>());
        add(Constant<1>());
    }
};

// q [A, G * H, D], pool [frames, 64, width], frames [A, P]; out [A, G * H, R], lse [A, G * H]
// (natural log, -inf for a row of length 0, whose out is 0). G groups of H heads: the keys of group
// g begin at g * D of a token's KV, its values at value_at + g * R. D and R are multiples of 32.
template <class T>
static void attention(const T* q, const T* pool, const int32_t* frames, long P,
                      const int32_t* lengths, long A, long H, long D, long R, long G, long width,
                      long value_at, float scale, T* out, float* lse) {
    using Of = Pages<T>;
    // The keys of a group of a row from a page on; null past the last.
    const auto keys_at = [&](long group, long done) -> const T* {
        const long a = group / G;
        if (group == A * G || done >= lengths[a]) return nullptr;
        return pool + long(frames[a * P + done / PAGE]) * PAGE * width + group % G * D;
    };
    Of::begin();
    const long padded = (H + 15) / 16 * 16;
    float* sums = scratch<float, 6>(padded * R);
    Softmax* state = scratch<Softmax, 7>(H);
    for (long group = 0; group < A * G; ++group) {
        const long a = group / G, g = group % G;
        memset(sums, 0, padded * R * sizeof(float));
        std::fill(state, state + H, Softmax());
        const auto* queries = lengths[a] ? Of::queries(q + group * H * D, H, D) : nullptr;
        for (long done = 0; done < lengths[a]; done += PAGE) {
            const T* keys = keys_at(group, done);
            const T* next = keys_at(group, done + PAGE);
            Of::page(queries, keys, keys - g * D + value_at + g * R,
                     next ? next : keys_at(group + 1, 0), width,
                     std::min(long(lengths[a]) - done, PAGE), H, D, R, scale, state, sums);
        }
        for (long h = 0; h < H; ++h) {
            const Vector by = splat(lengths[a] ? 1 / state[h].sum : 0);
            for (long r = 0; r < R; r += LANES)
                store(out + (group * H + h) * R + r, by * load(sums + h * R + r));
            lse[group * H + h] = state[h].highest + std::log(state[h].sum);
        }
    }
    Of::end();
}
