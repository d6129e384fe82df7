// All that a decode step computes on a CPU, without the exchange: with AVX2 and FMA, AVX-512 or AMX,
// as the compiler's flags say.
//
// Plain C calls, one thread, no allocation. data_plane/native/*.py call them, and name the torch
// function that is the slow reference of each.
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "heads.h"
#include "rows.h"
#ifdef __AMX_TILE__
#include "amx.h"
#endif

// q [B, H, N + P] -> [B, H, R + P]: W_UK absorbed, then the rotated part.
template <class T>
static void absorb(const T* q, const T* k_up, const int64_t* position, const float* cos,
                   const float* sin, long B, long H, long N, long P, long R, bool is_interleaved,
                   T* out) {
    const long stride = packed_elements(R, N, k_up);
    for (long h = 0; h < H; ++h)
        linear(q + h * (N + P), H * (N + P), k_up + h * stride, B, R, N, out + h * (R + P),
               H * (R + P));
    for (long b = 0; b < B; ++b)
        for (long h = 0; h < H; ++h) {
            const long row = b * H + h, at = position[b] * (P / 2);
            rotate(q + row * (N + P) + N, out + row * (R + P) + R, P, cos + at, sin + at,
                   is_interleaved);
        }
}

// A layer's packed weights, without its MLPs, and the model's widths. LayerFields of
// data_plane/native/calls.py has the same fields.
template <class T>
struct Layer {
    const T *input_norm, *down, *q_norm, *kv_norm, *q, *k_up, *o, *post_norm;
    long X, C, R, P, H, N, V;
    float norm_eps, latent_eps;
    int is_interleaved;
};

// x [B, X] -> the normed q latent [B, C], the new latent KV [B, R + P], and the absorbed queries
// [B, H, R + P]. Without q LoRA, C is 0 and the q latent is the normed x.
template <class T>
static void attention_rows(const Layer<T>& of, const T* x, const int64_t* position,
                           const float* cos, const float* sin, long B, T* latent, T* kv, T* q) {
    const long X = of.X, C = of.C, R = of.R, P = of.P, wide = of.H * (of.N + P);
    T* normed = C ? scratch<T, 21>(B * X) : latent;
    T* down = scratch<T, 22>(B * (C + R + P));
    T* plain = scratch<T, 23>(B * wide);
    for (long b = 0; b < B; ++b)
        rms_norm_row(x + b * X, of.input_norm, normed + b * X, X, of.norm_eps);
    linear(normed, X, of.down, B, C + R + P, X, down, C + R + P);
    for (long b = 0; b < B; ++b) {
        const T* row = down + b * (C + R + P);
        if (C) rms_norm_row(row, of.q_norm, latent + b * C, C, of.latent_eps);
        rms_norm_row(row + C, of.kv_norm, kv + b * (R + P), R, of.latent_eps);
        const long at = position[b] * (P / 2);
        rotate(row + C + R, kv + b * (R + P) + R, P, cos + at, sin + at, of.is_interleaved);
    }
    const long size = C ? C : X;
    linear(latent, size, of.q, B, wide, size, plain, wide);
    absorb(plain, of.k_up, position, cos, sin, B, of.H, of.N, P, R, of.is_interleaved, q);
}

// latent [B, C] (without q LoRA the normed x) -> the absorbed queries [B, H, R + P].
template <class T>
static void absorbed_q(const Layer<T>& of, const T* latent, const int64_t* position,
                       const float* cos, const float* sin, long B, T* q) {
    const long wide = of.H * (of.N + of.P), size = of.C ? of.C : of.X;
    T* plain = scratch<T, 23>(B * wide);
    linear(latent, size, of.q, B, wide, size, plain, wide);
    absorb(plain, of.k_up, position, cos, sin, B, of.H, of.N, of.P, of.R, of.is_interleaved, q);
}

// summed [B, X]: x [B, X] plus the output projection of o [B, H, V]. normed [B, X]: summed, normed for
// the MLP.
template <class T>
static void after_attention(const Layer<T>& of, const T* x, const T* o, long B, T* summed,
                            T* normed) {
    const long X = of.X, width = of.H * of.V;
    linear(o, width, of.o, B, X, width, summed, X);
    for (long b = 0; b < B; ++b) {
        T* row = summed + b * X;
        for (long i = 0; i < X; i += LANES) {
            const Mask mask = first_lanes(X - i);
            store(row + i, load(x + b * X + i, mask) + load(row + i, mask), mask);
        }
        rms_norm_row(row, of.post_norm, normed + b * X, X, of.norm_eps);
    }
}

// [B, H, K] -> [B, H, N], each head with its own packed weight.
template <class T>
static void heads_linear(const T* x, const T* w, long B, long H, long N, long K, T* out) {
    const long stride = packed_elements(N, K, w);
    for (long h = 0; h < H; ++h)
        linear(x + h * K, H * K, w + h * stride, B, N, K, out + h * N, H * N);
}

