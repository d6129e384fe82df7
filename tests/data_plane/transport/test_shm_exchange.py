"""The shared-memory exchange: real processes that are slow or die, and files in /dev/shm."""

import contextlib
import gc
import mmap
import os
import platform
import signal
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_plane.transport import shared_memory
from data_plane.transport.exchange import Channel, EpochError, ExchangeTimeout, Field, PeerLost
from data_plane.transport.futex import Word
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import sweep_stale, unlink_cluster
from data_plane.transport.shm import ShmExchange
from harness.transports.step_protocol import Protocol, run_protocol
from harness.transports.transport_processes import (
    IMPATIENT,
    LAYOUT,
    LIMITS,
    NOTICED_S,
    START_MS,
    hold_instance,
    processes,
    receive,
)


def segments_of(cluster_id):
    return [name for name in os.listdir("/dev/shm") if cluster_id in name]


def make_pair(cluster_id, limits=IMPATIENT, layouts=(LAYOUT, LAYOUT)):
    return [
        ShmExchange.create(Segments(cluster_id), instance, 2, layouts[instance], limits)
        for instance in range(2)
    ]


@pytest.fixture
def pair(cluster_id):
    exchanges = make_pair(cluster_id)
    for exchange in exchanges:
        exchange.connect(START_MS)
    yield exchanges
    for exchange in exchanges:
        exchange.close()


ONE_NODE, TWO_NODES, FOUR_NODES = "aaaa", "aabb", "abcd"


STEPS = pytest.mark.parametrize("num_steps", [300, pytest.param(2000, marks=pytest.mark.system)])


def run_cluster(cluster_id, nodes=ONE_NODE, **changes):
    fields = {
        "num_instances": 4, "num_steps": 1000, "num_dense_layers": 0, "num_moe_layers": 1,
        "seed": 1,
    }  # fmt: skip
    protocol = Protocol(**{**fields, "idle_instance": 2, **changes})
    bodies = [
        (run_protocol, (cluster_id, instance, nodes[instance], protocol))
        for instance in range(protocol.num_instances)
    ]
    with processes(*bodies) as members:
        peers = [receive(pipe) for _, pipe in members]
        for _, pipe in members:
            pipe.send(peers)
        answers = [receive(pipe, 400) for _, pipe in members]
        for process, _ in members:
            process.wait(60)
        return answers


@STEPS
@pytest.mark.parametrize("num_dense_layers", [0, 1, 2, 3])
def test_the_step_protocol_is_safe_with_two_deep_buffers(cluster_id, num_dense_layers, num_steps):
    shape = {"num_dense_layers": num_dense_layers, "seed": num_dense_layers}
    answers = run_cluster(cluster_id, num_steps=num_steps, **shape)
    assert answers == ["ok"] * 4
    assert not segments_of(cluster_id)


def run_dense_cluster(cluster_id, tmp_path, nodes=ONE_NODE, **changes):
    """Run layers without experts: nothing but replies and windows bounds who runs ahead."""
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(4 * 8))
    return run_cluster(
        cluster_id,
        nodes,
        **{"num_dense_layers": 3, "num_moe_layers": 0, "num_steps": 400, "slow_instance": 1}
        | {"link_share": 0.2, "hand_off_share": 0.15, "progress": str(progress)}
        | changes,
    )


@STEPS
@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES])
def test_the_step_protocol_is_safe_without_experts(cluster_id, tmp_path, nodes, num_steps):
    """Links appear, vanish and appear again, while one instance is late in any layer."""
    answers = run_dense_cluster(cluster_id, tmp_path, nodes, num_steps=num_steps)
    assert answers == ["ok"] * 4
    assert not segments_of(cluster_id)


@pytest.mark.system
def test_without_experts_more_than_two_windows_in_flight_break_the_mailbox(cluster_id, tmp_path):
    answers = run_dense_cluster(cluster_id, tmp_path, max_in_flight=8, link_share=0.0)
    errors = [answer for answer in answers if answer.startswith(("EpochError", "AssertionError"))]
    assert any("MAILBOX" in error or "mailbox" in error for error in errors), answers


