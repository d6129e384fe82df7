// A link that takes time: a thread publishes each put when the link would have carried it.
//
// It has neither Python's lock nor its interpreter, because what it stands for, a network card,
// takes nothing of the processor. The puts keep their order.
#pragma once

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "flag.h"

// What is sent through `connection`: the header, then the chunks. Without one (-1) the flag is
// raised.
struct LatePut {
    int64_t due_ns;  // of CLOCK_MONOTONIC
    uint64_t* flag;
    uint64_t value;
    int connection;
    std::string header;
    std::vector<iovec> chunks;
};

class LateLink {
   public:
    LateLink() {
        sem_init(&made, 0, 0);
        thread = std::thread([this] { publish(); });
    }

    LateLink(const LateLink&) = delete;

    // Puts that are not due yet are dropped.
    ~LateLink() {
        is_over.store(true);
        sem_post(&made);
        thread.join();
        sem_destroy(&made);
    }

    void put(LatePut&& put) {
        {
            std::lock_guard<std::mutex> held(lock);
            puts.push_back(std::move(put));
        }
        sem_post(&made);
    }

   private:
    void publish() {
        // A link does not wait for a core. Where that may not be asked for, it does.
        const sched_param above{2};
        if (sched_getscheduler(0) == SCHED_OTHER)
            pthread_setschedparam(pthread_self(), SCHED_FIFO, &above);
        for (;;) {
            while (sem_wait(&made) && errno == EINTR) {
            }
            if (is_over.load()) return;
            LatePut put = next();
            const timespec due{put.due_ns / 1000000000, put.due_ns % 1000000000};
            while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr) == EINTR) {
            }
            if (is_over.load()) return;
            if (put.connection < 0)
                raise_flag(put.flag, put.value);
            else
                send_all(put);
        }
    }

    LatePut next() {
        std::lock_guard<std::mutex> held(lock);
        LatePut put = std::move(puts.front());
        puts.pop_front();
        return put;
    }

    // What a connection that has ended does not take is lost: peers see its end. One that is full
    // refuses after a tick, and is asked again.
    void send_all(LatePut& put) const {
        std::vector<iovec> left{{put.header.data(), put.header.size()}};
        left.insert(left.end(), put.chunks.begin(), put.chunks.end());
        for (size_t first = 0; first < left.size();) {
            msghdr message{};
            message.msg_iov = left.data() + first;
            message.msg_iovlen = left.size() - first;
            ssize_t sent = sendmsg(put.connection, &message, MSG_NOSIGNAL);
            if (sent < 0 && (errno == EINTR || errno == EAGAIN) && !is_over.load()) continue;
            if (sent < 0) return;
            while (first < left.size() && size_t(sent) >= left[first].iov_len)
                sent -= ssize_t(left[first++].iov_len);
            if (first == left.size()) return;
            left[first].iov_base = static_cast<char*>(left[first].iov_base) + sent;
            left[first].iov_len -= size_t(sent);
        }
    }

    sem_t made;
    std::atomic<bool> is_over{false};
    std::mutex lock;
    std::deque<LatePut> puts;
    std::thread thread;
};
