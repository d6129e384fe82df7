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
    __m512 highest = _mm512_set1_ps(state.highest);
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity()),
                 by = _mm512_set1_ps(scale);
    __m512 scaled[PAGE / 16];
    for (long v = 0; v < PAGE / 16; ++v) {
        scaled[v] = _mm512_mask_mul_ps(lowest, first_lanes(std::max(tokens - v * 16, 0L)),
                                       load(score + v * 16), by);
        highest = _mm512_max_ps(highest, scaled[v]);
    }
    const float now = _mm512_reduce_max_ps(highest), kept = std::exp(state.highest - now);
    __m512 sum = _mm512_setzero_ps();
    for (long v = 0; v < PAGE / 16; ++v) {
        const __m512 weight = exp16(_mm512_sub_ps(scaled[v], _mm512_set1_ps(now)));
        store(score + v * 16, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    state.sum = state.sum * kept + _mm512_reduce_add_ps(sum);
    state.highest = now;
    return kept;
}

template <int Heads, int Tokens>
static void f32_scores(const float* q, const float* keys, long D, long width, float* score) {
    __m512 sum[Heads][Tokens];
    for (int h = 0; h < Heads; ++h)
        for (int t = 0; t < Tokens; ++t) sum[h][t] = _mm512_setzero_ps();
    for (long d = 0; d < D; d += 16) {
        __m512 key[Tokens];
        for (int t = 0; t < Tokens; ++t) key[t] = _mm512_loadu_ps(keys + t * width + d);
        for (int h = 0; h < Heads; ++h) {
            const __m512 query = _mm512_loadu_ps(q + h * D + d);
            for (int t = 0; t < Tokens; ++t) sum[h][t] = _mm512_fmadd_ps(query, key[t], sum[h][t]);
        }
    }
    for (int h = 0; h < Heads; ++h)
        for (int t = 0; t < Tokens; ++t) score[h * PAGE + t] = _mm512_reduce_add_ps(sum[h][t]);
}

template <int Heads>
static void f32_values(const float* weight, const float* kept, const float* values, long width,
                       long R, long tokens, float* out) {
    for (long r = 0; r < R; r += 32) {
        const __mmask16 second = first_lanes(std::max(R - r - 16, 0L));
        __m512 sum[Heads][2];
        for (int h = 0; h < Heads; ++h) {
            const __m512 by = _mm512_set1_ps(kept[h]);
            sum[h][0] = _mm512_mul_ps(by, load(out + h * R + r));
            sum[h][1] = _mm512_mul_ps(by, load(out + h * R + r + 16, second));
        }
        for (long t = 0; t < tokens; ++t) {
            const float* from = values + t * width + r;
            const __m512 v0 = load(from), v1 = load(from + 16, second);
            for (int h = 0; h < Heads; ++h) {
                const __m512 by = _mm512_set1_ps(weight[h * PAGE + t]);
                sum[h][0] = _mm512_fmadd_ps(by, v0, sum[h][0]);
                sum[h][1] = _mm512_fmadd_ps(by, v1, sum[h][1]);
            }
        }
        for (int h = 0; h < Heads; ++h) {
            store(out + h * R + r, sum[h][0]);
            store(out + h * R + r + 16, sum[h][1], second);
        }
    }
}

static void page_of_heads(const float* q, const float* keys, const float* values, long width,
                          long tokens, long H, long D, long R, float scale, Softmax* state,
                          float* out) {
    float* score = scratch<float, 2>(H * PAGE);
    float* kept = scratch<float, 3>(H);
    for (long h = 0; h < H;) {
        const long heads = H - h >= 4 ? 4 : 1;
        for (long t = 0; t < tokens;) {
            const float *query = q + h * D, *key = keys + t * width;
            float* to = score + h * PAGE + t;
            if (tokens - t >= 4) {
                heads == 4 ? f32_scores<4, 4>(query, key, D, width, to)
                           : f32_scores<1, 4>(query, key, D, width, to);
                t += 4;
            } else {
                heads == 4 ? f32_scores<4, 1>(query, key, D, width, to)
                           : f32_scores<1, 1>(query, key, D, width, to);
                t += 1;
            }
        }
        h += heads;
    }
    for (long h = 0; h < H; ++h) kept[h] = weigh(score + h * PAGE, tokens, scale, state[h]);
    for (long h = 0; h < H;) {
        const float *weight = score + h * PAGE, *by = kept + h;
        if (H - h >= 8) {
            f32_values<8>(weight, by, values, width, R, tokens, out + h * R);
            h += 8;
        } else {
            f32_values<1>(weight, by, values, width, R, tokens, out + h * R);
            h += 1;
        }
    }
}

// AMX: 16 heads at a time. Scores are the page times the query's tiles, so a page needs no other
// layout. Values are the weights times the page, whose tokens are paired here.
static void pack_queries(const bf16* q, long heads, long D, bf16* packed) {
    for (long d = 0; d < D; d += 2)
        for (long h = 0; h < 16; ++h)
            for (long i = 0; i < 2; ++i)
                packed[(d / 2 * 16 + h) * 2 + i] = h < heads ? q[h * D + d + i] : bf16{0};
}

static void pair_tokens(const bf16* values, long width, long R, bf16* packed) {
    alignas(64) static const auto order = [] {
        struct {
            uint16_t low[32], high[32];
        } made;
        for (int i = 0; i < 32; ++i) {
            made.low[i] = uint16_t(i / 2 + i % 2 * 32);
            made.high[i] = uint16_t(made.low[i] + 16);
        }
        return made;
    }();
    const __m512i low = _mm512_loadu_si512(order.low), high = _mm512_loadu_si512(order.high);
    for (long pair = 0; pair < PAGE / 2; ++pair)
        for (long r = 0; r < R; r += 32) {
            const __m512i even = _mm512_loadu_si512(values + pair * 2 * width + r);
            const __m512i odd = _mm512_loadu_si512(values + (pair * 2 + 1) * width + r);
            bf16* to = packed + (r / 16 * 2 + pair / 16) * AMX_TILE + pair % 16 * 32;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to + 2 * AMX_TILE, _mm512_permutex2var_epi16(even, high, odd));
        }
}

