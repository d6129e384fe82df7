// Rows that have come from instances, by the expert that they visit. Each pair of a row and an
// expert has a place of its own, so that tasks write nothing in common.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
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
    // By expert: its replicas, and their numbers (rows.h).
    const int32_t* table;
    // By slot: the pairs of a row and an expert so far, which a layer adds to.
    int64_t* loads;
    // num_slots: of every instance. first: the number of the first one here.
    long X, E, G, groups, K, num_slots, first, I, shared_I;
    float scale;
    int is_softmax, is_normalised;
    // Of the experts' activations and of the shared expert's (experts.h).
    float limit = INFINITY, shared_limit = INFINITY;
};

template <class T, class W>
class Mixture;
template <class T, class W>
struct ExpertRows;

// The rows of one instance that visit the experts here.
template <class T, class W>
struct Source {
    // away: not taken yet. summed: the caller must put its sums. answered: done.
    enum State { AWAY, TAKEN, SUMMED, ANSWERED };

    // The product of a row and an expert: row `at` of these outputs.
    struct Pair {
        const ExpertRows<T, W>* rows;
        long at;
        float weight;
    };

    Mixture<T, W>* mixture = nullptr;
    long number = 0, count = 0;
    // Row i is at which[i], or at i without `which`.
    const int64_t* which;
    Region<T> from;

    std::atomic<State> state{AWAY};
    // ExpertRows that have not run, of those with its rows; blocks of rows that have no sums.
    std::atomic<long> experts_left{0}, blocks_left{0};
    // The pairs of row i are first_pair[i] to first_pair[i + 1] - 1, by ascending slot.
    std::vector<long> first_pair;
    std::vector<Pair> pairs;

    long at(long row) const { return which ? which[row] : row; }

    // The weighted sum of a row's outputs. wide: memory for it, [X].
    void sum(long row, long X, float* wide, T* to) const {
        memset(wide, 0, X * sizeof(float));
        for (long p = first_pair[row]; p < first_pair[row + 1]; ++p) {
            const float* outs = pairs[p].rows->out.data() + pairs[p].at * X;
            const Vector by = splat(pairs[p].weight);
            for (long c = 0; c < X; c += LANES) {
                const Mask mask = first_lanes(X - c);
                store(wide + c, multiply_add(by, load(outs + c, mask), load(wide + c, mask)), mask);
            }
        }
        for (long c = 0; c < X; c += LANES) {
            const Mask mask = first_lanes(X - c);
            store(to + c, load(wide + c, mask), mask);
        }
    }
};

// Rows are this far apart, so that they share no sets of the cache (linear.h).
template <class T>
static inline long apart(long width) {
    return width + 64 / long(sizeof(T));
}

// Rows of one expert that run together. Memory is kept for the next layer.
template <class T, class W>
struct ExpertRows {
    struct Row {
        const T* x;
        Source<T, W>* source;
    };

    Mixture<T, W>* mixture = nullptr;
    const W *gate_up, *down;
    long slot = 0, M = 0, I = 0;
    float limit = INFINITY;
    long begun = 0;  // 1 if other rows of this expert began first in the layer, 2 if second; or 0
    bool has_peers = false;  // rows of other instances
    std::vector<Row> rows;   // those of a source follow each other
    std::vector<T> inner;    // [M, I], apart(I) from row to row
    std::vector<float> out;  // [M, X]
    // How many tasks make its inner columns, and its outputs; how many of each have not ended.
    long rank = 0, inner_blocks = 0, out_blocks = 0;
    std::atomic<long> inner_left{0}, outs_left{0};

    // Call `use` once for each source that has rows here.
    template <class Use>
    void each_source(const Use& use) {
        Source<T, W>* last = nullptr;
        for (const Row& row : rows)
            if (row.source != last) use(*(last = row.source));
    }
};

// The rows that are here, until their experts begin.
template <class T, class W>
class Arrivals {
   public:
    // Forget the last layer.
    void clear(long num_slots) {
        waiting.assign(num_slots, nullptr);
        begun.assign(num_slots, 0);
        num_used = num_begun = 0;
    }

    void add(const MixtureLayer<T, W>& of, Source<T, W>& source, bool is_peer) {
        long num_experts = 0;
        source.first_pair.assign(1, 0);
        source.pairs.clear();
        for (long i = 0; i < source.count; ++i) {
            const long at = source.at(i);
            const int64_t* number = source.from.number.at(at);
            for (long k = 0; k < of.K; ++k)
                if (const long slot = number[k] - of.first; slot >= 0 && slot < of.num_slots)
                    source.pairs.push_back({rows_of(of, slot), 0, source.from.weight.at(at)[k]});
            std::sort(source.pairs.begin() + source.first_pair.back(), source.pairs.end(),
                      [](const auto& a, const auto& b) { return a.rows->slot < b.rows->slot; });
            for (long p = source.first_pair.back(); p < long(source.pairs.size()); ++p) {
                ExpertRows<T, W>& rows = *waiting[source.pairs[p].rows->slot];
                num_experts += rows.rows.empty() || rows.rows.back().source != &source;
                source.pairs[p].at = long(rows.rows.size());
                rows.rows.push_back({source.from.hidden.at(at), &source});
                ++of.loads[rows.slot];
                rows.has_peers |= is_peer;
            }
            source.first_pair.push_back(long(source.pairs.size()));
        }
        source.experts_left.store(num_experts, std::memory_order_relaxed);
    }

    // The expert with most rows, if there is one; rows that come later wait apart from them.
    ExpertRows<T, W>* take_fullest() {
        ExpertRows<T, W>* fullest = nullptr;
        for (ExpertRows<T, W>* rows : waiting)
            if (rows && (!fullest || rows->rows.size() > fullest->rows.size())) fullest = rows;
        if (!fullest) return nullptr;
        waiting[fullest->slot] = nullptr;
        begun[fullest->slot] = ++num_begun;
        return fullest;
    }

    // All experts that rows wait for, as they run best. First those that began with other rows, the
    // last one first: their weights are in the cache, until others' take their place. Then, if
    // by_rows, the one with most rows, so that the last ones to run are short; or by ascending slot.
    void take_all(std::vector<ExpertRows<T, W>*>& taken, bool by_rows) {
        taken.clear();
        for (ExpertRows<T, W>*& rows : waiting)
            if (rows) taken.push_back(std::exchange(rows, nullptr));
        std::stable_sort(taken.begin(), taken.end(), [by_rows](const auto* a, const auto* b) {
            if (a->begun != b->begun) return a->begun > b->begun;
            return by_rows && a->rows.size() > b->rows.size();
        });
    }

   private:
    ExpertRows<T, W>* rows_of(const MixtureLayer<T, W>& of, long slot) {
        if (waiting[slot]) return waiting[slot];
        if (num_used == used.size()) used.emplace_back(new ExpertRows<T, W>());
        ExpertRows<T, W>& rows = *used[num_used++];
        rows.gate_up = of.gate_up[slot];
        rows.down = of.down[slot];
        rows.slot = slot;
        rows.begun = begun[slot];
        rows.I = of.I;
        rows.limit = of.limit;
        rows.has_peers = false;
        rows.rows.clear();
        return waiting[slot] = &rows;
    }

    std::vector<ExpertRows<T, W>*> waiting;  // by slot
    std::vector<long> begun;                 // by slot: ExpertRows::begun of rows that come now
    long num_begun = 0;
    std::vector<std::unique_ptr<ExpertRows<T, W>>> used;
    size_t num_used = 0;
};
