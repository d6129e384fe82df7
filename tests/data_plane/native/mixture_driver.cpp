// Mixtures of several instances in one process, each a thread with processors of its own, for
// ThreadSanitizer: it sees a flag that is raised before the rows it announces, where x86 shows no
// fault. The regions are those of the exchange: two parities, each with its flag.
//
//     driver INSTANCES PROCESSORS EPOCHS SCHEDULE SEED
//
// Exit status 1 if an output is not that of one processor with all rows at once, bit by bit, or if
// a wait takes longer than 60 s.
#include "mixture.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

constexpr long X = 40, I = 128, E = 8, K = 3, MAX_ROWS = 12;

using Values = std::vector<float>;

struct Random {
    std::mt19937_64 bits;
    float value() { return std::normal_distribution<float>(0, 1)(bits); }
    long below(long limit) { return long(bits() % uint64_t(limit)); }
    Values values(long count) {
        Values made(count);
        for (float& each : made) each = value();
        return made;
    }
};

static Values packed(const Values& plain, long N, long width) {
    Values made(packed_elements(N, width, plain.data()));
    pack(plain.data(), N, width, made.data());
    return made;
}

struct Weights {
    Values gate, bias;
    std::vector<Values> gate_up, down;

    explicit Weights(Random& random) {
        gate = packed(random.values(E * X), E, X);
        bias = random.values(E);
        for (long e = 0; e <= E; ++e) {  // the last one is the shared expert
            gate_up.push_back(packed(random.values(2 * I * X), 2 * I, X));
            down.push_back(packed(random.values(X * I), X, I));
        }
    }
};

// One DISPATCH or COMBINE region, and its flag.
struct Store {
    int32_t count = 0;
    // Rows are further apart than they are long.
    std::vector<int64_t> number = std::vector<int64_t>(MAX_ROWS * (K + 1));
    Values weight = Values(MAX_ROWS * (K + 2)), sums = Values(MAX_ROWS * (X + 8));
    alignas(64) uint64_t flag = 0;

    Strided<float> hidden() { return {sums.data(), X + 8}; }
    Region<float> region() {
        return {&count, {number.data(), K + 1}, {weight.data(), K + 2}, hidden()};
    }
};

struct Rows {
    long count;
    Values x, normed;
    std::unique_ptr<bool[]> live;
};

struct Layer {
    std::vector<int32_t> table;
    std::vector<int64_t> loads;
    std::vector<const float*> gate_up, down;
    MixtureLayer<float, float> of;

    Layer(const Weights& weights, long instance, long N) : table(E * 64, 1), loads(E / N) {
        for (long e = 0; e < E; ++e) {
            table[e * 64 + 1] = int32_t(e);
            if (e / (E / N) != instance) continue;
            gate_up.push_back(weights.gate_up[e].data());
            down.push_back(weights.down[e].data());
        }
        of = {weights.gate.data(), weights.bias.data(), gate_up.data(), down.data(),
              weights.gate_up[E].data(), weights.down[E].data(), table.data(),
              loads.data(), X, E, 1, 1, K, E / N, instance * (E / N), I, I, 1.0f, 0, 1};
    }
};

static std::atomic<bool> has_failed{false};

static void fail(const char* what, long instance, long epoch) {
    fprintf(stderr, "instance %ld, epoch %ld: %s\n", instance, epoch, what);
    has_failed.store(true);
}

struct Cluster {
    const long N;
    // [channel][parity][source][target]
    std::vector<std::unique_ptr<Store>> stores;

    explicit Cluster(long N) : N(N), stores(4 * N * N) {
        for (auto& each : stores) each.reset(new Store());
    }

    Store& store(long channel, long parity, long source, long target) {
        return *stores[((channel * 2 + parity) * N + source) * N + target];
    }

