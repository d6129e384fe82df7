"""Faults in a mixture of experts that is one native call."""

from mutant import Mutant

MIXTURE = ("tests/data_plane/native/test_mixture.py", "-k", "one_expert or later_epoch")

MUTANTS = [
    Mutant("stale-rows", path="data_plane/native/mixture.h", tests=MIXTURE,
           why="rows of an earlier epoch are taken as if they had just arrived (equal epochs)",
           text="__atomic_load_n(peers[n].arrived_flag, __ATOMIC_ACQUIRE) == flag",
           fault="__atomic_load_n(peers[n].arrived_flag, __ATOMIC_ACQUIRE) != 0"),
    Mutant("outputs-too-early", path="data_plane/native/mixture.h", tests=MIXTURE,
        why="an expert's outputs begin before all of its inner columns are there",
        text="if (rows.inner_left.fetch_sub(1, std::memory_order_acq_rel) == 1)",
        fault="if (rows.inner_left.fetch_sub(1, std::memory_order_acq_rel) == rows.inner_blocks)"),
    Mutant("sums-in-another-order", path="data_plane/native/arrivals.h", tests=MIXTURE,
           why="a row's experts are summed backwards, so tokens depend on the form of the call",
           text="return a.rows->slot < b.rows->slot;", fault="return a.rows->slot > b.rows->slot;"),
    Mutant("receivers-slot-compiled", path="data_plane/native/arrivals.h",
           tests=("tests/data_plane/native/test_mixture.py", "-k", "whatever_arrives"),
           why="a receiver takes numbers of another seat, and a row's expert counts twice",
           text="slot = number[k] - of.first;", fault="slot = number[k] % of.num_slots;"),
    Mutant("loads-of-peers-alone", path="data_plane/native/arrivals.h",
           tests=("tests/data_plane/native/test_mixture.py", "-k", "loads and one"),
           why="an instance's own rows are not in the loads of its slots",
           text="++of.loads[rows.slot];", fault="of.loads[rows.slot] += is_peer;"),
    Mutant("joins-what-has-begun", path="data_plane/native/arrivals.h",
           tests=("tests/data_plane/native/test_mixture.py", "-k", "begin_while_rows_are_awaited"),
           why="late rows join an expert that has begun without them",
           text="waiting[fullest->slot] = nullptr;", fault=""),
    Mutant("cold-weights-first", path="data_plane/native/arrivals.h",
           tests=("tests/data_plane/native/test_mixture_races.py", "-k", "in_the_cache"),
           why="experts whose weights were just read run last, when the cache has lost them",
           text="return a->begun > b->begun;", fault="return a->begun < b->begun;"),
    Mutant("no-release", path="data_plane/native/flag.h",
           tests=("tests/data_plane/native/test_mixture_races.py", "-m", "system"),
           why="a flag may be seen before the rows that it announces; x86 hides it",
           text="__atomic_store_n(flag, value, __ATOMIC_RELEASE);",
           fault="__atomic_store_n(flag, value, __ATOMIC_RELAXED);"),
]  # fmt: skip
