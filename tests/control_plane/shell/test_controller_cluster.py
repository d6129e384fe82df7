"""The controller with four HashInstances in processes: gRPC and shared memory as in service."""

import contextlib
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from control_plane.ports.controller_interface import Submission
from harness.exact.settings import configured
from harness.hash_clusters.hash_parts import FREE_LINKS
from harness.services.hash_service import (
    CONFIG,
    expected,
    expected_of_all,
    generate,
    generate_all,
    hash_service,
    prompt,
    shared_memory_of,
    with_policy,
)
from harness.services.kit import ids_of
from harness.services.service_recovery import (
    SLOW,
    num_free_frames,
    played_again,
    sample,
    until,
    until_decoding,
)
from nanocp.client import Client, DeadlineExceeded, Unavailable
from nanocp.values.members import PREFILL, Member
from nanocp.values.plan import Arrival

END_S = 15.0
"""All streams have ended this long after an instance is lost (protocol.md, bounded waits):
sooner than by any timeout.
"""
NO_RECOVERY = configured(CONFIG, recovery_timeout_ms=0)
IMPATIENT = configured(
    NO_RECOVERY, exchange_timeout_ms=2500, plan_timeout_ms=2000, retry_ms=500, suspect_ms=60_000
)
"""Peers and the controller wait for windows, and no heartbeat is missed."""


@pytest.mark.parametrize(
    ("policy", "num_steps", "max_tokens"),
    [
        ("dual_balanced", 1, 40),
        ("chaos", 4, 120),
        ("cost_aware", 4, 120),
        *(
            pytest.param(*each, marks=pytest.mark.system)
            for each in (
                ("dual_balanced", 4, 120),
                ("chaos", 1, 40),
                ("cost_aware", 1, 40),
                ("uniform_cp:4", 1, 40),
                ("uniform_cp:4", 4, 120),
            )
        ),
    ],
)
def test_every_token_is_right(policy, num_steps, max_tokens):
    """There are windows enough for pages to move, whenever requests come."""
    lengths = [1, 2, 64, 65, 130, 300, 511, 900, 1, 200]
    config = with_policy(policy, steps_per_window=num_steps, costs=FREE_LINKS)
    with hash_service(config) as service:
        outputs = generate_all(service.address, lengths, max_tokens=max_tokens)
        names = shared_memory_of(service)
        num_moved = sample(service, "pages_moved_total")
    assert outputs == expected_of_all(lengths, max_tokens)
    if policy != "cost_aware":  # moves if what ends when leaves the load uneven
        moves = policy == "chaos"
        assert bool(num_moved) == moves, "chaos moves pages, between processes too"
    assert len(names) == 4 + 4 + 4 * 3
    assert shared_memory_of(service) == []


def test_every_token_is_right_between_nodes():
    """TCP for every pair: hand-offs, page moves and the prefill's pages too."""
    lengths = [1, 64, 130, 300, 900]
    config = configured(with_policy("chaos"), exchange_backend="tcp")
    with hash_service(config) as service:
        outputs = generate_all(service.address, lengths, max_tokens=40)
        assert sample(service, "pages_moved_total")
    assert outputs == expected_of_all(lengths, 40)


def test_an_instance_that_lost_its_table_gets_the_full_one_and_no_token_is_wrong():
    lengths = [300, 130, 64, 700]
    forgetful = "harness.services.hash_members:build_forgetful"
    with hash_service(with_policy("chaos"), forgetful) as service:
        outputs = generate_all(service.address, lengths, max_tokens=60)
        num_resyncs = sample(service, "table_resyncs_total")
    assert outputs == expected_of_all(lengths, 60)
    assert num_resyncs == 2


@pytest.mark.parametrize("member", [Member("instance", 2), PREFILL], ids=str)
def test_a_member_that_is_killed_ends_the_cluster_in_the_stated_time(member):
    with hash_service(NO_RECOVERY, SLOW) as service, ThreadPoolExecutor(8) as pool:
        streams = [
            pool.submit(generate, service.address, prompt(300, number), 1500) for number in range(6)
        ]
        until_decoding(service)
        assert not any(stream.done() for stream in streams)
        service.launcher.kill(member)
        began = time.monotonic()
        assert re.match("instance .: |prefill: ", service.failure.result(END_S))
        if member == PREFILL:
            # What is decoding needs no prefill; a new request does.
            with pytest.raises(Unavailable, match="the prefill was lost"):
                generate(service.address, prompt(300, 9), 5)
        else:
            for stream in streams:
                with pytest.raises(Unavailable, match="was lost"):
                    stream.result(END_S)
            assert time.monotonic() - began < END_S
            with pytest.raises(Unavailable):
                generate(service.address, prompt(3, 9), 5)
            assert service.drain()
        service.stop()
        assert shared_memory_of(service) == []


