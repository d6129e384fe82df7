// All that a decode step computes on a CPU, without the exchange: with AVX2 and FMA, AVX-512 or AMX,
// as the compiler's flags say.
//
// Plain C calls without allocation; those that begin with Processors run on all of these.
// data_plane/native/*.py call them, and name the torch function that is the slow reference of each.
#include "attention.h"
#include "delta.h"
#include "heads.h"
#include "mixture.h"
#include "shared_out.h"

// q [B, H, N + P] -> [B, H, R + P]: W_UK absorbed, then the rotated part.
template <class T, class W>
static void absorb(Processors& on, const T* q, const W* k_up, const int64_t* position,
                   const float* cos, const float* sin, long B, long H, long N, long P, long R,
                   bool is_interleaved, T* out) {
    const long stride = packed_elements(R, N, k_up);
    on.for_each(H, [&](long h) {
        linear(q + h * (N + P), H * (N + P), k_up + h * stride, B, R, N, out + h * (R + P),
               H * (R + P));
    });
    for (long b = 0; b < B; ++b)
        for (long h = 0; h < H; ++h) {
            const long row = b * H + h, at = position[b] * (P / 2);
            rotate(q + row * (N + P) + N, out + row * (R + P) + R, P, cos + at, sin + at,
                   is_interleaved);
        }
}

// A layer's norms and packed weights, without its MLPs, and the model's widths. LayerFields of
// data_plane/native/calls.py has the same fields.
template <class T, class W>
struct Layer {
    const void *input_norm, *q_norm, *kv_norm, *post_norm;
    const W *down, *q, *k_up, *o;
    long X, C, R, P, H, N, V;
    float norm_eps, latent_eps;
    int is_interleaved, norms_are_fp32;
};

// x [B, X] -> the normed q latent [B, C], the new latent KV [B, R + P], and the absorbed queries
// [B, H, R + P]. Without q LoRA, C is 0 and the q latent is the normed x.
template <class T, class W>
static void attention_rows(Processors& on, const Layer<T, W>& of, const T* x,
                           const int64_t* position, const float* cos, const float* sin, long B,
                           T* latent, T* kv, T* q) {
    const long X = of.X, C = of.C, R = of.R, P = of.P, wide = of.H * (of.N + P);
    T* normed = C ? scratch<T, 21>(B * X) : latent;
    T* down = scratch<T, 22>(B * (C + R + P));
    T* plain = scratch<T, 23>(B * wide);
    for (long b = 0; b < B; ++b)
        rms_norm_row(x + b * X, of.input_norm, of.norms_are_fp32, normed + b * X, X, of.norm_eps);
    linear_on(on, normed, X, of.down, B, C + R + P, X, down, C + R + P);
    for (long b = 0; b < B; ++b) {
        const T* row = down + b * (C + R + P);
        if (C) rms_norm_row(row, of.q_norm, of.norms_are_fp32, latent + b * C, C, of.latent_eps);
        rms_norm_row(row + C, of.kv_norm, of.norms_are_fp32, kv + b * (R + P), R, of.latent_eps);
        const long at = position[b] * (P / 2);
        rotate(row + C + R, kv + b * (R + P) + R, P, cos + at, sin + at, of.is_interleaved);
    }
    const long size = C ? C : X;
    linear_on(on, latent, size, of.q, B, wide, size, plain, wide);
    absorb(on, plain, of.k_up, position, cos, sin, B, of.H, of.N, P, R, of.is_interleaved, q);
}

// latent [B, C] (without q LoRA the normed x) -> the absorbed queries [B, H, R + P].
template <class T, class W>
static void absorbed_q(Processors& on, const Layer<T, W>& of, const T* latent,
                       const int64_t* position, const float* cos, const float* sin, long B, T* q) {
    const long wide = of.H * (of.N + of.P), size = of.C ? of.C : of.X;
    T* plain = scratch<T, 23>(B * wide);
    linear_on(on, latent, size, of.q, B, wide, size, plain, wide);
    absorb(on, plain, of.k_up, position, cos, sin, B, of.H, of.N, of.P, of.R, of.is_interleaved, q);
}

// summed [B, X]: x [B, X] plus the output projection of o [B, H, V]. normed [B, X]: summed, normed for
// the MLP.
template <class T, class W>
static void after_attention(Processors& on, const Layer<T, W>& of, const T* x, const T* o, long B,
                            T* summed, T* normed) {
    const long X = of.X, width = of.H * of.V;
    linear_on(on, o, width, of.o, B, X, width, summed, X);
    for (long b = 0; b < B; ++b) {
        T* row = summed + b * X;
        for (long i = 0; i < X; i += LANES) {
            const Mask mask = first_lanes(X - i);
            store(row + i, load(x + b * X + i, mask) + load(row + i, mask), mask);
        }
        rms_norm_row(row, of.post_norm, of.norms_are_fp32, normed + b * X, X, of.norm_eps);
    }
}