@pytest.mark.parametrize("nodes", [TWO_NODES, FOUR_NODES])
def test_the_step_protocol_is_safe_between_nodes(cluster_id, nodes):
    assert run_cluster(cluster_id, nodes, num_dense_layers=1) == ["ok"] * 4
    assert not segments_of(cluster_id)


@pytest.mark.parametrize("nodes", [ONE_NODE, FOUR_NODES])
def test_the_step_protocol_breaks_with_one_deep_buffers(cluster_id, nodes):
    answers = run_cluster(cluster_id, nodes, is_one_deep=True)
    errors = [answer for answer in answers if answer.startswith(("EpochError", "AssertionError"))]
    assert errors, answers


@pytest.mark.parametrize("with_forked_child", [False, True])
def test_a_killed_peer_is_noticed_by_a_tick(cluster_id, with_forked_child):
    exchange = ShmExchange.create(Segments(cluster_id), 0, 2, LAYOUT, LIMITS)
    child = 0
    try:
        with processes((hold_instance, (cluster_id, 1, 2, with_forked_child, ""))) as [
            (process, pipe)
        ]:
            exchange.connect(START_MS)
            child = receive(pipe)
            killed_at = []
            killer = threading.Timer(
                0.2, lambda: (killed_at.append(time.monotonic()), process.kill())
            )
            killer.start()
            with pytest.raises(
                PeerLost,
                match=r"instance 0, \d+ ms into its wait for Q of epoch 3.*instance 1 is gone",
            ):
                exchange.wait(Channel.Q, 1, 3)
            assert time.monotonic() - killed_at[0] < NOTICED_S
            killer.join()
        # Any service that starts on this machine sweeps too, and may have been first.
        assert set(sweep_stale(cluster_id)) <= {
            f"nanocp-{cluster_id}-t1-exchange-1",
            f"nanocp-{cluster_id}-t1-prefill0-1",
        }
        assert segments_of(cluster_id) == [f"nanocp-{cluster_id}-t1-exchange-0"]
    finally:
        exchange.close()
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_name_left_by_a_dead_process_is_taken_over(cluster_id):
    with processes((hold_instance, (cluster_id, 0, 1, False, ""))) as [(process, pipe)]:
        receive(pipe)
        with pytest.raises(ValueError, match="belongs to a living process"):
            ShmExchange.create(Segments(cluster_id), 0, 1, LAYOUT, LIMITS)
        process.kill()
        process.wait()
        ShmExchange.create(Segments(cluster_id), 0, 1, LAYOUT, LIMITS).close()
    sweep_stale(cluster_id)
    assert not segments_of(cluster_id)


@pytest.fixture
def apart(monkeypatch):
    """Segments in a folder of their own, where no service of this machine sweeps."""
    with tempfile.TemporaryDirectory(dir=shared_memory.DIRECTORY) as folder:
        monkeypatch.setattr(shared_memory, "DIRECTORY", Path(folder))
        yield


def test_a_peer_that_is_dead_at_connect_is_named_and_swept(cluster_id, apart):
    exchange, dead = make_pair(cluster_id)
    dead._segment.disown()  # as the end of its process would
    with pytest.raises(PeerLost, match="exchange-1 is gone") as lost:
        exchange.connect(1000)
    assert lost.value.peer == 1
    assert sweep_stale(cluster_id) == [f"nanocp-{cluster_id}-t1-exchange-1"]
    exchange.close()


def test_a_long_wait_sleeps(pair):
    cpu_before = time.thread_time()
    with pytest.raises(ExchangeTimeout):
        pair[0].wait(Channel.RES, 1, 0)
    assert time.thread_time() - cpu_before < 0.1, "300 ms of waiting should cost next to nothing"


