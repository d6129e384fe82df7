// What AMX computes of bf16: products of rows and weights, and attention, in tiles of 16 rows of 64
// bytes. A packed weight is blocks of 32 columns, each a row of pairs of tiles (16 pairs of k by 16
// columns).
#pragma once

#include "attention.h"

constexpr long AMX_COLUMNS = 32, AMX_K = 32, AMX_TILE = 512;

static inline long packed_elements(long N, long K, const bf16*) {
    return blocks(N, AMX_COLUMNS) * AMX_COLUMNS * blocks(K, AMX_K) * AMX_K;
}

static void pack(const bf16* weight, long N, long K, bf16* packed) {
    const long steps = blocks(K, AMX_K);
    for (long n = 0; n < blocks(N, AMX_COLUMNS) * AMX_COLUMNS; ++n)
        for (long k = 0; k < steps * AMX_K; ++k) {
            const long tile = (n / AMX_COLUMNS * steps + k / AMX_K) * 2 + n % AMX_COLUMNS / 16;
            const long place = tile * AMX_TILE + k % AMX_K / 2 * 32 + n % 16 * 2 + k % 2;
            packed[place] = n < N && k < K ? weight[n * K + k] : bf16{0};
        }
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void tile(int number, long num_rows, long bytes) {
        rows[number] = uint8_t(num_rows);
        row_bytes[number] = uint16_t(bytes);
    }
};

// Tiles 0 to 3 are the sums (rows by columns), 4 and 5 the rows, 6 and 7 the weight.
template <bool HasSecond, class Out>
static void amx_block(const bf16* x, long x_stride, long rows, const bf16* w, long steps, Out* out,
                      long out_stride, long columns, const char* ahead) {
    alignas(64) float sums[32 * AMX_COLUMNS];
    _tile_zero(0);
    _tile_zero(1);
    if (HasSecond) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long step = 0; step < steps; ++step, w += 2 * AMX_TILE) {
        _tile_loadd(4, x + step * AMX_K, x_stride * 2);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + AMX_TILE, 64);
        if (ahead)
            for (int line = 0; line < 32; ++line)
                _mm_prefetch(ahead + step * 2048 + line * 64, _MM_HINT_T1);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (HasSecond) {
            _tile_loadd(5, x + 16 * x_stride + step * AMX_K, x_stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, AMX_COLUMNS * 4);
    _tile_stored(1, sums + 16, AMX_COLUMNS * 4);
    if (HasSecond) {
        _tile_stored(2, sums + 16 * AMX_COLUMNS, AMX_COLUMNS * 4);
        _tile_stored(3, sums + 16 * AMX_COLUMNS + 16, AMX_COLUMNS * 4);
    }
    for (long m = 0; m < rows; ++m)
        for (long n = 0; n < AMX_COLUMNS && n < columns; n += 16)
            store(out + m * out_stride + n, load(sums + m * AMX_COLUMNS + n),
                  first_lanes(columns - n));
}

static inline void configure_rows(long rows) {
    TileConfig config;
    const long first = std::min(rows, 16L), second = std::max(rows - 16, 1L);
    for (int number : {0, 1, 4}) config.tile(number, first, 64);
    for (int number : {2, 3, 5}) config.tile(number, second, 64);
    for (int number : {6, 7}) config.tile(number, 16, 64);
    _tile_loadconfig(&config);
}

template <class Out>
static void linear(const bf16* x, long x_stride, const bf16* w, long M, long N, long K, Out* out,
                   long out_stride) {
    const long steps = blocks(K, AMX_K), chunks = blocks(M, 32);
    if (K % AMX_K) {
        bf16* padded = scratch<bf16, 1>(M * steps * AMX_K);
        for (long m = 0; m < M; ++m) {
            memcpy(padded + m * steps * AMX_K, x + m * x_stride, K * 2);
            memset(padded + m * steps * AMX_K + K, 0, (steps * AMX_K - K) * 2);
        }
        x = padded;
        x_stride = steps * AMX_K;
    }
    long configured = 0;
    for (long n = 0; n < N; n += AMX_COLUMNS, w += AMX_COLUMNS * steps * AMX_K)
        for (long chunk = 0; chunk < chunks; ++chunk) {
            const long rows = std::min(M - chunk * 32, 32L);
            if (rows != configured) configure_rows(configured = rows);
            const char* ahead =
                chunk ? nullptr : reinterpret_cast<const char*>(w + AMX_COLUMNS * steps * AMX_K);
            const bf16* from = x + chunk * 32 * x_stride;
            Out* to = out + chunk * 32 * out_stride + n;
            if (rows > 16)
                amx_block<true>(from, x_stride, rows, w, steps, to, out_stride, N - n, ahead);
            else
                amx_block<false>(from, x_stride, rows, w, steps, to, out_stride, N - n, ahead);
        }
    if (configured) _tile_release();
}

// Sixteen heads at a time. Scores are the page times the query's tiles, so a page needs no other
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
                store(out + h * R + r, splat(kept) * load(out + h * R + r));
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

template <>
struct Pages<bf16> {
    static void begin() {
        TileConfig config;
        for (int number = 0; number < 8; ++number) config.tile(number, 16, 64);
        _tile_loadconfig(&config);
    }

    static void end() { _tile_release(); }

    static const bf16* queries(const bf16* q, long H, long D) {
        bf16* packed = scratch<bf16, 5>((H + 15) / 16 * 16 * D);
        for (long h = 0; h < H; h += 16)
            pack_queries(q + h * D, std::min(H - h, 16L), D, packed + h * D);
        return packed;
    }

    static void page(const bf16* packed_queries, const bf16* keys, const bf16* values, const bf16*,
                     long width, long tokens, long H, long D, long R, float scale, Softmax* state,
                     float* out) {
        bf16* paired = scratch<bf16, 4>(PAGE * (R + 32));
        pair_tokens(values, width, R, paired);
        for (long h = 0; h < H; h += 16)
            amx_page(packed_queries + h * D, keys, width, paired, tokens, std::min(H - h, 16L), D,
                     R, scale, state + h, out + h * R);
    }
};