// [B, H, K] -> [B, H, N], each head with its own packed weight.
template <class T, class W>
static void heads_linear(Processors& on, const T* x, const W* w, long B, long H, long N, long K,
                         T* out) {
    const long stride = packed_elements(N, K, w);
    on.for_each(H, [&](long h) {
        linear(x + h * K, H * K, w + h * stride, B, N, K, out + h * N, H * N);
    });
}

// x [M, K], normed, times the packed vocabulary head [N, K]: [M, N] fp32.
template <class T, class W>
static void logits(Processors& on, const T* x, const void* norm, bool norms_are_fp32, float eps,
                   const W* w, long M, long N, long K, float* out) {
    T* normed = scratch<T, 21>(M * K);
    for (long m = 0; m < M; ++m)
        rms_norm_row(x + m * K, norm, norms_are_fp32, normed + m * K, K, eps);
    linear_on(on, normed, K, w, M, N, K, out, N);
}

extern "C" {

Processors* nanocp_start_processors(long count) { return new Processors(count); }

void nanocp_end_processors(Processors* processors) { delete processors; }

// Whether this process may use AMX; Linux grants it on request.
int nanocp_allow_amx() {
    const int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#define EXPORT(name, T, W)                                                                         \
    long nanocp_packed_elements_##name(long N, long K) {                                           \
        return packed_elements(N, K, (const W*)nullptr);                                           \
    }                                                                                              \
    void nanocp_pack_##name(const W* weight, long N, long K, W* packed) {                          \
        pack(weight, N, K, packed);                                                                \
    }                                                                                              \
    void nanocp_linear_##name(Processors* on, const T* x, long x_stride, const W* w, long M,       \
                              long N, long K, T* out) {                                            \
        linear_on(*on, x, x_stride, w, M, N, K, out, N);                                           \
    }                                                                                              \
    void nanocp_logits_##name(Processors* on, const T* x, const void* norm, int norms_are_fp32,    \
                              float eps, const W* w, long M, long N, long K, float* out) {         \
        logits(*on, x, norm, norms_are_fp32, eps, w, M, N, K, out);                                \
    }                                                                                              \
    void nanocp_attention_rows_##name(Processors* on, const Layer<T, W>* of, const T* x,           \
                                      const int64_t* position, const float* cos, const float* sin, \
                                      long B, T* latent, T* kv, T* q) {                            \
        attention_rows(*on, *of, x, position, cos, sin, B, latent, kv, q);                         \
    }                                                                                              \
    void nanocp_absorbed_q_##name(Processors* on, const Layer<T, W>* of, const T* latent,          \
                                  const int64_t* position, const float* cos, const float* sin,     \
                                  long B, T* q) {                                                  \
        absorbed_q(*on, *of, latent, position, cos, sin, B, q);                                    \
    }                                                                                              \
    void nanocp_heads_rows_##name(Processors* on, const Heads<T, W>* of, const T* x,               \
                                  const int64_t* position, const float* cos, const float* sin,     \
                                  long B, T* normed, T* kv, T* q) {                                \
        heads_rows(*on, *of, x, position, cos, sin, B, normed, kv, q);                             \
    }                                                                                              \
    void nanocp_heads_queries_##name(Processors* on, const Heads<T, W>* of, const T* normed,       \
                                     const int64_t* position, const float* cos, const float* sin,  \
                                     long B, T* q) {                                               \
        heads_queries(*on, *of, normed, position, cos, sin, B, q);                                 \
    }                                                                                              \
    void nanocp_after_attention_##name(Processors* on, const Layer<T, W>* of, const T* x,          \
                                       const T* o, long B, T* summed, T* normed) {                 \
        after_attention(*on, *of, x, o, B, summed, normed);                                        \
    }                                                                                              \
    void nanocp_append_##name(T* slots, const int64_t* slot, const T* kv, long B, long D) {        \
        for (long b = 0; b < B; ++b) memcpy(slots + slot[b] * D, kv + b * D, D * sizeof(T));       \
    }                                                                                              \
    void nanocp_heads_linear_##name(Processors* on, const T* x, const W* w, long B, long H,        \
                                    long N, long K, T* out) {                                      \
        heads_linear(*on, x, w, B, H, N, K, out);                                                  \
    }                                                                                              \
    void nanocp_mlp_##name(Processors* on, const T* x, const W* gate_up, const W* down, long M,    \
                           long X, long I, float limit, T* out) {                                  \
        mlp_on(*on, x, gate_up, down, M, X, I, limit, out);                                        \
    }                                                                                              \
    void nanocp_visit_experts_##name(const T* x, const int64_t* number, const float* weight,       \
                                     const int64_t* own, long num_own, long K, long num_regions,   \
                                     const Region<T>* arrived, const Region<T>* answers,           \
                                     const W* const* gate_up, const W* const* down, long first,    \
                                     long count, long X, long I, float limit, int64_t* loads,      \
                                     T* own_sum, int64_t* counts) {                                \
        visit_experts(x, number, weight, own, num_own, K, num_regions, arrived, answers, gate_up,  \
                      down, first, count, X, I, limit, loads, own_sum, counts);                    \
    }                                                                                              \
    void nanocp_gate_##name(const T* x, const float* w, const float* bias, long B, long X, long E, \
                            long G, long groups, long K, int is_softmax, int is_normalised,        \
                            float scale, int64_t* expert, float* weight) {                         \
        gate(x, w, bias, B, X, E, G, groups, K, is_softmax, is_normalised, scale, expert, weight); \
    }                                                                                              \
    void nanocp_name_slots_##name(int64_t* expert, const bool* live, const int32_t* table, long B, \
                                  long K, long seat) {                                             \
        name_slots(expert, live, table, B, K, seat);                                               \
    }                                                                                              \
    void nanocp_pack_rows_##name(const T* x, const int64_t* number, const float* weight, long B,   \
                                 long K, long X, long slots, long N, const Region<T>* regions,     \
                                 int64_t* rows, int64_t* counts) {                                 \
        pack_rows(x, number, weight, B, K, X, slots, N, regions, rows, counts);                    \
    }                                                                                              \
    void nanocp_combine_sums_##name(const T* x, const T* shared, const T* own_sum,                 \
                                    const Region<T>* regions, const int64_t* rows,                 \
                                    const int64_t* counts, long N, long B, long X, T* out) {       \
        combine_sums(x, shared, own_sum, regions, rows, counts, N, B, X, out);                     \
    }                                                                                              \
    Mixture<T, W>* nanocp_new_mixture_##name(Processors* processors, long N, long own,             \
                                             long max_rows) {                                      \
        return new Mixture<T, W>(processors, N, own, max_rows);                                    \
    }                                                                                              \
    void nanocp_delete_mixture_##name(Mixture<T, W>* mixture) { delete mixture; }                  \
    long nanocp_run_mixture_##name(Mixture<T, W>* mixture, const MixtureLayer<T, W>* layer,        \
                                   const T* x, const T* normed, const bool* live, long B,          \
                                   const Peer<T>* peers, uint64_t epoch, long schedule, T* out,    \
                                   long* awaited, long* counts) {                                  \
        return mixture->run(layer, x, normed, live, B, peers, epoch, Schedule(schedule), out,      \
                            awaited, counts);                                                      \
    }                                                                                              \
    long nanocp_resume_mixture_##name(Mixture<T, W>* mixture, long* awaited, long* counts) {       \
        return mixture->resume(awaited, counts);                                                   \
    }                                                                                              \
    void nanocp_finish_mixture_##name(Mixture<T, W>* mixture) { mixture->finish(); }               \
    void nanocp_attention_##name(Processors* on, const T* q, const T* pool, const int32_t* frames, \
                                 long pages, const int32_t* lengths, long A, long H, long D,       \
                                 long R, long G, long width, long value_at, float scale, T* out,   \
                                 float* lse) {                                                     \
        attention_on(*on, q, pool, frames, pages, lengths, A, H, D, R, G, width, value_at, scale,  \
                     out, lse);                                                                    \
    }                                                                                              \
    long nanocp_delta_##name(Processors* on, const Delta<T>* of, char* states, long frame_bytes,   \
                             const int64_t* frame, const int64_t* position, const bool* live,      \
                             long B, const T* channels, const T* beta, long stride, const T* gate, \
                             long gate_stride, const T* decay, long decay_stride, T* out) {        \
        return delta(*on, *of, states, frame_bytes, frame, position, live, B, channels, beta,      \
                     stride, gate, gate_stride, decay, decay_stride, out);                         \
    }

EXPORT(f32, float, float)
EXPORT(bf16, bf16, bf16)
#ifndef __AMX_TILE__
// fp32 rows on weights of bf16. AMX has another layout of these, and no products of fp32.
EXPORT(f32_bf16, float, bf16)
#endif
}
