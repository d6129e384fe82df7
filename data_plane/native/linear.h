// x [M, K] times a packed weight [N, K] transposed: out [M, N]. One thread.
//
// A packed weight is blocks of COLUMNS columns, and a block is steps of COLUMNS words of 32 bits: an
// fp32 of one k, or the bf16 of two. With few rows the time is that of reading the weight once, so
// the pass over blocks prefetches the next ones. AMX has another layout (amx.h).
//
// Rows and sums are T, weights W. fp32 rows take weights of bf16 too, which are widened in the
// registers: each sum adds the same products in the same order as with the weight widened before.
#pragma once

#include "vector.h"

// Columns are padded to whole groups of blocks.
constexpr long GROUP = COLUMNS * MOST_TOGETHER;

static inline long blocks(long count, long size) { return (count + size - 1) / size; }

// How many k a word has.
template <class W>
constexpr long WORD = 4 / sizeof(W);

template <>
struct Products<float, float> {
    static constexpr int PARTS = 1;
    static Vector weight(const float* w, int) { return load(w); }
    static Vector value(const float* x, long step, int) { return splat(x[step]); }
    static Vector add(Vector sum, Vector value, Vector weight) {
        return multiply_add(value, weight, sum);
    }
};

// One part takes the first bf16 of each word, the other the second.
template <>
struct Products<float, bf16> : Products<float, float> {
    static constexpr int PARTS = 2;
    static Vector weight(const bf16* w, int part) { return widened(w, part); }
    static Vector value(const float* x, long step, int part) { return splat(x[step * 2 + part]); }
};

template <class W>
static inline long packed_elements(long N, long K, const W*) {
    return blocks(N, GROUP) * GROUP * blocks(K, WORD<W>) * WORD<W>;
}

template <class W>
static void pack(const W* weight, long N, long K, W* packed) {
    constexpr long each = WORD<W>;
    const long steps = blocks(K, each);
    for (long n = 0; n < blocks(N, GROUP) * GROUP; ++n)
        for (long k = 0; k < steps * each; ++k) {
            const long word = (n / COLUMNS * steps + k / each) * COLUMNS + n % COLUMNS;
            packed[word * each + k % each] = n < N && k < K ? weight[n * K + k] : W{};
        }
}

// The rows as the products take them: with a whole number of steps of `each` k, in the factors'
// type, and not a power of two apart, where many rows would share few sets of the cache.
template <class T>
static const FactorOf<T>* factors(const T* x, long& x_stride, long M, long K, long each) {
    using Factor = FactorOf<T>;
    const long wide = blocks(K, each) * each;
    if constexpr (std::is_same_v<Factor, T>)
        if (wide == K && (M <= 4 || x_stride * sizeof(T) % 1024)) return x;
    const long stride = wide + 64 / sizeof(Factor);
    Factor* made = scratch<Factor, 1>(M * stride);
    for (long m = 0; m < M; ++m) {
        for (long k = 0; k < K; k += LANES) {
            const Mask mask = first_lanes(K - k);
            store(made + m * stride + k, load(x + m * x_stride + k, mask), mask);
        }
        if (wide > K) made[m * stride + K] = Factor{};
    }
    x_stride = stride;
    return made;
}

// M rows times so many blocks together as keep the processor's registers full. The passes over a
// block prefetch equal shares of what is next, evenly over the steps: the processor waits for few
// lines at a time, and what comes in a part of the steps only would stop the sums there.
template <int M, int Together, class Factor, class W, class Out>
static void multiply(const Factor* x, long x_stride, const W* w, long steps, Out* out,
                     long out_stride, long columns, const char* ahead, long passes) {
    using P = Products<Factor, W>;
    constexpr int each = COLUMNS / LANES, V = Together * each, LINES = V * LANES * 4 / 64;
    long due = 0;
    const long block = steps * COLUMNS * WORD<W>;
    Vector sum[M][V];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) sum[m][v] = splat(0);
    for (long step = 0; step < steps; ++step, w += COLUMNS * WORD<W>) {
        for (due += LINES; due >= passes; due -= passes, ahead += 64)
            _mm_prefetch(ahead, _MM_HINT_T1);
        for (int part = 0; part < P::PARTS; ++part) {
            decltype(P::weight(w, 0)) weight[V];
            for (int v = 0; v < V; ++v)
                weight[v] = P::weight(w + v / each * block + v % each * LANES * WORD<W>, part);
            for (int m = 0; m < M; ++m) {
                const auto value = P::value(x + m * x_stride, step, part);
                for (int v = 0; v < V; ++v) sum[m][v] = P::add(sum[m][v], value, weight[v]);
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V && v * LANES < columns; ++v)
            store(out + m * out_stride + v * LANES, sum[m][v], first_lanes(columns - v * LANES));
}

template <int Value>
using Constant = std::integral_constant<int, Value>;

// Call `run` with `rows`, from Least to Most, as a constant.
template <int Least, int Most, class Run>
static inline void with_rows(long rows, Run run) {
    if constexpr (Least < Most)
        if (rows < Most) return with_rows<Least, Most - 1>(rows, run);
    run(Constant<Most>());
}

template <int Together, class Factor, class W, class Out>
static void linear_together(const Factor* x, long x_stride, const W* w, long M, long N, long steps,
                            Out* out, long out_stride) {
    constexpr int most = ROWS / Together;
    // A pass has at least half of the rows that it could have, or more blocks would be together.
    constexpr int least = Together == MOST_TOGETHER ? 1 : (most + 1) / 2;
    constexpr long columns = Together * COLUMNS, lines = columns * 4 / 64;
    const long passes = blocks(M, most), size = steps * columns * WORD<W>;
    for (long n = 0; n < N; n += columns, w += size)
        for (long pass = 0, m = 0; pass < passes; ++pass) {
            const long rows = (M - m + passes - pass - 1) / (passes - pass);
            const char* ahead =
                reinterpret_cast<const char*>(w + size) + lines * steps * pass / passes * 64;
            with_rows<least, most>(rows, [&](auto count) {
                multiply<count, Together>(x + m * x_stride, x_stride, w, steps,
                                          out + m * out_stride + n, out_stride, N - n, ahead,
                                          passes);
            });
            m += rows;
        }
}

template <int Together = MOST_TOGETHER, class T, class W, class Out>
static void linear(const T* x, long x_stride, const W* w, long M, long N, long K, Out* out,
                   long out_stride) {
    // Few rows fill few registers with their sums: then several blocks are read together.
    if constexpr (Together > 1)
        if (M * Together > ROWS)
            return linear<Together / 2>(x, x_stride, w, M, N, K, out, out_stride);
    const auto* rows = factors(x, x_stride, M, K, WORD<W>);
    linear_together<Together>(rows, x_stride, w, M, N, blocks(K, WORD<W>), out, out_stride);
}
