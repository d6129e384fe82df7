// A layer's mixture of experts as tasks of an instance's processors: gate, dispatch, experts, the
// way back and the sum, with the shared expert beside them.
//
// Sums are added in a fixed order, so the result does not depend on which processor ran what, nor
// on what arrived first. A call never sleeps. When nothing can run it returns what it awaits, and
// the caller, who knows peers, terms and limits, waits and calls again. The slow reference is
// data_plane/moe/all_to_all_cpu.py.
#pragma once

#include <cmath>

#include "arrivals.h"
#include "forecast.h"
#include "peers.h"
#include "processors.h"

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
    }

    // Run what is left of a layer that is given up, while its rows and regions are still there.
    void finish() {
        for (long idle = 0; tasks_left.load(std::memory_order_acquire);)
            idle = processors->run_one() ? 0 : Processors::relaxed(idle);
    }

    // Begin a layer, and go on as far as possible. x, normed [B, X]; out [B, X].
    long run(const MixtureLayer<T, W>* layer, const T* x, const T* normed, const bool* live,
             long num_rows, const Peer<T>* peers, uint64_t epoch, Schedule schedule, T* out,
             long* awaited, long* counts) {
        of = *layer;
        this->x = x;
        this->normed = normed;
        this->peers = peers;
        this->out = out;
        this->schedule = schedule;
        B = num_rows;
        flag = epoch + 1;
        rows_sent = shared_left = 0;
        wrong = -1;
        has_all_rows = false;
        arrivals.clear(of.num_slots);
        forecast.layer_begins();
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
            look_ahead();
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
            if (ended == AWAITS_ROWS && schedule == ARRIVAL && forecast.is_due())
                idle = Processors::relaxed(idle);  // waking from a sleep takes longer
            else if (ended >= 0)
                return ended;
        }
    }

   private:
    // Each processor finds so many tasks, if the weights can be cut into as many.
    static constexpr long TASKS_EACH = 4;
    // Rows whose sums are one task.
    static constexpr long SUMMED_ROWS = 8;
    // A piece of the shared expert for each so many rows of the batch.
    static constexpr long SHARED_ROWS = 12;
    // What runs first. Others wait for sums, then for experts that their rows visit. Own rows and
    // the shared expert fill the time until this instance's sums are back.
    enum Rank : long { SUMS, PEERS, OWN, SHARED };

    void begin_shared() {
        shared.gate_up = of.shared_gate_up;
        shared.down = of.shared_down;
        shared.M = B;
        shared.I = of.shared_I;
        shared.limit = of.shared_limit;
        shared_out.resize(B * of.X);
        if (schedule == BARRIER) return publish_expert(shared, PEERS, wanted_blocks(1));
        // In pieces that take as long as an expert, because peers' rows may have to await one.
        prepare(shared, SHARED, std::max(wanted_blocks(1), blocks(B, SHARED_ROWS)));
        // What fits into the wait for sums is held back: experts can begin instead.
        const double now = schedule == ARRIVAL ? forecast.exceeding(double(B * shared.I)) : 1;
        shared_left = shared.inner_blocks;
        publish_shared(long(std::ceil(now * double(shared_left))));
    }

    void publish_shared(long count) {
        const long first = shared.inner_blocks - shared_left;
        shared_left -= count;
        publish(run_inner, &shared, count, SHARED, false, first);
    }

    // The experts of each row, and the rows into their instances' regions.
    void choose_and_send(const bool* live) {
        number.resize(B * of.K);
        weight.resize(B * of.K);
        rows.resize(N * B);
        counts_of.resize(N);
        regions.resize(N);
        gate(normed, of.gate, of.gate_bias, B, of.X, of.E, of.G, of.groups, of.K, of.is_softmax,
             of.is_normalised, of.scale, number.data(), weight.data());
        for (long n = 0; n < N; ++n) regions[n] = n == own ? Region<T>{} : peers[n].sent;
        name_slots(number.data(), live, of.table, B, of.K, own);
        pack_rows(normed, number.data(), weight.data(), B, of.K, of.X, of.num_slots, N,
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

    // Take in the rows that are here. Once all are, their experts run. Before that, a processor
    // without a task begins the expert that most rows wait for, if there is time: rows that come
    // later read its weights again, and would otherwise await its end.
    void take_rows() {
        if (has_all_rows || wrong >= 0) return;
        taken.clear();
        bool is_complete = true;
        for (Source<T, W>& source : sources) {
            if (source.state.load(std::memory_order_relaxed) != Source<T, W>::AWAY) continue;
            if (is_here(source.number))
                taken.push_back(&source);
            else
                is_complete = false;
        }
        if (is_complete || schedule == ARRIVAL)
            for (Source<T, W>* source : taken) take(*source);
        if (wrong >= 0) return;
        if ((has_all_rows = is_complete)) {
            forecast.rows_arrived();
            return begin_experts();
        }
        forecast.rows_awaited();
        if (schedule != ARRIVAL || processors->has_ready()) return;
        if (ExpertRows<T, W>* rows = has_time() ? arrivals.take_fullest() : nullptr)
            publish_expert(*rows, rows->has_peers ? PEERS : OWN, wanted_blocks(1));
        else
            publish_shared(shared_left);
    }

    // Whether an expert can end before rows come. Who else wants this core may be who sends them.
    bool has_time() const {
        if (!forecast.has_time()) return false;
        sched_yield();
        for (const Source<T, W>& source : sources)
            if (source.state.load(std::memory_order_relaxed) == Source<T, W>::AWAY &&
                is_here(source.number))
                return false;
        return forecast.has_time();
    }

    // Note when experts have ended and sums are back.
    void look_ahead() {
        if (!has_all_rows) return;
        for (const Source<T, W>& source : sources)
            if (source.state.load(std::memory_order_relaxed) != Source<T, W>::ANSWERED) return;
        long num_rows = 0;
        for (const ExpertRows<T, W>* rows : order) num_rows += rows->M;
        forecast.experts_ended(long(order.size()), double(num_rows * of.I));
        if (!await_sums(nullptr)) forecast.sums_arrived();
    }

    void take(Source<T, W>& source) {
        const bool is_own = source.number == own;
        source.from = is_own ? Region<T>{nullptr, {number.data(), of.K}, {weight.data(), of.K},
                                         {const_cast<T*>(normed), of.X}}
                             : peers[source.number].arrived;
        source.count = is_own ? counts_of[own] : *source.from.count;
        source.which = is_own ? rows.data() + own * B : nullptr;
        if (source.count < 0 || source.count > max_rows) {
            wrong = source.number;
            return;
        }
        source.state.store(Source<T, W>::TAKEN, std::memory_order_relaxed);
        arrivals.add(of, source, !is_own);
        // A source none of whose rows has an expert here waits for nobody.
        if (!source.experts_left.load(std::memory_order_relaxed)) publish_sums(source);
    }

    void begin_experts() {
        // One processor takes them as they lie in memory, because what follows an expert's weights
        // is fetched with them.
        arrivals.take_all(order, processors->count() > 1);
        for (ExpertRows<T, W>* rows : order)
            publish_expert(*rows, rows->has_peers || schedule == BARRIER ? PEERS : OWN,
                           wanted_blocks(long(order.size())));
        publish_shared(shared_left);
    }

    long wanted_blocks(long num_experts) const {
        const long P = processors->count();
        return P > 1 ? blocks(TASKS_EACH * P, num_experts) : 1;
    }

    void publish_expert(ExpertRows<T, W>& rows, Rank rank, long num_blocks) {
        prepare(rows, rank, num_blocks);
        publish(run_inner, &rows, rows.inner_blocks, rank, false);
    }

    void prepare(ExpertRows<T, W>& rows, Rank rank, long num_blocks) {
        rows.mixture = this;
        rows.rank = rank;
        if (&rows != &shared) rows.M = long(rows.rows.size());
        rows.inner.resize(rows.M * apart<T>(rows.I));
        rows.out.resize(&rows == &shared ? 0 : rows.M * of.X);
        // The columns of gate and of up are cut alike, where a block of both can begin there.
        rows.inner_blocks = rows.I % GROUP ? 1 : std::min(num_blocks, rows.I / GROUP);
        rows.out_blocks = std::min(num_blocks, blocks(of.X, GROUP));
        rows.inner_left.store(rows.inner_blocks, std::memory_order_relaxed);
        rows.outs_left.store(rows.out_blocks, std::memory_order_relaxed);
    }

    void publish(void (*run)(void*, long), void* on, long count, long rank, bool is_next = true,
                 long first = 0) {
        if (!count) return;
        tasks_left.fetch_add(count, std::memory_order_relaxed);
        processors->publish(run, on, first, count, rank, is_next);
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
        Mixture& mixture = *rows.mixture;
        const long X = mixture.of.X, I = rows.I, M = rows.M;
        const T* from = mixture.normed;
        long stride = X;
        if (&rows != &mixture.shared) {
            stride = apart<T>(X);
            T* gathered = scratch<T, 25>(M * stride);
            for (long m = 0; m < M; ++m)
                memcpy(gathered + m * stride, rows.rows[m].x, X * sizeof(T));
            from = gathered;
        }
        T* inner = rows.inner.data();
        if (rows.inner_blocks == 1) {
            float* wide = scratch<float, 26>(M * 2 * I);
            linear(from, stride, rows.gate_up, M, 2 * I, X, wide, 2 * I);
            gated(wide, M, I, inner, apart<T>(I), rows.limit);
        } else {
            const long begin = cut(I, number, rows.inner_blocks);
            const long width = cut(I, number + 1, rows.inner_blocks) - begin;
            float* wide = scratch<float, 26>(M * 2 * width);
            for (long half = 0; half < 2; ++half)
                linear(from, stride,
                       rows.gate_up + packed_elements(half * I + begin, X, rows.gate_up), M, width,
                       X, wide + half * width, 2 * width);
            gated(wide, M, width, inner + begin, apart<T>(I), rows.limit);
        }
        if (rows.inner_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
            mixture.publish(run_outs, &rows, rows.out_blocks, rows.rank);
        mixture.ended();
    }

    // An expert's outputs, for a block of their columns.
    static void run_outs(void* on, long number) {
        ExpertRows<T, W>& rows = *static_cast<ExpertRows<T, W>*>(on);
        Mixture& mixture = *rows.mixture;
        const bool is_shared = &rows == &mixture.shared;
        const long X = mixture.of.X, I = rows.I;
        const long begin = cut(X, number, rows.out_blocks);
        const long width = cut(X, number + 1, rows.out_blocks) - begin;
        const T* inner = rows.inner.data();
        const W* down = rows.down + packed_elements(begin, I, rows.down);
        if (is_shared)
            linear(inner, apart<T>(I), down, rows.M, width, I, mixture.shared_out.data() + begin,
                   X);
        else
            linear(inner, apart<T>(I), down, rows.M, width, I, rows.out.data() + begin, X);
        if (rows.outs_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && !is_shared)
            rows.each_source([&](Source<T, W>& source) {
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
            publish(run_sums, &source, num_blocks, SUMS);
        else
            source.state.store(Source<T, W>::ANSWERED, std::memory_order_release);
    }

    // The weighted sums of a block of a source's rows; with the last block, their way back.
    static void run_sums(void* on, long number) {
        Source<T, W>& source = *static_cast<Source<T, W>*>(on);
        Mixture& mixture = *source.mixture;
        const long X = mixture.of.X;
        const bool is_own = source.number == mixture.own;
        const Peer<T>& peer = mixture.peers[source.number];
        const Strided<T> sums = is_own ? Strided<T>{mixture.own_sum.data(), X} : peer.answers.hidden;
        float* wide = scratch<float, 27>(X);
        const long end = std::min((number + 1) * SUMMED_ROWS, source.count);
        for (long i = number * SUMMED_ROWS; i < end; ++i) source.sum(i, X, wide, sums.at(i));
        if (source.blocks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            const bool is_put = is_own || peer.answered_flag;
            if (!is_own && is_put) raise_flag(peer.answered_flag, mixture.flag);
            source.state.store(is_put ? Source<T, W>::ANSWERED : Source<T, W>::SUMMED,
                               std::memory_order_release);
            if (!is_put) mixture.num_summed.fetch_add(1, std::memory_order_release);
        }
        mixture.ended();
    }

    // How many instances' sums are not here yet; their numbers, if `awaited` is there.
    long await_sums(long* awaited) const {
        long found = 0;
        for (long n = 0; n < N; ++n) {
            if (n == own || !counts_of[n]) continue;
            if (__atomic_load_n(peers[n].returned_flag, __ATOMIC_ACQUIRE) == flag) continue;
            if (awaited) awaited[found] = n;
            ++found;
        }
        return found;
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
        found = await_sums(awaited);
        awaited[found] = -1;
        if (found) return AWAITS_SUMS;
        awaited[0] = rows_sent;
        awaited[1] = 0;
        for (long n = 0; n < N; ++n) {
            if (n != own && peers[n].answered_flag) awaited[1] += sources[n].count;
            regions[n] = n == own || !counts_of[n] ? Region<T>{} : peers[n].returned;
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
    long B = 0, rows_sent = 0;
    long wrong = -1;  // the source whose count is impossible
    bool has_all_rows = false;
    uint64_t flag = 0;
    Schedule schedule = BARRIER;
    long shared_left = 0;  // tasks of its inner columns that are not published
    // Tasks that were published and have not ended; sources whose sums the caller must put.
    std::atomic<long> tasks_left{0}, num_summed{0};
    std::vector<Source<T, W>> sources;
    std::vector<Source<T, W>*> taken;
    Arrivals<T, W> arrivals;
    Forecast forecast;
    ExpertRows<T, W> shared;
    std::vector<ExpertRows<T, W>*> order;
    std::vector<T> shared_out, own_sum;
    std::vector<int64_t> number, rows, counts_of;
    std::vector<float> weight;
    std::vector<Region<T>> regions;
};
