// In which order experts run that have rows of two instances, some of which began early.
//
//     driver
//
// Exit status 1 if the order is another one.
#include "arrivals.h"

#include <cstdio>

constexpr long SLOTS = 6, X = 16, K = 2;

using Rows = Source<float, float>;

static int has_failed = 0;

static void expect(const char* what, const std::vector<ExpertRows<float, float>*>& found,
                   const std::vector<long>& wanted) {
    bool is_equal = found.size() == wanted.size();
    for (size_t i = 0; is_equal && i < wanted.size(); ++i) is_equal = found[i]->slot == wanted[i];
    if (is_equal) return;
    has_failed = 1;
    fprintf(stderr, "%s:", what);
    for (const auto* rows : found) fprintf(stderr, " %ld", rows->slot);
    fprintf(stderr, "\n");
}

int main() {
    const float* weights[SLOTS] = {};
    int64_t loads[SLOTS] = {};
    MixtureLayer<float, float> of{};
    of.loads = loads;
    of.gate_up = of.down = weights;
    of.first = SLOTS;  // the second instance
    of.X = X;
    of.K = K;
    of.num_slots = SLOTS;
    // Expert 4 has three of the own rows, 1 two, the others at most one; 0 has none.
    std::vector<int64_t> own_numbers = {10, 7, 10, 7, 10, 9, 8, 11}, all = {6, 7, 8, 9, 10, 11, 6, 11};
    std::vector<float> weight(K * 4, 1.0f), hidden(X * 4);
    for (const bool by_rows : {false, true}) {
        Rows own, peer;
        own.count = peer.count = 4;
        own.which = peer.which = nullptr;
        own.from = {nullptr, {own_numbers.data(), K}, {weight.data(), K}, {hidden.data(), X}};
        peer.from = own.from;
        peer.from.number.first = all.data();
        Arrivals<float, float> arrivals;
        std::vector<ExpertRows<float, float>*> order;
        for (long layer = 0; layer < 2; ++layer) {
            arrivals.clear(SLOTS);
            arrivals.add(of, own, false);
            if (arrivals.take_fullest()->slot != 4 || arrivals.take_fullest()->slot != 1)
                has_failed = 1;
            arrivals.add(of, peer, true);
            arrivals.take_all(order, by_rows);
            expect(by_rows ? "by rows" : "by slot", order,
                   by_rows ? std::vector<long>{1, 4, 5, 0, 2, 3}
                           : std::vector<long>{1, 4, 0, 2, 3, 5});
        }
        arrivals.clear(SLOTS);
        arrivals.add(of, peer, true);
        arrivals.take_all(order, false);
        expect("without an early one", order, {0, 1, 2, 3, 4, 5});
    }
    return has_failed;
}
