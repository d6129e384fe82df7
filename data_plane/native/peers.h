// What a mixture and its caller tell each other: where peers' regions are, what runs when, how a
// call ended.
#pragma once

#include "flag.h"
#include "rows.h"

// A peer's regions and flags of one parity. A flag that is raised here is null if the caller puts.
template <class T>
struct Peer {
    Region<T> sent, arrived, answers, returned;
    uint64_t *sent_flag, *answered_flag;
    const uint64_t *arrived_flag, *returned_flag;
};

// What runs when: see MoeSchedule of data_plane/moe/mixture.py.
enum Schedule : long { BARRIER, ORDERED, ARRIVAL };

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
