// x [M, K] times a packed weight [N, K] transposed: out [M, N]. One thread.
//
// A packed weight is a row of blocks of columns, in the order in which they are read. A block has
// 64 columns in fp32, one k after the other, and 32 columns in bf16, as pairs of AMX tiles (16
// pairs of k by 16 columns). With few rows the time is that of reading the weight once, so the pass
// over a block prefetches the next block.
#pragma once

#include "vector.h"

constexpr long F32_COLUMNS = 64, F32_ROWS = 6;
constexpr long AMX_COLUMNS = 32, AMX_K = 32, AMX_TILE = 512;

static inline long blocks(long count, long size) { return (count + size - 1) / size; }

static void pack(const float* weight, long N, long K, float* packed) {
    for (long n = 0; n < blocks(N, F32_COLUMNS) * F32_COLUMNS; ++n)
        for (long k = 0; k < K; ++k)
            packed[(n / F32_COLUMNS * K + k) * F32_COLUMNS + n % F32_COLUMNS] =
                n < N ? weight[n * K + k] : 0.0f;
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

static inline long packed_elements(long N, long K, const float*) {
    return blocks(N, F32_COLUMNS) * F32_COLUMNS * K;
}

static inline long packed_elements(long N, long K, const bf16*) {
    return blocks(N, AMX_COLUMNS) * AMX_COLUMNS * blocks(K, AMX_K) * AMX_K;
}

template <int M>
static void f32_block(const float* x, long x_stride, const float* w, long K, float* out,
                      long out_stride, long columns, const char* ahead, long ahead_lines) {
    __m512 sum[M][4];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < 4; ++v) sum[m][v] = _mm512_setzero_ps();
    for (long k = 0; k < K; ++k, w += F32_COLUMNS) {
        for (long line = 0; line < ahead_lines; ++line)
            _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
        ahead += ahead_lines * 64;
        const __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 16);
        const __m512 w2 = _mm512_loadu_ps(w + 32), w3 = _mm512_loadu_ps(w + 48);
        for (int m = 0; m < M; ++m) {
            const __m512 value = _mm512_set1_ps(x[m * x_stride + k]);
            sum[m][0] = _mm512_fmadd_ps(value, w0, sum[m][0]);
            sum[m][1] = _mm512_fmadd_ps(value, w1, sum[m][1]);
            sum[m][2] = _mm512_fmadd_ps(value, w2, sum[m][2]);
            sum[m][3] = _mm512_fmadd_ps(value, w3, sum[m][3]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < 4 && v * 16 < columns; ++v)
            store(out + m * out_stride + v * 16, sum[m][v], first_lanes(columns - v * 16));
}

static void linear(const float* x, long x_stride, const float* w, long M, long N, long K,
                   float* out, long out_stride) {
    const long passes = blocks(M, F32_ROWS);
    // Every pass prefetches its share of the next block: 4 lines for each k, divided by the passes.
    const long ahead_lines = passes >= 4 ? 1 : passes >= 2 ? 2 : 4;
    for (long n = 0; n < N; n += F32_COLUMNS) {
        const char* next = reinterpret_cast<const char*>(w + F32_COLUMNS * K);
        for (long pass = 0, m = 0; pass < passes; ++pass) {
            const long rows = (M - m + passes - pass - 1) / (passes - pass);
            const bool is_ahead = pass * ahead_lines < 4;
            const char* ahead = next + (is_ahead ? pass * ahead_lines * 64 * K : 0);
            const long lines = is_ahead ? ahead_lines : 0;
            const float* from = x + m * x_stride;
            float* to = out + m * out_stride + n;
            switch (rows) {
                case 1:
                    f32_block<1>(from, x_stride, w, K, to, out_stride, N - n, ahead, lines);
                    break;
                case 2:
                    f32_block<2>(from, x_stride, w, K, to, out_stride, N - n, ahead, lines);
                    break;
                case 3:
                    f32_block<3>(from, x_stride, w, K, to, out_stride, N - n, ahead, lines);
                    break;
                case 4:
                    f32_block<4>(from, x_stride, w, K, to, out_stride, N - n, ahead, lines);
                    break;
                case 5:
                    f32_block<5>(from, x_stride, w, K, to, out_stride, N - n, ahead, lines);
                    break;
                default: f32_block<6>(from, x_stride, w, K, to, out_stride, N - n, ahead, lines);
            }
            m += rows;
        }
        w += F32_COLUMNS * K;
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