    std::vector<Peer<float>> peers(long own, long parity) {
        std::vector<Peer<float>> made(N);
        for (long n = 0; n < N; ++n) {
            if (n == own) continue;
            Store &sent = store(0, parity, own, n), &arrived = store(0, parity, n, own);
            Store &answered = store(1, parity, own, n), &returned = store(1, parity, n, own);
            made[n] = {sent.region(), arrived.region(), answered.region(), returned.region(),
                       &sent.flag,    &answered.flag,   &arrived.flag,     &returned.flag};
        }
        return made;
    }
};

// The layers of one instance, one after another.
static void run_instance(Cluster& cluster, const Weights& weights, std::vector<Rows>& rows,
                         std::vector<Values>& outs, long own, long num_processors,
                         Schedule schedule, uint64_t seed) {
    Processors processors(num_processors);
    Mixture<float, float> mixture(&processors, cluster.N, own, MAX_ROWS);
    const Layer layer(weights, own, cluster.N);
    const std::vector<Peer<float>> peers[] = {cluster.peers(own, 0), cluster.peers(own, 1)};
    std::vector<long> awaited(cluster.N + 1), counts(cluster.N);
    Random random{std::mt19937_64(seed)};
    for (long epoch = 0; epoch < long(rows.size()) && !has_failed; ++epoch) {
        if (!random.below(3))
            std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
        Rows& own_rows = rows[epoch];
        outs[epoch].resize(own_rows.count * X);
        const auto began = std::chrono::steady_clock::now();
        long ended = mixture.run(&layer.of, own_rows.x.data(), own_rows.normed.data(),
                                 own_rows.live.get(), own_rows.count, peers[epoch & 1].data(),
                                 uint64_t(epoch), schedule, outs[epoch].data(), awaited.data(),
                                 counts.data());
        while (ended != DONE) {
            if (ended != AWAITS_ROWS && ended != AWAITS_SUMS) {
                mixture.finish();
                return fail("no wait was asked for", own, epoch);
            }
            sched_yield();
            if (std::chrono::steady_clock::now() - began > std::chrono::seconds(60))
                return fail("a wait took 60 s", own, epoch);
            ended = mixture.resume(awaited.data(), counts.data());
        }
    }
}

int main(int, char** arguments) {
    const long N = atol(arguments[1]), num_processors = atol(arguments[2]);
    const long num_epochs = atol(arguments[3]);
    const Schedule schedule = Schedule(atol(arguments[4]));
    const uint64_t seed = uint64_t(atol(arguments[5]));
    Random random{std::mt19937_64(seed)};
    const Weights weights(random);
    std::vector<std::vector<Rows>> rows(N);
    for (auto& of_instance : rows)
        for (long epoch = 0; epoch < num_epochs; ++epoch) {
            const long count = random.below(MAX_ROWS + 1);
            Rows made{count, random.values(count * X), random.values(count * X),
                      std::unique_ptr<bool[]>(new bool[count + 1])};
            for (long i = 0; i < count; ++i) made.live[i] = random.below(5) > 0;
            of_instance.push_back(std::move(made));
        }
    std::vector<std::vector<Values>> outs[2];
    // First on one processor, together; then as asked.
    for (long turn = 0; turn < 2; ++turn) {
        Cluster cluster(N);
        outs[turn].assign(N, std::vector<Values>(num_epochs));
        std::vector<std::thread> instances;
        for (long n = 0; n < N; ++n)
            instances.emplace_back([&, n] {
                run_instance(cluster, weights, rows[n], outs[turn][n], n, turn ? num_processors : 1,
                             turn ? schedule : BARRIER, seed + uint64_t(n));
            });
        for (std::thread& each : instances) each.join();
    }
    for (long n = 0; n < N && !has_failed; ++n)
        for (long epoch = 0; epoch < num_epochs; ++epoch)
            if (memcmp(outs[0][n][epoch].data(), outs[1][n][epoch].data(),
                       outs[0][n][epoch].size() * sizeof(float)))
                fail("the output differs from one processor's", n, epoch);
    return has_failed;
}
