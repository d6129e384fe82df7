// A layer's mixture of experts as tasks of an instance's processors: gate, dispatch, experts, the
// way back and the sum, with the shared expert beside them.
//
// Sums are added in a fixed order, so the result does not depend on which processor ran what, nor
// on what arrived first. A call never sleeps. When nothing can run it returns what it awaits, and
// the caller, who knows peers, terms and limits, waits and calls again. The slow reference is
// data_plane/moe/all_to_all_cpu.py.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <memory>

#include "processors.h"
#include "waves.h"

// A peer's regions and flags of one parity. A flag that is raised here is null if the caller puts.
template <class T>
struct Peer {
    Region<T> sent, arrived;
    T* answers;
    const T* returned;
    uint64_t *sent_flag, *answered_flag;
    const uint64_t *arrived_flag, *returned_flag;
};

// How a call ended.
enum Outcome : long {
    // Rows that the layer put are in awaited[0], sums in awaited[1].
    DONE,
    // The caller waits for one of the peers in `awaited`, which -1 ends.
    AWAITS_ROWS,
    AWAITS_SUMS,
    // The caller puts to the peers in `awaited`, with their counts.
    PUTS_ROWS,
    PUTS_SUMS,
    // The peer in awaited[0] says that it sent counts[0] rows, which is impossible.
    WRONG_COUNT,
};

