"""Faults in a mixture of experts that is one native call."""

from mutant import Mutant

MIXTURE = ("tests/data_plane/native/test_mixture.py", "-k", "one_expert or later_epoch")

MUTANTS = [
    Mutant(
        name="stale-rows",
        why="rows of an earlier epoch are taken as if they had just arrived (equal epochs)",
        path="data_plane/native/mixture.h",
        text="__atomic_load_n(peers[n].arrived_flag, __ATOMIC_ACQUIRE) == flag",
        fault="__atomic_load_n(peers[n].arrived_flag, __ATOMIC_ACQUIRE) != 0",
        tests=MIXTURE,
    ),
    Mutant(
        name="outputs-too-early",
        why="an expert's outputs begin before all of its inner columns are there",
        path="data_plane/native/mixture.h",
        text="if (rows.inner_left.fetch_sub(1, std::memory_order_acq_rel) == 1)",
        fault="if (rows.inner_left.fetch_sub(1, std::memory_order_acq_rel) == rows.inner_blocks)",
        tests=MIXTURE,
    ),
    Mutant(
        name="sums-in-another-order",
        why="a row's experts are summed backwards, so tokens depend on the form of the call",
        path="data_plane/native/arrivals.h",
        text="return a.rows->slot < b.rows->slot;",
        fault="return a.rows->slot > b.rows->slot;",
        tests=MIXTURE,
    ),
    Mutant(
        name="joins-what-has-begun",
        why="late rows join an expert that has begun without them",
        path="data_plane/native/arrivals.h",
        text="waiting[fullest->slot] = nullptr;",
        fault="",
        tests=("tests/data_plane/native/test_mixture.py", "-k", "begin_while_rows_are_awaited"),
    ),
    Mutant(
        name="cold-weights-first",
        why="experts whose weights were just read run last, when the cache has lost them",
        path="data_plane/native/arrivals.h",
        text="return a->begun > b->begun;",
        fault="return a->begun < b->begun;",
        tests=("tests/data_plane/native/test_mixture_races.py", "-k", "in_the_cache"),
    ),
    Mutant(
        name="no-release",
        why="a flag may be seen before the rows that it announces; x86 hides it",
        path="data_plane/native/flag.h",
        text="__atomic_store_n(flag, value, __ATOMIC_RELEASE);",
        fault="__atomic_store_n(flag, value, __ATOMIC_RELAXED);",
        tests=("tests/data_plane/native/test_mixture_races.py", "-m", "system"),
    ),
]
