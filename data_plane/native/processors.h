// The processors of an instance: the thread that calls, and others that run tasks beside it.
//
// A task is a function, what it works on, and a number. It is published when it can run, so no
// processor holds one that must wait, and none is idle while one is ready. A lower rank runs first.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

struct Task {
    void (*run)(void* of, long number);
    void* of;
    long number;
};

class Processors {
   public:
    static constexpr long RANKS = 4;

    explicit Processors(long count) {
        for (long i = 1; i < count; ++i) threads.emplace_back([this] { work(); });
    }

    Processors(const Processors&) = delete;

    ~Processors() {
        {
            std::lock_guard<std::mutex> held(lock);
            is_over = true;
        }
        woken.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    long count() const { return long(threads.size()) + 1; }

    bool has_ready() const { return num_ready.load(std::memory_order_relaxed) != 0; }

    // Publish `count` tasks of something, from number `first` on. is_next: before those of the rank
    // that were published earlier, because what they read is in the cache.
    void publish(void (*run)(void*, long), void* of, long first, long count, long rank,
                 bool is_next) {
        bool is_asleep;
        {
            std::lock_guard<std::mutex> held(lock);
            for (long i = 0; i < count; ++i) {
                if (is_next)
                    ready[rank].push_front({run, of, first + count - 1 - i});
                else
                    ready[rank].push_back({run, of, first + i});
            }
            num_ready.fetch_add(count, std::memory_order_relaxed);
            is_asleep = num_asleep > 0;
        }
        if (is_asleep) woken.notify_all();
    }

    // Run a task; false if none is ready.
    bool run_one() {
        if (!has_ready()) return false;
        Task task;
        {
            std::lock_guard<std::mutex> held(lock);
            if (!has_ready()) return false;
            std::deque<Task>* first = ready;
            while (first->empty()) ++first;
            task = first->front();
            first->pop_front();
            num_ready.fetch_sub(1, std::memory_order_relaxed);
        }
        task.run(task.of, task.number);
        return true;
    }

    // run(0) to run(count - 1) on all processors; returns when all have ended.
    template <class Run>
    void for_each(long count, const Run& run) {
        if (threads.empty() || count < 2) {
            for (long i = 0; i < count; ++i) run(i);
            return;
        }
        struct Call {
            const Run& run;
            std::atomic<long> left;
        } call{run, {count}};
        publish(
            [](void* of, long number) {
                Call& its = *static_cast<Call*>(of);
                its.run(number);
                its.left.fetch_sub(1, std::memory_order_release);
            },
            &call, 0, count, 0, true);
        for (long idle = 0; call.left.load(std::memory_order_acquire);)
            idle = run_one() ? 0 : relaxed(idle);
    }

    // Wait for a moment, and give the core away if it was waited for long.
    static long relaxed(long idle) {
        if (idle % 64 < 63)
            _mm_pause();
        else
            sched_yield();
        return idle + 1;
    }

   private:
    // A layer's calls follow each other within this time. Waking a thread takes as long.
    static constexpr auto AWAKE = std::chrono::microseconds(200);

    void work() {
        auto idle_since = std::chrono::steady_clock::now();
        for (long idle = 0;;) {
            if (run_one()) {
                idle = 0;
                continue;
            }
            if (!idle) idle_since = std::chrono::steady_clock::now();
            idle = relaxed(idle);
            if (idle % 64 || std::chrono::steady_clock::now() - idle_since < AWAKE) continue;
            std::unique_lock<std::mutex> held(lock);
            ++num_asleep;
            woken.wait(held, [this] { return is_over || has_ready(); });
            --num_asleep;
            if (is_over) return;
            idle = 0;
        }
    }

    std::mutex lock;  // guards `ready` and its number, num_asleep and is_over
    std::condition_variable woken;
    std::deque<Task> ready[RANKS];
    std::atomic<long> num_ready{0};
    long num_asleep = 0;
    bool is_over = false;
    std::vector<std::thread> threads;
};