// x [M, K], normed, times the packed vocabulary head [N, K]: [M, N] fp32.
template <class T>
static void logits(const T* x, const T* norm, float eps, const T* w, long M, long N, long K,
                   float* out) {
    T* normed = scratch<T, 21>(M * K);
    for (long m = 0; m < M; ++m) rms_norm_row(x + m * K, norm, normed + m * K, K, eps);
    linear(normed, K, w, M, N, K, out, N);
}

// gate_up [M, 2 I] -> silu(gate) * up [M, I].
template <class From, class T>
static void gated(const From* gate_up, long M, long I, T* out) {
    for (long m = 0; m < M; ++m)
        for (long i = 0; i < I; i += LANES) {
            const Mask mask = first_lanes(I - i);
            const Vector gate = load(gate_up + m * 2 * I + i, mask),
                         up = load(gate_up + (m * 2 + 1) * I + i, mask);
            store(out + m * I + i, silu(gate) * up, mask);
        }
}

// down(silu(gate) * up) of M rows; the sums in between stay fp32.
template <class T, class Out>
static void mlp(const T* x, long x_stride, const T* gate_up, const T* down, long M, long X, long I,
                Out* out) {
    float* wide = scratch<float, 8>(M * 2 * I);
    T* inner = scratch<T, 9>(M * I);
    linear(x, x_stride, gate_up, M, 2 * I, X, wide, 2 * I);
    gated(wide, M, I, inner);
    linear(inner, I, down, M, X, I, out, X);
}

// One row that visits the experts here, and the place of its sum.
template <class T>
struct Visitor {
    const T* x;
    const int64_t* expert;
    const float* weight;
    T* sum;
};

