"""The frames: what rows read and append, against a plain reading of the page table; payloads."""

import resource
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_plane.graph.pool_cpu import LocalPages
from data_plane.kv import huge_pages as huge_pages_module
from data_plane.kv.frame_pool import FramePool, LocalStep
from data_plane.kv.huge_pages import TAKER, huge_pages
from nanocp.values.table_changes import PageRun

SCRATCH = 100 * 64


@given(st.lists(
    st.tuples(st.dictionaries(st.integers(0, 9), st.integers(0, 99), max_size=8),
              st.integers(0, 639),
              st.booleans()),
    min_size=1, max_size=6,
))  # fmt: skip
def test_local_step_reads_and_writes_what_the_page_table_says(rows):
    pages = LocalPages.empty(len(rows), 10)
    for index, (frames, _, _) in enumerate(rows):
        pages.fill(index, [PageRun(1, page, 1, frames[page]) for page in sorted(frames)])
    step = LocalStep(
        pages,
        np.array([position for _, position, _ in rows], np.int64),
        np.array([live for _, _, live in rows]),
        SCRATCH,
    )
    for index, (frames, position, live) in enumerate(rows):
        tail = position // 64
        length = sum(64 for page in frames if page < tail) + (
            position % 64 + 1 if tail in frames else 0
        )
        assert step.lengths[index] == length
        num_pages = -(-length // 64)
        assert step.frames[index, :num_pages].tolist() == [
            frames[page] for page in sorted(frames) if page <= tail
        ]
        appends_here = live and tail in frames
        assert step.slots[index] == (frames[tail] * 64 + position % 64 if appends_here else SCRATCH)


def test_append_and_payload_write_what_the_layers_show():
    pool = FramePool(num_layers=2, num_frames=3, width=4, dtype=torch.bfloat16)
    pool.append(
        1, torch.tensor([64 + 5, pool.scratch_slot]), torch.ones(2, 4, dtype=torch.bfloat16)
    )
    assert (
        pool.layers[1, 1, 5].sum() == 4
        and pool.layers[0].sum() == 0
        and pool.layers[1, :3].sum() == 4
    )
    page = torch.arange(2 * 64 * 4).view(2, 64, 4).bfloat16()
    pool.write_payload(2, 3, page.view(torch.uint8).flatten().numpy())
    assert page.nbytes == pool.page_bytes
    assert torch.equal(pool.layers[:, 2, :3], page[:, :3]) and pool.layers[:, 2, 3:].sum() == 0


def test_synthetic_kv_depends_on_request_and_page_only():
    one, other = (FramePool(2, 4, 8, torch.float32) for _ in range(2))
    one.fill_synthetic(0, 64, request_id=7, page=3)
    other.fill_synthetic(2, 64, request_id=7, page=3)
    other.fill_synthetic(1, 64, request_id=7, page=4)
    assert torch.equal(one.layers[:, 0], other.layers[:, 2])
    assert not torch.equal(other.layers[:, 1], other.layers[:, 2])


def test_memory_is_there_before_it_is_written():
    array = huge_pages(2**24, is_taken=True)
    for thread in threading.enumerate():
        if thread.name == TAKER:
            thread.join()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[:] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 4


def test_memory_that_nobody_wants_any_more_is_not_taken(monkeypatch):
    taken, is_dropped = [], threading.Event()

    def madvise(address, num_bytes, advice):
        taken.append(num_bytes)
        assert is_dropped.wait(10)
        return 0

    library = SimpleNamespace(madvise=madvise)
    monkeypatch.setattr(huge_pages_module.ctypes, "CDLL", lambda name: library)
    pool = FramePool(2, 4096, 64, torch.float32)
    del pool
    is_dropped.set()
    for thread in threading.enumerate():
        if thread.name == TAKER:
            thread.join()
    assert len(taken) <= 1, "a chunk may have begun"


def test_frames_that_no_memory_holds_are_refused_with_their_size():
    with pytest.raises(
        ValueError, match=r"num_frames is 10000000000: .* GiB, which cannot be allocated"
    ):
        FramePool(2, 10**10, 512, torch.float32)