def test_a_put_wakes_a_sleeper_long_before_its_tick(cluster_id):
    limits = replace(LIMITS, tick_ms=1000)
    exchanges = make_pair(cluster_id, limits)
    for exchange in exchanges:
        exchange.connect(1000)
    delays_ms = []
    for epoch in range(3):
        put_at = []

        def put(epoch=epoch, put_at=put_at):
            put_at.append(time.monotonic())
            exchanges[1].put(Channel.Q, 0, epoch)

        timer = threading.Timer(0.02, put)
        timer.start()
        exchanges[0].wait(Channel.Q, 1, epoch)
        delays_ms.append((time.monotonic() - put_at[0]) * 1000)
        timer.join()
    assert min(delays_ms) < limits.tick_ms / 2, delays_ms
    for exchange in exchanges:
        exchange.close()


def test_a_signal_is_handled_inside_a_wait_and_does_not_end_it(pair):
    handled = []
    previous = signal.signal(signal.SIGALRM, lambda *_: handled.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        begin = time.monotonic()
        with pytest.raises(ExchangeTimeout):
            pair[0].wait(Channel.Q, 1, 0)
        ended = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert handled[0] < ended, "handled while it waited"
    assert ended - begin >= 0.3


def test_a_value_that_came_before_the_wait_gave_up_is_returned():
    word = Word(mmap.mmap(-1, 4096), 64)

    def go_on():
        word.store(5)
        return False

    assert word.wait_at_least(5, timeout_ms=1000, tick_ms=1, go_on=go_on) == 5
    assert word.wait_at_least(6, timeout_ms=1000, tick_ms=1, go_on=lambda: False) is None


def test_an_overwritten_region_is_told_by_name(pair):
    pair[0].put(Channel.COMBINE, 1, 5)
    with pytest.raises(
        EpochError, match="instance 1 awaits COMBINE of instance 0, epoch 3, but finds epoch 5"
    ):
        pair[1].wait(Channel.COMBINE, 0, 3)


def test_epochs_pass_32_bits(cluster_id):
    epoch = 2**32 - 1
    pair = make_pair(cluster_id, LIMITS)
    for exchange in pair:
        exchange.connect(START_MS)
    assert not pair[1].arrived(Channel.Q, 0, epoch)
    timer = threading.Timer(0.05, lambda: pair[0].put(Channel.Q, 1, epoch))
    timer.start()
    pair[1].wait(Channel.Q, 0, epoch)
    timer.join()
    for exchange in pair:
        exchange.close()


def test_another_layout_is_refused_by_the_field_that_differs(cluster_id):
    wider = {**LAYOUT, Channel.RES: (Field("partial", "float32", (6, 999)), LAYOUT[Channel.RES][1])}
    exchanges = make_pair(cluster_id, layouts=(LAYOUT, wider))
    difference = (
        r"'RES.partial float32 \(6, 999\)' where this process has 'RES.partial float32 \(6, 257\)'"
    )
    with pytest.raises(ValueError, match="exchange-1 has " + difference):
        exchanges[0].connect(1000)
    for exchange in exchanges:
        exchange.close()


def test_another_number_of_instances_is_refused(cluster_id):
    segments = Segments(cluster_id)
    exchanges = [
        ShmExchange.create(segments, instance, 2 + instance, LAYOUT, LIMITS)
        for instance in range(2)
    ]
    with pytest.raises(
        ValueError, match="'num_instances 3' where this process has 'num_instances 2'"
    ):
        exchanges[0].connect(1000)
    for exchange in exchanges:
        exchange.close()


def test_a_peer_that_never_starts_is_named(cluster_id):
    exchange = ShmExchange.create(Segments(cluster_id), 0, 2, LAYOUT, LIMITS)
    with pytest.raises(ExchangeTimeout, match="exchange-1 did not appear in 50 ms") as late:
        exchange.connect(50)
    assert late.value.peer == 1
    exchange.close()


def test_what_does_not_fit_is_refused_before_it_kills_the_writer(cluster_id):
    huge = {Channel.Q: (Field("q", "uint8", (1 << 48,)),)}
    with pytest.raises(ValueError, match=r"needs \d+\.\d MiB of /dev/shm, which has"):
        ShmExchange.create(Segments(cluster_id), 0, 2, huge, LIMITS)


@pytest.mark.parametrize(("bad_id", "instance", "message"), [
    ("", 0, "cluster_id"),
    ("a/b", 0, "cluster_id"),
    ("good", 2, "from 0 to 1"),
    ("good", -1, "from 0 to 1"),
])  # fmt: skip
def test_bad_names_are_refused(bad_id, instance, message):
    with pytest.raises(ValueError, match=message):
        ShmExchange.create(Segments(bad_id), instance, 2, LAYOUT, LIMITS)


def test_other_platforms_are_refused_by_name(cluster_id, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ValueError, match=r"needs linux on x86_64 .* not linux on aarch64"):
        ShmExchange.create(Segments(cluster_id), 0, 2, LAYOUT, LIMITS)


def test_close_unmaps_everything_but_what_is_still_looked_at(cluster_id):
    gc.collect()  # of other tests
    num_others, num_others_open = num_mapped(cluster_id), num_open(cluster_id)
    exchanges = make_pair(cluster_id)
    for exchange in exchanges:
        exchange.connect(1000)
    view = exchanges[0].outgoing(Channel.Q, 1, 0)["position"]
    view[:] = 3
    for exchange in [*exchanges, *exchanges]:
        exchange.close()
    assert not segments_of(cluster_id)
    assert (view == 3).all()
    assert num_mapped(cluster_id) > num_others
    del view
    assert (num_mapped(cluster_id), num_open(cluster_id)) == (num_others, num_others_open)


def num_open(cluster_id):
    """Not of all files: other tests' threads open and close theirs."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(cluster_id in link or "/#" in link for link in links)


def num_mapped(cluster_id):
    with open("/proc/self/maps") as maps:
        return sum(cluster_id in line or "/#" in line for line in maps)


def test_sweeping_spares_the_living_and_other_clusters(cluster_id):
    other = cluster_id + "-other"
    exchanges = [
        ShmExchange.create(Segments(name), 0, 1, LAYOUT, LIMITS) for name in (cluster_id, other)
    ]
    assert sweep_stale(cluster_id) == []
    assert unlink_cluster(cluster_id) == [f"nanocp-{cluster_id}-t1-exchange-0"]
    assert segments_of(other) == [f"nanocp-{other}-t1-exchange-0"]
    for exchange in exchanges:
        exchange.close()
    assert not segments_of(cluster_id)


def test_flags_counts_and_rows_have_cache_lines_of_their_own(pair):
    starts = []
    for channel in LAYOUT:
        for parity in range(2):
            views = dict(pair[0].outgoing(channel, 1, parity))
            starts.append(pair[0].flags(channel, 1, parity).outgoing)
            if "count" in views:
                starts.append(views.pop("count").ctypes.data)
            starts.append(min(view.ctypes.data for view in views.values()))
    assert all(start % 64 == 0 for start in starts)
    assert np.all(np.diff(starts) >= 64)


def test_the_fields_of_a_row_are_side_by_side(pair):
    """So rows that were written are one run of bytes, whatever their number."""
    for channel, fields in LAYOUT.items():
        rows = [field for field in fields if field.name != "count"]
        views = [pair[0].outgoing(channel, 1, 0)[field.name] for field in rows]
        (stride,) = {view.strides[0] for view in views}
        row_bytes = [view[0].nbytes for view in views]
        assert sum(row_bytes) <= stride < sum(row_bytes) + 16 * len(rows) + 64
        starts = sorted(
            (view.ctypes.data, size) for view, size in zip(views, row_bytes, strict=True)
        )
        assert all(a + size <= b for (a, size), (b, _) in pairwise(starts))
        assert starts[-1][0] + starts[-1][1] <= starts[0][0] + stride