// For every visitor: the weighted sum over those of its K experts that are here. slot: the place of
// each expert among the `count` places here, -1 if it is elsewhere.
template <class T>
static void experts(const Visitor<T>* visitors, const T* const* gate_up, const T* const* down,
                    long rows, long K, const int64_t* slot, long count, long X, long I) {
    float* sums = scratch<float, 10>(rows * X);
    T* gathered = scratch<T, 11>(rows * X);
    float* outs = scratch<float, 12>(rows * X);
    int64_t* begin = scratch<int64_t, 13>(count + 1);
    int64_t* pair = scratch<int64_t, 14>(rows * K);
    memset(sums, 0, rows * X * sizeof(float));
    std::fill(begin, begin + count + 1, 0);
    const auto local = [&](long i) { return slot[visitors[i / K].expert[i % K]]; };
    for (long i = 0; i < rows * K; ++i)
        if (local(i) >= 0) ++begin[local(i) + 1];
    for (long e = 0; e < count; ++e) begin[e + 1] += begin[e];
    for (long i = 0; i < rows * K; ++i)
        if (local(i) >= 0) pair[begin[local(i)]++] = i;
    for (long e = 0, from = 0; e < count; from = begin[e++]) {
        const long M = begin[e] - from;
        if (!M) continue;
        for (long m = 0; m < M; ++m)
            memcpy(gathered + m * X, visitors[pair[from + m] / K].x, X * sizeof(T));
        mlp(gathered, X, gate_up[e], down[e], M, X, I, outs);
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
template <class T>
static void visit_experts(const T* x, const int64_t* expert, const float* weight,
                          const int64_t* own, long num_own, long K, long num_regions,
                          const Region<T>* arrived, const Region<T>* answers,
                          const T* const* gate_up, const T* const* down,
                          const int64_t* slot, long count, long X, long I, T* own_sum,
                          int64_t* counts) {
    long rows = num_own;
    for (long n = 0; n < num_regions; ++n) rows += counts[n] = *arrived[n].count;
    Visitor<T>* visitors = scratch<Visitor<T>, 24>(rows);
    long at = 0;
    for (; at < num_own; ++at)
        visitors[at] = {x + own[at] * X, expert + own[at] * K, weight + own[at] * K,
                        own_sum + at * X};
    for (long n = 0; n < num_regions; ++n)
        for (long i = 0; i < counts[n]; ++i, ++at) {
            const Region<T>& from = arrived[n];
            visitors[at] = {from.hidden + i * X, from.expert + i * K, from.weight + i * K,
                            answers[n].hidden + i * X};
        }
    experts(visitors, gate_up, down, rows, K, slot, count, X, I);
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

extern "C" {

// Whether this process may use AMX; Linux grants it on request.
int nanocp_allow_amx() {
    const int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#define EXPORT(name, T)                                                                            \
    long nanocp_packed_elements_##name(long N, long K) {                                           \
        return packed_elements(N, K, (const T*)nullptr);                                           \
    }                                                                                              \
    void nanocp_pack_##name(const T* weight, long N, long K, T* packed) {                          \
        pack(weight, N, K, packed);                                                                \
    }                                                                                              \
    void nanocp_linear_##name(const T* x, long x_stride, const T* w, long M, long N, long K,       \
                              T* out) {                                                            \
        linear(x, x_stride, w, M, N, K, out, N);                                                   \
    }                                                                                              \
    void nanocp_logits_##name(const T* x, const T* norm, float eps, const T* w, long M, long N,    \
                              long K, float* out) {                                                \
        logits(x, norm, eps, w, M, N, K, out);                                                     \
    }                                                                                              \
    void nanocp_attention_rows_##name(const Layer<T>* of, const T* x, const int64_t* position,     \
                                      const float* cos, const float* sin, long B, T* latent,       \
                                      T* kv, T* q) {                                               \
        attention_rows(*of, x, position, cos, sin, B, latent, kv, q);                              \
    }                                                                                              \
    void nanocp_absorbed_q_##name(const Layer<T>* of, const T* latent, const int64_t* position,    \
                                  const float* cos, const float* sin, long B, T* q) {              \
        absorbed_q(*of, latent, position, cos, sin, B, q);                                         \
    }                                                                                              \
    void nanocp_heads_rows_##name(const Heads<T>* of, const T* x, const int64_t* position,         \
                                  const float* cos, const float* sin, long B, T* normed, T* kv,    \
                                  T* q) {                                                          \
        heads_rows(*of, x, position, cos, sin, B, normed, kv, q);                                  \
    }                                                                                              \
    void nanocp_heads_queries_##name(const Heads<T>* of, const T* normed, const int64_t* position, \
                                     const float* cos, const float* sin, long B, T* q) {           \
        heads_queries(*of, normed, position, cos, sin, B, q);                                      \
    }                                                                                              \
    void nanocp_after_attention_##name(const Layer<T>* of, const T* x, const T* o, long B,         \
                                       T* summed, T* normed) {                                     \
        after_attention(*of, x, o, B, summed, normed);                                             \
    }                                                                                              \
    void nanocp_append_##name(T* slots, const int64_t* slot, const T* kv, long B, long D) {        \
        for (long b = 0; b < B; ++b) memcpy(slots + slot[b] * D, kv + b * D, D * sizeof(T));       \
    }                                                                                              \
    void nanocp_heads_linear_##name(const T* x, const T* w, long B, long H, long N, long K,        \
                                    T* out) {                                                      \
        heads_linear(x, w, B, H, N, K, out);                                                       \
    }                                                                                              \
    void nanocp_mlp_##name(const T* x, const T* gate_up, const T* down, long M, long X, long I,    \
                           T* out) {                                                               \
        mlp(x, X, gate_up, down, M, X, I, out);                                                    \
    }                                                                                              \
    void nanocp_visit_experts_##name(const T* x, const int64_t* expert, const float* weight,       \
                                     const int64_t* own, long num_own, long K, long num_regions,   \
                                     const Region<T>* arrived, const Region<T>* answers,           \
                                     const T* const* gate_up, const T* const* down,                \
                                     const int64_t* slot, long count, long X, long I, T* own_sum,  \
                                     int64_t* counts) {                                            \
        visit_experts(x, expert, weight, own, num_own, K, num_regions, arrived, answers, gate_up,  \
                      down, slot, count, X, I, own_sum, counts);                                   \
    }                                                                                              \
    void nanocp_gate_##name(const T* x, const float* w, const float* bias, long B, long X, long E, \
                            long G, long groups, long K, int is_softmax, int is_normalised,        \
                            float scale, int64_t* expert, float* weight) {                         \
        gate(x, w, bias, B, X, E, G, groups, K, is_softmax, is_normalised, scale, expert, weight); \
    }                                                                                              \
    void nanocp_pack_rows_##name(const T* x, const int64_t* expert, const float* weight,           \
                                 const bool* live, long B, long K, long X, const int64_t* seat,    \
                                 long N, const Region<T>* regions, int64_t* rows,                  \
                                 int64_t* counts) {                                                \
        pack_rows(x, expert, weight, live, B, K, X, seat, N, regions, rows, counts);               \
    }                                                                                              \
    void nanocp_combine_sums_##name(const T* x, const T* shared, const T* own_sum,                 \
                                    const Region<T>* regions, const int64_t* rows,                 \
                                    const int64_t* counts, long N, long B, long X, T* out) {       \
        combine_sums(x, shared, own_sum, regions, rows, counts, N, B, X, out);                     \
    }                                                                                              \
    void nanocp_attention_##name(const T* q, const T* pool, const int32_t* frames, long pages,     \
                                 const int32_t* lengths, long A, long H, long D, long R, long G,   \
                                 long width, long value_at, float scale, T* out, float* lse) {     \
        attention(q, pool, frames, pages, lengths, A, H, D, R, G, width, value_at, scale, out,     \
                  lse);                                                                            \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)
}
