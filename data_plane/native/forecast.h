// How long an instance waits in a layer, and how long its experts take: as in the last layers.
#pragma once

#include <algorithm>
#include <chrono>

class Forecast {
   public:
    void layer_begins() { phase = GATE; }

    // Rows of some instance are not here yet.
    void rows_awaited() {
        if (phase == GATE) began = Clock::now();
        phase = ROWS;
    }

    // All rows are here, and their experts begin.
    void rows_arrived() {
        if (phase == ROWS) average(rows_wait);
        began = Clock::now();
        phase = EXPERTS;
    }

    // All sums here are done. work: what their time is in proportion to, in any unit.
    void experts_ended(long num_experts, double work) {
        if (phase != EXPERTS) return;
        this->num_experts = num_experts;
        this->work = work;
        experts_time = Clock::now() - began;
        began = Clock::now();
        phase = SUMS;
    }

    // The sums of this instance's rows are here.
    void sums_arrived() {
        if (phase == SUMS) average(sums_wait);
        phase = NONE;
    }

    // Whether an expert that begins now will have ended when all rows are here.
    bool has_time() const {
        return num_experts && Clock::now() - began + an_expert() <= rows_wait;
    }

    // Whether rows should come about now.
    bool is_due() const {
        const auto waited = Clock::now() - began;
        return phase == ROWS && waited <= rows_wait + an_expert() &&
               waited + an_expert() >= rows_wait;
    }

    // The share of other work that will not fit into the wait for sums.
    double exceeding(double other_work) const {
        const double takes = work ? double(experts_time.count()) * other_work / work : 0;
        return takes ? std::max(0.0, 1 - double(sums_wait.count()) / takes) : 1;
    }

   private:
    using Clock = std::chrono::steady_clock;

    // Of layers that waited for rows; of all layers.
    Clock::duration rows_wait{0}, sums_wait{0};
    Clock::duration experts_time{0};
    Clock::time_point began;
    enum { GATE, ROWS, EXPERTS, SUMS, NONE } phase = NONE;
    long num_experts = 0;
    double work = 0;

    Clock::duration an_expert() const { return experts_time / std::max(1L, num_experts); }

    void average(Clock::duration& wait) { wait += (Clock::now() - began - wait) / 8; }
};
