// Puts by several connections into one memory, each awaited by its reader, for ThreadSanitizer: it
// sees a word that is raised before the bytes it announces, where x86 shows no fault.
//
//     driver CONNECTIONS PUTS SEED
//
// Exit status 1 if a reader finds other bytes than were put, or if a receiver ends early.
#include "receive.cpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

constexpr uint64_t DATA_OFFSET = 64, PART = 1 << 16, WORDS = DATA_OFFSET;

static std::atomic<int> has_failed{0};

static void expect(bool is_so, const char* what) {
    if (is_so) return;
    has_failed = 1;
    fprintf(stderr, "%s\n", what);
}

// What put `value` writes: its chunks cover the first `size` bytes of the part.
static uint64_t size_of(uint64_t value) { return value * 7919 % PART; }
static char byte_of(uint64_t value, uint64_t at) { return char(value * 31 + at * 7); }

static void write_puts(int connection, uint64_t word, uint64_t part, uint64_t puts, uint64_t seed,
                       std::atomic<uint64_t>& num_read) {
    std::mt19937_64 random(seed);
    for (uint64_t value = 1; value <= puts; ++value) {
        while (num_read.load() + 1 < value && !has_failed) sched_yield();
        if (has_failed) break;
        PutHeader header{word, value, PutHeader::MAX_CHUNKS, {}};
        const uint64_t size = size_of(value);
        for (uint64_t i = 0, at = 0; i < PutHeader::MAX_CHUNKS; ++i) {
            const bool is_last = i + 1 == PutHeader::MAX_CHUNKS;
            const uint64_t num_bytes = is_last ? size - at : random() % (size - at + 1);
            header.chunks[i] = {part + at, num_bytes};
            at += num_bytes;
        }
        std::vector<char> message(sizeof header + size);
        memcpy(message.data(), &header, sizeof header);
        for (uint64_t at = 0; at < size; ++at) message[sizeof header + at] = byte_of(value, at);
        for (uint64_t at = 0; at < message.size();) {
            const uint64_t piece = std::min(1 + random() % 20000, message.size() - at);
            const ssize_t sent = send(connection, message.data() + at, piece, MSG_NOSIGNAL);
            if (sent < 0) return expect(false, "a connection broke");
            at += uint64_t(sent);
        }
    }
    shutdown(connection, SHUT_WR);
}

static void read_puts(const char* memory, uint64_t word, uint64_t part, uint64_t puts,
                      std::atomic<uint64_t>& num_read) {
    for (uint64_t value = 1; value <= puts && !has_failed; ++value) {
        const auto* flag = reinterpret_cast<const uint64_t*>(memory + word);
        while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < value && !has_failed) sched_yield();
        for (uint64_t at = 0; at < size_of(value); ++at)
            if (memory[part + at] != byte_of(value, at)) return expect(false, "other bytes");
        num_read.store(value);
    }
}

int main(int, char** arguments) {
    const uint64_t count = strtoul(arguments[1], nullptr, 10);
    const uint64_t puts = strtoul(arguments[2], nullptr, 10);
    const uint64_t seed = strtoul(arguments[3], nullptr, 10);
    const uint64_t parts = WORDS + 64 * count;
    std::vector<uint64_t> aligned((parts + PART * count) / 8);
    char* memory = reinterpret_cast<char*>(aligned.data());
    std::vector<std::atomic<uint64_t>> num_read(count);
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < count; ++i) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return 1;
        const uint64_t word = WORDS + 64 * i, part = parts + PART * i;
        threads.emplace_back([=, &aligned] {
            PutHeader header{};
            const int ended = nanocp_receive_puts(ends[1], memory, aligned.size() * 8, DATA_OFFSET,
                                                  &header, sizeof header);
            expect(ended == CLOSED, "a receiver ended early");
            close(ends[1]);  // a writer that goes on would wait for room
        });
        threads.emplace_back(
            [=, &num_read] { write_puts(ends[0], word, part, puts, seed + i, num_read[i]); });
        threads.emplace_back([=, &num_read] { read_puts(memory, word, part, puts, num_read[i]); });
    }
    for (std::thread& thread : threads) thread.join();
    return has_failed;
}