static inline void raise_flag(uint64_t* flag, uint64_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    syscall(SYS_futex, flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

template <class T, class W>
class Mixture {
   public:
    Mixture(Processors* processors, long num_instances, long own, long max_rows)
        : processors(processors), N(num_instances), own(own), max_rows(max_rows),
          sources(num_instances) {
        for (long n = 0; n < N; ++n) {
            sources[n].mixture = this;
            sources[n].number = n;
        }
        shared.mixture = this;
        shared.reserve_experts(1);
    }

    // Run what is left of a layer that is given up, while its rows and regions are still there.
    void finish() {
        for (long idle = 0; tasks_left.load(std::memory_order_acquire);)
            idle = processors->run_one() ? 0 : Processors::relaxed(idle);
    }

    // Begin a layer, and go on as far as possible. x, normed [B, X]; out [B, X]. early_rows: see
    // take_rows; 0 if all rows are awaited.
    long run(const MixtureLayer<T, W>* layer, const T* x, const T* normed, const bool* live,
             long num_rows, const Peer<T>* peers, uint64_t epoch, long early_rows, T* out,
             long* awaited, long* counts) {
        of = *layer;
        this->x = x;
        this->normed = normed;
        this->peers = peers;
        this->out = out;
        this->early_rows = early_rows;
        B = num_rows;
        flag = epoch + 1;
        rows_sent = num_waves = 0;
        wrong = -1;
        num_summed.store(0, std::memory_order_relaxed);
        own_sum.resize(B * of.X);
        for (Source<T, W>& source : sources) {
            source.count = 0;
            source.state.store(
                is_absent(source.number) ? Source<T, W>::ANSWERED : Source<T, W>::AWAY,
                std::memory_order_relaxed);
        }
        if (of.shared_gate_up && B) begin_shared();
        choose_and_send(live);
        return must_put_rows(awaited, counts) ? PUTS_ROWS : resume(awaited, counts);
    }

    // Go on after the caller has waited or put. awaited [N + 1]; counts [N].
    long resume(long* awaited, long* counts) {
        for (long idle = 0;;) {
            if (num_summed.load(std::memory_order_acquire)) return must_put_sums(awaited, counts);
            const bool was_idle = !tasks_left.load(std::memory_order_acquire);
            take_rows();
            if (processors->run_one()) {
                idle = 0;
                continue;
            }
            if (tasks_left.load(std::memory_order_acquire)) {
                idle = Processors::relaxed(idle);
                continue;
            }
            if (!was_idle || num_summed.load(std::memory_order_acquire)) continue;
            const long ended = outcome(awaited, counts);
            if (ended >= 0) return ended;
        }
    }

   private:
    // Each processor finds so many tasks of a wave, if its weights can be cut into as many.
    static constexpr long TASKS_EACH = 4;
    // Rows whose sums are one task.
    static constexpr long SUMMED_ROWS = 8;

    void begin_shared() {
        ExpertRows<T, W>& rows = shared.experts[0];
        rows.wave = &shared;
        rows.gate_up = of.shared_gate_up;
        rows.down = of.shared_down;
        rows.first = 0;
        rows.M = B;
        rows.I = of.shared_I;
        shared.inner.resize(B * apart<T>(rows.I));
        shared_out.resize(B * of.X);
        publish_expert(rows, wanted_blocks(1));
    }

    // The experts of each row, and the rows into their instances' regions.
    void choose_and_send(const bool* live) {
        expert.resize(B * of.K);
        weight.resize(B * of.K);
        rows.resize(N * B);
        counts_of.resize(N);
        regions.resize(N);
        gate(normed, of.gate, of.gate_bias, B, of.X, of.E, of.G, of.groups, of.K, of.is_softmax,
             of.is_normalised, of.scale, expert.data(), weight.data());
        for (long n = 0; n < N; ++n) regions[n] = n == own ? Region<T>{} : peers[n].sent;
        pack_rows(normed, expert.data(), weight.data(), live, B, of.K, of.X, of.seat, N,
                  regions.data(), rows.data(), counts_of.data());
        for (long n = 0; n < N; ++n) {
            if (n == own || !peers[n].sent_flag) continue;
            raise_flag(peers[n].sent_flag, flag);
            rows_sent += counts_of[n];
        }
    }

    bool must_put_rows(long* awaited, long* counts) const {
        long found = 0;
        for (long n = 0; n < N; ++n)
            if (n != own && !peers[n].sent_flag && !is_absent(n)) {
                awaited[found] = n;
                counts[found++] = counts_of[n];
            }
        awaited[found] = -1;
        return found;
    }

    long must_put_sums(long* awaited, long* counts) {
        long found = 0;
        for (Source<T, W>& source : sources)
            if (source.state.load(std::memory_order_acquire) == Source<T, W>::SUMMED) {
                source.state.store(Source<T, W>::ANSWERED, std::memory_order_relaxed);
                awaited[found] = source.number;
                counts[found++] = source.count;
            }
        awaited[found] = -1;
        num_summed.fetch_sub(found, std::memory_order_relaxed);
        return PUTS_SUMS;
    }

    // An instance that is not in the term has no rows, and gets none.
    bool is_absent(long n) const { return n != own && !peers[n].arrived_flag; }

    // Equal, never at least: a newer flag is a fault, which the caller's wait names.
    bool is_here(long n) const {
        return n == own || __atomic_load_n(peers[n].arrived_flag, __ATOMIC_ACQUIRE) == flag;
    }

    // Take in the sources that are here as one wave: all of them together, or earlier, when nothing
    // else can run and each expert gets early_rows. Fewer take as long as reading the weights, which
    // a later wave reads again.
    void take_rows() {
        if (wrong >= 0 || (early_rows && processors->has_ready())) return;
        taken.clear();
        bool is_complete = true;
        for (Source<T, W>& source : sources) {
            if (source.state.load(std::memory_order_relaxed) != Source<T, W>::AWAY) continue;
            if (is_here(source.number))
                taken.push_back(&source);
            else
                is_complete = false;
        }
        if (taken.empty() || !(is_complete || early_rows)) return;
        for (Source<T, W>* source : taken) {
            const Region<T>& from = peers[source->number].arrived;
            const bool is_own = source->number == own;
            source->count = is_own ? counts_of[own] : *from.count;
            source->which = is_own ? rows.data() + own * B : nullptr;
            source->hidden = is_own ? normed : from.hidden;
            source->expert = is_own ? expert.data() : from.expert;
            source->weight = is_own ? weight.data() : from.weight;
            if (source->count < 0 || source->count > max_rows) wrong = source->number;
        }
        if (wrong < 0 && (is_complete || is_worth_a_wave())) begin_wave();
    }

    bool is_worth_a_wave() {
        is_visited.assign(of.num_slots, 0);
        long pairs = 0, visited = 0;
        for (const Source<T, W>* source : taken)
            for (long i = 0; i < source->count * of.K; ++i) {
                const long at = source->at(i / of.K) * of.K + i % of.K;
                const long slot = of.slot[source->expert[at]];
                if (slot < 0) continue;
                ++pairs;
                visited += !is_visited[slot];
                is_visited[slot] = 1;
            }
        return pairs >= early_rows * visited;
    }

    void begin_wave() {
        if (long(waves.size()) == num_waves) waves.emplace_back(new Wave<T, W>());
        Wave<T, W>& wave = *waves[num_waves++];
        wave.mixture = this;
        wave.fill(of, taken);
        for (Source<T, W>* source : taken)
            source->state.store(Source<T, W>::TAKEN, std::memory_order_relaxed);
        // Sources none of whose rows has an expert here wait for nobody.
        for (Source<T, W>* source : taken)
            if (!source->experts_left.load(std::memory_order_relaxed)) publish_sums(*source);
        order.resize(wave.num_experts);
        for (long i = 0; i < wave.num_experts; ++i) order[i] = &wave.experts[i];
        // The expert with most rows first: the last ones to run are short. One processor takes them
        // as they lie in memory, because what follows an expert's weights is fetched with them.
        if (processors->count() > 1)
            std::stable_sort(
                order.begin(), order.end(),
                [](const ExpertRows<T, W>* a, const ExpertRows<T, W>* b) { return a->M > b->M; });
        for (ExpertRows<T, W>* rows : order) publish_expert(*rows, wanted_blocks(wave.num_experts));
    }

    long wanted_blocks(long num_experts) const {
        const long P = processors->count();
        return P > 1 ? blocks(TASKS_EACH * P, num_experts) : 1;
    }

    void publish_expert(ExpertRows<T, W>& rows, long num_blocks) {
        // The columns of gate and of up are cut alike, where a block of both can begin there.
        rows.inner_blocks = rows.I % GROUP ? 1 : std::min(num_blocks, rows.I / GROUP);
        rows.out_blocks = std::min(num_blocks, blocks(of.X, GROUP));
        rows.inner_left.store(rows.inner_blocks, std::memory_order_relaxed);
        rows.outs_left.store(rows.out_blocks, std::memory_order_relaxed);
        publish(run_inner, &rows, rows.inner_blocks, false);
    }

    void publish(void (*run)(void*, long), void* on, long count, bool is_next) {
        tasks_left.fetch_add(count, std::memory_order_relaxed);
        processors->publish(run, on, count, is_next);
    }

    // The last thing of every task.
    void ended() { tasks_left.fetch_sub(1, std::memory_order_release); }

    // Where block `number` of `count` begins among columns that are cut between groups only.
    static long cut(long columns, long number, long count) {
        return std::min(blocks(columns, GROUP) * number / count * GROUP, columns);
    }

    // silu(gate) * up of an expert's rows, for a block of its inner columns.
    static void run_inner(void* on, long number) {
        ExpertRows<T, W>& rows = *static_cast<ExpertRows<T, W>*>(on);
        Wave<T, W>& wave = *rows.wave;
        Mixture& mixture = *wave.mixture;
        const long X = mixture.of.X, I = rows.I, M = rows.M;
        const T* from = mixture.normed;
        long stride = X;
        if (&wave != &mixture.shared) {
            stride = apart<T>(X);
            T* gathered = scratch<T, 25>(M * stride);
            for (long m = 0; m < M; ++m)
                memcpy(gathered + m * stride, wave.pair[rows.first + m].x, X * sizeof(T));
            from = gathered;
        }
        T* inner = wave.inner.data() + rows.first * apart<T>(I);
        if (rows.inner_blocks == 1) {
            float* wide = scratch<float, 26>(M * 2 * I);
            linear(from, stride, rows.gate_up, M, 2 * I, X, wide, 2 * I);
            gated(wide, M, I, inner, apart<T>(I));
        } else {
            const long begin = cut(I, number, rows.inner_blocks);
            const long width = cut(I, number + 1, rows.inner_blocks) - begin;
            float* wide = scratch<float, 26>(M * 2 * width);
            for (long half = 0; half < 2; ++half)
                linear(from, stride,
                       rows.gate_up + packed_elements(half * I + begin, X, rows.gate_up), M, width,
                       X, wide + half * width, 2 * width);
            gated(wide, M, width, inner + begin, apart<T>(I));
        }
        if (rows.inner_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
            mixture.publish(run_outs, &rows, rows.out_blocks, true);
        mixture.ended();
    }

    // An expert's outputs, for a block of their columns.
    static void run_outs(void* on, long number) {
        ExpertRows<T, W>& rows = *static_cast<ExpertRows<T, W>*>(on);
        Wave<T, W>& wave = *rows.wave;
        Mixture& mixture = *wave.mixture;
        const bool is_shared = &wave == &mixture.shared;
        const long X = mixture.of.X, I = rows.I;
        const long begin = cut(X, number, rows.out_blocks);
        const long width = cut(X, number + 1, rows.out_blocks) - begin;
        const T* inner = wave.inner.data() + rows.first * apart<T>(I);
        const W* down = rows.down + packed_elements(begin, I, rows.down);
        if (is_shared)
            linear(inner, apart<T>(I), down, rows.M, width, I, mixture.shared_out.data() + begin,
                   X);
        else
            linear(inner, apart<T>(I), down, rows.M, width, I,
                   wave.out.data() + rows.first * X + begin, X);
        if (rows.outs_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && !is_shared)
            wave.each_source(rows, [&](Source<T, W>& source) {
                if (source.experts_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
                    mixture.publish_sums(source);
            });
        mixture.ended();
    }

    // All pairs of the source are done.
    void publish_sums(Source<T, W>& source) {
        const long num_blocks = blocks(source.count, SUMMED_ROWS);
        source.blocks_left.store(num_blocks, std::memory_order_relaxed);
        if (num_blocks)
            publish(run_sums, &source, num_blocks, true);
        else
            source.state.store(Source<T, W>::ANSWERED, std::memory_order_release);
    }

    // The weighted sums of a block of a source's rows; with the last block, their way back.
    static void run_sums(void* on, long number) {
        Source<T, W>& source = *static_cast<Source<T, W>*>(on);
        Mixture& mixture = *source.mixture;
        const Wave<T, W>& wave = *source.wave;
        const long X = mixture.of.X;
        const bool is_own = source.number == mixture.own;
        const Peer<T>& peer = mixture.peers[source.number];
        T* sums = is_own ? mixture.own_sum.data() : peer.answers;
        float* wide = scratch<float, 27>(X);
        const long end = std::min((number + 1) * SUMMED_ROWS, source.count);
        for (long i = number * SUMMED_ROWS; i < end; ++i) {
            memset(wide, 0, X * sizeof(float));
            for (long at = source.first_pair[i]; at < source.first_pair[i + 1]; ++at) {
                const long pair = source.pairs[at];
                const Vector by = splat(wave.pair[pair].weight);
                for (long c = 0; c < X; c += LANES) {
                    const Mask mask = first_lanes(X - c);
                    const Vector out = load(wave.out.data() + pair * X + c, mask);
                    store(wide + c, multiply_add(by, out, load(wide + c, mask)), mask);
                }
            }
            for (long c = 0; c < X; c += LANES) {
                const Mask mask = first_lanes(X - c);
                store(sums + i * X + c, load(wide + c, mask), mask);
            }
        }
        if (source.blocks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            const bool is_put = is_own || peer.answered_flag;
            if (!is_own && is_put) raise_flag(peer.answered_flag, mixture.flag);
            source.state.store(is_put ? Source<T, W>::ANSWERED : Source<T, W>::SUMMED,
                               std::memory_order_release);
            if (!is_put) mixture.num_summed.fetch_add(1, std::memory_order_release);
        }
        mixture.ended();
    }

    // What the layer lacks, once nothing can run; -1 if something can.
    long outcome(long* awaited, long* counts) {
        if (wrong >= 0) {
            awaited[0] = wrong;
            counts[0] = sources[wrong].count;
            return WRONG_COUNT;
        }
        long found = 0;
        bool is_away = false;
        for (Source<T, W>& source : sources) {
            if (source.state.load(std::memory_order_relaxed) != Source<T, W>::AWAY) continue;
            is_away = true;
            if (!is_here(source.number)) awaited[found++] = source.number;
        }
        awaited[found] = -1;
        if (is_away) return found ? AWAITS_ROWS : -1;
        for (long n = 0; n < N; ++n)
            if (n != own && counts_of[n] &&
                __atomic_load_n(peers[n].returned_flag, __ATOMIC_ACQUIRE) != flag)
                awaited[found++] = n;
        awaited[found] = -1;
        if (found) return AWAITS_SUMS;
        awaited[0] = rows_sent;
        awaited[1] = 0;
        for (long n = 0; n < N; ++n) {
            if (n != own && peers[n].answered_flag) awaited[1] += sources[n].count;
            regions[n].hidden = n == own || !counts_of[n] ? nullptr : (T*)peers[n].returned;
        }
        combine_sums(x, of.shared_gate_up && B ? shared_out.data() : nullptr, own_sum.data(),
                     regions.data(), rows.data(), counts_of.data(), N, B, of.X, out);
        return DONE;
    }

    Processors* processors;
    const long N, own, max_rows;
    MixtureLayer<T, W> of;
    const T *x, *normed;
    const Peer<T>* peers;
    T* out;
    long B = 0, rows_sent = 0, num_waves = 0;
    long wrong = -1;  // the source whose count is impossible
    uint64_t flag = 0;
    long early_rows = 0;
    // Tasks that were published and have not ended; sources whose sums the caller must put.
    std::atomic<long> tasks_left{0}, num_summed{0};
    std::vector<Source<T, W>> sources;
    std::vector<Source<T, W>*> taken;
    std::vector<char> is_visited;  // by slot
    std::vector<std::unique_ptr<Wave<T, W>>> waves;
    Wave<T, W> shared;
    std::vector<ExpertRows<T, W>*> order;
    std::vector<T> shared_out, own_sum;
    std::vector<int64_t> expert, rows, counts_of;
    std::vector<float> weight;
    std::vector<Region<T>> regions;
};