def go_on(pid):
    """Wake a stopped process, unless the service has ended it already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("how", "culprit", "limits"), [
    ("stopping", "instance .", {}),
    # Its own heartbeats and those of who waits for it say who it is.
    ("hanging", "instance 1", {"exchange_timeout_ms": 8000, "suspect_ms": 10_000}),
])  # fmt: skip
def test_an_instance_that_is_stopped_or_hangs_is_noticed_by_its_peers(how, culprit, limits):
    config, factory = configured(IMPATIENT, **limits), f"harness.services.hash_members:build_{how}"
    with hash_service(config, factory) as service, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(generate, service.address, prompt(300, 1), 1500)
        pid = service.launcher.pid(Member("instance", 1))
        try:
            assert re.search("ExchangeTimeout|PeerLost", service.failure.result(60))
            with pytest.raises(Unavailable, match=f"{culprit} was lost"):
                stream.result(END_S)
        finally:
            go_on(pid)


def test_a_member_that_hangs_while_nothing_runs_is_noticed():
    with hash_service(configured(NO_RECOVERY, suspect_ms=3000)) as service:
        pid = service.launcher.pid(Member("instance", 1))
        os.kill(pid, signal.SIGSTOP)
        try:
            assert service.failure.result(60) == (
                "instance 1: it has sent nothing for suspect_ms (3000 ms)"
            )
        finally:
            go_on(pid)


def test_a_window_that_nobody_reports_has_a_limit():
    with hash_service(IMPATIENT, SLOW) as service, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(generate, service.address, prompt(300, 1), 1500)
        until_decoding(service)
        processes = [
            one.process for member, one in service.launcher._processes.items() if member != PREFILL
        ]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            assert "did not report window" in service.failure.result(60)
            with pytest.raises(Unavailable):
                stream.result(END_S)
            # Two windows are in flight for ever, and nothing else will happen: it must be answered
            # all the same.
            with pytest.raises(Unavailable, match="was lost"):
                generate(service.address, prompt(3, 9), 5)
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)


def test_a_scheduler_that_fails_ends_the_service_and_not_in_silence(tmp_path):
    config = configured(CONFIG, event_log=str(tmp_path / "log"))
    with hash_service(config, SLOW) as service, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(generate, service.address, prompt(300, 1), 1500)
        until_decoding(service)

        def plan_window(events, now_us):
            raise AssertionError("frames do not add up")

        service._controller._scheduler.plan_window = plan_window
        assert (
            service.failure.result(END_S)
            == "the controller failed: AssertionError: frames do not add up"
        )
        # Another thread writes the log.
        until(lambda: (tmp_path / "log").read_text().endswith('"plan":null}\n'), limit_s=END_S)
        began = time.monotonic()
        assert not service.drain()
        service.stop()
        with pytest.raises(Unavailable):
            stream.result(END_S)
        assert time.monotonic() - began < END_S


def break_the_state(service):
    """Miscount what no plan depends on, and give the controller something to plan."""
    controller = service._controller

    def miscount():
        controller._scheduler._admission.queue.num_tokens += 1

    controller._loop.call_soon_threadsafe(miscount)
    controller.abort(999)


def test_an_idle_controller_reports_a_broken_invariant():
    with hash_service() as service:
        assert generate(service.address, prompt(300, 1), 5) == expected(prompt(300, 1), 5)
        assert not service.failure.done(), "a sound state passes"
        break_the_state(service)
        assert (
            service.failure.result(END_S)
            == "the controller failed: AssertionError: the queue counts 1 prompt tokens; it has 0"
        )


def test_invariants_are_checked_only_where_the_configuration_says_so():
    with hash_service(configured(CONFIG, check_invariants=False)) as service:
        break_the_state(service)
        assert generate(service.address, prompt(300, 1), 5) == expected(prompt(300, 1), 5)
        assert not service.failure.done() and service.drain()


def test_submissions_that_the_controller_has_not_taken_are_bounded():
    with hash_service(with_policy("dual_balanced", max_queued_requests=3)) as service:
        controller = service._controller
        go_on = threading.Event()
        controller._loop.call_soon_threadsafe(go_on.wait, 20)
        for request_id in range(1001, 1006):
            controller.submit(Submission(Arrival(request_id, 2, 1), [1, 2]))
        refused = sample(service, "admission_rejections_total", reason="max_queued_requests")
        assert refused == 2
        go_on.set()
        for request_id in range(1001, 1006):
            controller.abort(request_id)


def test_aborts_at_every_stage_free_everything():
    with hash_service(CONFIG, SLOW) as service:
        with Client(service.address) as client:
            for taken in (0, 1, 5):
                chunks = client.generate(prompt(900, taken), max_tokens=500, timeout_s=60)
                for _ in range(taken):
                    next(chunks)
                chunks.close()
            late = client.generate(prompt(900, 1), max_tokens=1000, ignore_eos=True, timeout_s=0.5)
            with pytest.raises(DeadlineExceeded, match="timeout_s ran out"):
                list(late)
        until(lambda: num_free_frames(service) == 4 * CONFIG.cluster.num_frames)
        assert len(generate(service.address, prompt(900, 1), 5)) == 5


@pytest.mark.system
def test_preempted_requests_go_on_as_if_nothing_had_happened(tmp_path):
    """Rows that are promised no frame outgrow the cluster; the event log plays it again."""
    config, log = with_policy("dual_balanced", growth_promise="tokens:0"), tmp_path / "log"
    config = configured(config, event_log=str(log), num_frames=2)
    lengths = [50 + number for number in range(8)]
    with hash_service(config, SLOW) as service:
        outputs = generate_all(service.address, lengths, max_tokens=120)
        num_preemptions = sample(service, "num_preemptions_total")
    assert outputs == expected_of_all(lengths, 120)
    assert num_preemptions >= 1
    played = played_again(log)
    assert (played.difference, played.num_requests) == (None, len(lengths))


def test_a_more_urgent_request_is_placed_before_one_that_came_first():
    with (
        hash_service(configured(CONFIG, num_frames=8), SLOW) as service,
        Client(service.address) as client,
    ):

        def until_there_are(number, metric):
            until(lambda: sample(service, metric) == number)

        running = client.generate(prompt(900, 1), max_tokens=1000)
        until_there_are(1, "num_requests_running")
        first = client.generate(prompt(900, 2), max_tokens=1000, priority=1, timeout_s=60)
        until_there_are(1, "num_requests_waiting")
        urgent = client.generate(prompt(900, 3), max_tokens=1000, timeout_s=60)
        until_there_are(2, "num_requests_waiting")
        running.close()
        assert next(urgent).token_ids, "it is placed, and takes all the room"
        until_there_are(1, "num_requests_waiting")
        urgent.close()
        assert next(first).token_ids


@pytest.mark.parametrize("is_prefill_stopped", [False, True])
def test_a_request_that_waits_too_long_for_its_place_is_told_so(is_prefill_stopped):
    """Also when nothing else happens: the first request's KV never comes."""
    with (
        hash_service(configured(CONFIG, num_frames=8), SLOW) as service,
        Client(service.address) as client,
    ):
        prefill = service.launcher._processes[PREFILL].process
        if is_prefill_stopped:
            os.kill(prefill.pid, signal.SIGSTOP)
        first = client.generate(prompt(900, 1), max_tokens=1000)
        until(lambda: sample(service, "cp_degree_count"))
        second = client.generate(prompt(900, 2), max_tokens=1000, queue_timeout_s=0.3, timeout_s=60)
        with pytest.raises(
            DeadlineExceeded, match=r"not placed before its deadline: it waited \d+ ms in the queue"
        ):
            list(second)
        os.kill(prefill.pid, signal.SIGCONT)
        assert next(first).token_ids, "it was placed before, and its own time does not end"