static void amx_page(const bf16* queries, const bf16* keys, long width, const bf16* paired,
                     long tokens, long heads, long D, long R, float scale, Softmax* state,
                     float* out) {
    alignas(64) float by_token[PAGE * 16], score[16 * PAGE];
    alignas(64) bf16 weight[2 * AMX_TILE] = {};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < D / 32; ++step) {
        _tile_loadd(6, queries + step * AMX_TILE, 64);
        _tile_loadd(4, keys + step * 32, width * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys + 16 * width + step * 32, width * 2);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys + 32 * width + step * 32, width * 2);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, keys + 48 * width + step * 32, width * 2);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, by_token, 64);
    _tile_stored(1, by_token + 256, 64);
    _tile_stored(2, by_token + 512, 64);
    _tile_stored(3, by_token + 768, 64);
    for (long h = 0; h < heads; ++h) {
        for (long t = 0; t < PAGE; ++t) score[h * PAGE + t] = by_token[t * 16 + h];
        const float kept = weigh(score + h * PAGE, tokens, scale, state[h]);
        for (long v = 0; v < 4; ++v)
            store(weight + v / 2 * AMX_TILE + h * 32 + v % 2 * 16, load(score + h * PAGE + v * 16));
        if (kept != 1.0f)
            for (long r = 0; r < R; r += 16)
                store(out + h * R + r, _mm512_mul_ps(_mm512_set1_ps(kept), load(out + h * R + r)));
    }
    _tile_loadd(4, weight, 64);
    _tile_loadd(5, weight + AMX_TILE, 64);
    for (long r = 0; r < R; r += 16) {
        _tile_loadd(7, out + r, R * 4);
        _tile_loadd(6, paired + r / 16 * 2 * AMX_TILE, 64);
        _tile_dpbf16ps(7, 4, 6);
        _tile_loadd(6, paired + (r / 16 * 2 + 1) * AMX_TILE, 64);
        _tile_dpbf16ps(7, 5, 6);
        _tile_stored(7, out + r, R * 4);
    }
}

static void page_of_heads(const bf16* packed_queries, const bf16* keys, const bf16* values,
                          long width, long tokens, long H, long D, long R, float scale,
                          Softmax* state, float* out) {
    bf16* paired = scratch<bf16, 4>(PAGE * (R + 32));
    pair_tokens(values, width, R, paired);
    for (long h = 0; h < H; h += 16)
        amx_page(packed_queries + h * D, keys, width, paired, tokens, std::min(H - h, 16L), D, R,
                 scale, state + h, out + h * R);
}

static const float* queries_of(const float* q, long, long) { return q; }

static const bf16* queries_of(const bf16* q, long H, long D) {
    bf16* packed = scratch<bf16, 5>((H + 15) / 16 * 16 * D);
    for (long h = 0; h < H; h += 16)
        pack_queries(q + h * D, std::min(H - h, 16L), D, packed + h * D);
    return packed;
}

static void begin_attention(const float*) {}

static void begin_attention(const bf16*) {
    TileConfig config;
    for (int number = 0; number < 8; ++number) config.tile(number, 16, 64);
    _tile_loadconfig(&config);
}

static void end_attention(const float*) {}
static void end_attention(const bf16*) { _tile_release(); }

// q [A, G * H, D], pool [frames, 64, width], frames [A, P]; out [A, G * H, R], lse [A, G * H]
// (natural log, -inf for a row of length 0, whose out is 0). G groups of H heads: the keys of group
// g begin at g * D of a token's KV, its values at value_at + g * R. D and R are multiples of 32.
template <class T>
static void attention(const T* q, const T* pool, const int32_t* frames, long P,
                      const int32_t* lengths, long A, long H, long D, long R, long G, long width,
                      long value_at, float scale, T* out, float* lse) {
    begin_attention(q);
    const long padded = (H + 15) / 16 * 16;
    float* sums = scratch<float, 6>(padded * R);
    Softmax* state = scratch<Softmax, 7>(H);
    for (long group = 0; group < A * G; ++group) {
        const long a = group / G, g = group % G;
        memset(sums, 0, padded * R * sizeof(float));
        std::fill(state, state + H, Softmax());
        const T* queries = lengths[a] ? queries_of(q + group * H * D, H, D) : nullptr;
        for (long done = 0; done < lengths[a]; done += PAGE) {
            const T* kv = pool + long(frames[a * P + done / PAGE]) * PAGE * width;
            page_of_heads(queries, kv + g * D, kv + value_at + g * R, width,
                          std::min(long(lengths[a]) - done, PAGE), H, D, R, scale, state, sums);
        }
        for (long h = 0; h < H; ++h) {
            const __m512 by = _mm512_set1_ps(lengths[a] ? 1 / state[h].sum : 0);
            for (long r = 0; r < R; r += 16)
                store(out + (group * H + h) * R + r, _mm512_mul_ps(by, load(sums + h * R + r)));
            lse[group * H + h] = state[h].highest + std::log(state[h].sum);
        }
    }
    end_attention(q);
}
