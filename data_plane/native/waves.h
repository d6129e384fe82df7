// Rows of several instances that visit the experts here together: a wave. Each pair of a row and an
// expert has a place of its own, so that tasks of a wave write nothing in common.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "experts.h"

// What the mixture of a layer reads. MixtureFields of data_plane/native/calls.py has the same fields.
template <class T, class W>
struct MixtureLayer {
    const float *gate, *gate_bias;
    // By slot.
    const W *const *gate_up, *const *down;
    // Null without a shared expert.
    const W *shared_gate_up, *shared_down;
    // By expert: the instance that has it, and its slot here, or -1.
    const int64_t *seat, *slot;
    long X, E, G, groups, K, num_slots, I, shared_I;
    float scale;
    int is_softmax, is_normalised;
};

template <class T, class W>
class Mixture;
template <class T, class W>
struct Wave;

// The rows of one instance that visit the experts here.
template <class T, class W>
struct Source {
    // away: not here yet. taken: in a wave. summed: the caller must put its sums. answered: done.
    enum State { AWAY, TAKEN, SUMMED, ANSWERED };

    Mixture<T, W>* mixture = nullptr;
    long number = 0, count = 0;
    // Row i is at which[i], or at i without `which`.
    const int64_t *which, *expert;
    const float* weight;
    const T* hidden;

    std::atomic<State> state{AWAY};
    // Experts that have not run all of its rows; blocks of rows that have no sums.
    std::atomic<long> experts_left{0}, blocks_left{0};
    Wave<T, W>* wave = nullptr;
    // The pairs of row i are first_pair[i] to first_pair[i + 1] - 1 of `pairs`, by ascending slot.
    std::vector<long> first_pair, pairs;

    long at(long row) const { return which ? which[row] : row; }
};

// One expert's rows of a wave: the pairs from `first` on.
template <class T, class W>
struct ExpertRows {
    Wave<T, W>* wave = nullptr;
    const W *gate_up, *down;
    long first, M, I;
    // How many tasks make its inner columns, and its outputs; how many of each have not ended.
    long inner_blocks, out_blocks;
    std::atomic<long> inner_left{0}, outs_left{0};
};

// Rows are this far apart, so that they share no sets of the cache (linear.h).
template <class T>
static inline long apart(long width) {
    return width + 64 / long(sizeof(T));
}

// Memory is kept for the next layer, and grows to what the largest wave took.
template <class T, class W>
struct Wave {
    struct Pair {
        const T* x;
        float weight;
        Source<T, W>* source;
        long row;
    };

    Mixture<T, W>* mixture = nullptr;
    std::vector<Pair> pair;  // experts ascend, then sources, rows and choices
    std::vector<T> inner;    // [pairs, I], apart(I) from row to row
    std::vector<float> out;  // [pairs, X]
    std::vector<ExpertRows<T, W>> experts;
    long num_experts = 0;  // the first ones of `experts`

    void reserve_experts(long most) {
        if (long(experts.size()) < most) experts = std::vector<ExpertRows<T, W>>(most);
    }

    // Take the rows of these sources.
    void fill(const MixtureLayer<T, W>& of, const std::vector<Source<T, W>*>& sources) {
        place.assign(of.num_slots + 1, 0);
        each_pair(of, sources, [&](long slot, const Pair&) { ++place[slot + 1]; });
        for (long e = 0; e < of.num_slots; ++e) place[e + 1] += place[e];
        reserve_experts(of.num_slots);
        num_experts = 0;
        for (long e = 0; e < of.num_slots; ++e) {
            if (place[e + 1] == place[e]) continue;
            ExpertRows<T, W>& rows = experts[num_experts++];
            rows.wave = this;
            rows.gate_up = of.gate_up[e];
            rows.down = of.down[e];
            rows.first = place[e];
            rows.M = place[e + 1] - place[e];
            rows.I = of.I;
        }
        pair.resize(place[of.num_slots]);
        inner.resize(pair.size() * apart<T>(of.I));
        out.resize(pair.size() * of.X);
        each_pair(of, sources, [&](long slot, const Pair& made) { pair[place[slot]++] = made; });
        index(sources);
        for (long e = 0; e < num_experts; ++e)
            each_source(experts[e], [&](Source<T, W>& source) {
                source.experts_left.fetch_add(1, std::memory_order_relaxed);
            });
    }

    // Call `use` once for each source that has rows of this expert.
    template <class Use>
    void each_source(const ExpertRows<T, W>& rows, const Use& use) {
        Source<T, W>* last = nullptr;
        for (long m = 0; m < rows.M; ++m) {
            Source<T, W>* source = pair[rows.first + m].source;
            if (source != last) use(*(last = source));
        }
    }

   private:
    template <class Use>
    static void each_pair(const MixtureLayer<T, W>& of, const std::vector<Source<T, W>*>& sources,
                          const Use& use) {
        for (Source<T, W>* source : sources)
            for (long i = 0; i < source->count; ++i) {
                const long at = source->at(i);
                for (long k = 0; k < of.K; ++k) {
                    const long slot = of.slot[source->expert[at * of.K + k]];
                    if (slot >= 0)
                        use(slot, {source->hidden + at * of.X, source->weight[at * of.K + k],
                                   source, i});
                }
            }
    }

    // The pairs of each row. Until all are there, first_pair[i + 1] is where the next one of row i
    // goes; at last it is where row i + 1 begins.
    void index(const std::vector<Source<T, W>*>& sources) {
        for (Source<T, W>* source : sources) {
            source->wave = this;
            source->experts_left.store(0, std::memory_order_relaxed);
            source->first_pair.assign(source->count + 2, 0);
        }
        for (const Pair& each : pair) ++each.source->first_pair[each.row + 2];
        for (Source<T, W>* source : sources) {
            for (long i = 0; i < source->count; ++i)
                source->first_pair[i + 2] += source->first_pair[i + 1];
            source->pairs.resize(source->first_pair[source->count + 1]);
        }
        for (long at = 0; at < long(pair.size()); ++at) {
            Source<T, W>& source = *pair[at].source;
            source.pairs[source.first_pair[pair[at].row + 1]++] = at;
        }
    }

    std::vector<long> place;
};