def test_a_request_whose_last_token_is_lost_gets_it_though_nothing_follows_it(monkeypatch):
    with hash_service() as service, Client(service.address) as client:

        def refuse(instance, tokens):
            monkeypatch.undo()
            raise ValueError("a batch that cannot be read")

        monkeypatch.setattr(service._front_ends._streams, "deliver", refuse)
        (chunk,) = client.generate(prompt(20, 1), max_tokens=1, seed=1, timeout_s=240)
        assert list(chunk.token_ids) == expected(prompt(20, 1), 1)


def test_a_request_whose_tokens_are_lost_goes_on_from_those_in_order(monkeypatch):
    """A token stream that breaks costs the requests it served a pause."""
    with hash_service(CONFIG, SLOW) as service:
        with Client(service.address) as client:
            chunks = client.generate(prompt(200, 1), max_tokens=200, seed=1, timeout_s=240)
            tokens = list(next(chunks).token_ids)

            streams = service._front_ends._streams
            deliver, first = streams.deliver, iter([True])

            def refuse(instance, tokens):
                if not next(first, False):  # Two streams may be here at one time.
                    return deliver(instance, tokens)
                monkeypatch.undo()
                raise ValueError("a batch that cannot be read")

            monkeypatch.setattr(streams, "deliver", refuse)
            tokens += ids_of(chunks)
        assert tokens == expected(prompt(200, 1), 200)
        assert sample(service, "request_attempts_total") == 1
        until(lambda: num_free_frames(service) == 4 * CONFIG.cluster.num_frames)
