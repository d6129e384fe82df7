"""A front end and the controller's port for it over real sockets, in one process."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from control_plane.frontend.front_end import FrontEnd
from control_plane.frontend.remote import link as link_module
from control_plane.frontend.remote.link import RemoteController
from control_plane.frontend.remote.messages import FrontEndHello
from control_plane.frontend.remote.observations import Observations, replay
from control_plane.frontend.remote.port import FrontEndPort
from control_plane.observe.observer import EndedRequest
from control_plane.ports.members_port import REFUSED, MemberSecrets
from harness.services.frontend_fakes import (
    LIMITS,
    MEMBER_SECRETS,
    TOKENIZER,
    FakeController,
    FakeMember,
    Recorder,
    make_config,
)
from harness.services.kit import ids_of
from harness.services.service_recovery import until
from harness.waits import WAIT_S
from nanocp.client import Client
from nanocp.values.members import Member
from nanocp.values.plan import ClusterLoad, FinishReason, InstanceLoad, Placement
from nanocp.wire.member_metadata import member_metadata

HELD_S = 0.5
LOAD = ClusterLoad(3, 2, (InstanceLoad(100, 1, 5, 0, 3),), 1)


class Remote:
    """Two front ends of one port, each as in a process of its own."""

    def __init__(self) -> None:
        config = make_config()
        self.config = replace(
            config,
            service=replace(config.service, front_ends=2),
            scheduler=replace(config.scheduler, held_timeout_us=round(HELD_S * 1e6)),
        )
        self.observer, self.lost = Recorder(), []
        self.port = FrontEndPort(
            self.config.service,
            self.config.scheduler.held_timeout_us,
            MEMBER_SECRETS,
            self.observer,
            {"metrics": lambda: b"a page"},
            lambda index, pid: self.lost.append(index),
        )
        self.address = self.port.start()
        self.controller = FakeController(self.port.placed)
        self.num_resubmitted = threading.Semaphore(0)
        self.controller.resubmitted = self.num_resubmitted.release
        self.links: dict[int, tuple[RemoteController, FrontEnd]] = {}

    def begin(self, index: int) -> FrontEnd:
        name = f"front end {index}"
        metadata = member_metadata(name, self.port.secrets.issue(name))
        observations, secrets = Observations(), MemberSecrets()
        link = RemoteController(self.address, metadata, observations)
        front_end = FrontEnd(
            self.config, TOKENIZER, LIMITS, secrets, observations, index=index, is_remote=True
        )
        front_end.start()
        threading.Thread(target=link.converse, args=(front_end, secrets), daemon=True).start()
        self.links[index] = link, front_end
        # The port may know of the link before the link's thread has its call.
        until(lambda: index in self.port._attached and hasattr(link, "_call"))
        return front_end

    def kill(self, index: int) -> None:
        link, front_end = self.links.pop(index)
        link._call.cancel()
        front_end.stop("killed")

    def close(self) -> None:
        for index in list(self.links):
            self.kill(index)
        self.port.stop()


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    remote.begin(0)
    remote.begin(1)
    for accepts in remote.port.open(remote.controller, lambda: LOAD):
        accepts.result(WAIT_S)
    assert not any(f._open_requests.closed_because for _, f in remote.links.values())
    yield remote
    remote.close()


def test_a_request_and_its_tokens_go_their_ways(remote):
    front_end = remote.links[1][1]
    member = FakeMember(Member("instance", 0), front_end.members_address)
    with Client(front_end.address) as client:
        chunks = client.generate([5, 6, 7], max_tokens=3, seed=4, user="ada", request_id="mine")
        submission = remote.controller.next_submission()
        assert (submission.request_id, submission.arrival.client_id) == (2, "mine")
        assert (list(submission.prompt_ids), submission.arrival.prompt_len) == ([5, 6, 7], 3)
        assert (submission.front_end, submission.arrival.tenant) == (
            front_end.members_address,
            "ada",
        )
        assert remote.port.num_open == 1, "the controller knows it at once"
        member.deliver(2, 0, [20, 21, 22], FinishReason.LENGTH)
        assert ids_of(chunks) == [20, 21, 22]
        assert client.loads() == ClusterLoad() or client.loads() == LOAD
        assert len(client.server_info().front_ends) == 2
    member.close()
    until(lambda: ("finished", FinishReason.LENGTH, 3) in remote.observer.calls)
    assert [call for call in remote.observer.calls if call[0] == "submitted"] == [("submitted", 3)]
    assert remote.port.num_open == 0
    assert remote.links[1][0].page("metrics") == b"a page"


def test_tokens_wait_for_the_placement_that_allows_them(remote):
    front_end = remote.links[0][1]
    remote.controller.placed = lambda *placed: None
    member = FakeMember(Member("instance", 3), front_end.members_address)
    with Client(front_end.address) as client:
        chunks = client.generate([5], max_tokens=2)
        number = remote.controller.next_submission().request_id
        member.deliver(number, 0, [30, 31], FinishReason.LENGTH)
        until(lambda: front_end._streams._by_request[number].attempts.unplaced)
        remote.port.placed(Placement(number, 3, 1, ((0, 3),)), 0)
        assert ids_of(chunks) == [30, 31]
    member.close()


def test_requests_of_a_lost_front_end_run_on_for_a_while(remote):
    first, second = (remote.links[index][1] for index in (0, 1))
    with Client([first.address, second.address]) as client, Client(first.address) as other:
        chunks = client.generate([5], max_tokens=2)
        mine = remote.controller.next_submission()
        left = other.generate([6], max_tokens=2)
        lost = remote.controller.next_submission()
        first_chunk = threading.Thread(target=lambda: next(chunks), daemon=True)
        first_chunk.start()
        remote.kill(0)
        resumed = remote.controller.next_submission()
        assert (resumed.request_id, resumed.arrival.attempt) == (2, 1)
        assert resumed.arrival.client_id == mine.arrival.client_id
        # What nobody reads any more ends at once, what nobody resumes a little later.
        assert remote.controller.next_abort() == mine.request_id
        assert remote.controller.next_abort() == lost.request_id
        left.close()
        member = FakeMember(Member("instance", 0), second.members_address)
        member.deliver(2, 0, [8, 9], FinishReason.LENGTH, attempt=1)
        first_chunk.join(WAIT_S)
        member.close()
        assert not remote.port._attendance.unattended
        assert remote.lost == [0]
        front_end = remote.begin(0)
        until(lambda: not front_end._open_requests.closed_because)
        with Client(front_end.address) as again:
            last = again.generate([7], max_tokens=2)
            number = remote.controller.next_submission().request_id
            assert number > lost.request_id and number % 2 == 1, "no number is used twice"
            last.close()


def test_another_controller_gets_every_open_request_again(remote):
    link, front_end = remote.links[0]
    link._orphan_s = WAIT_S
    # The front end is back before its requests would be ended, however slow it dials.
    remote.port._attended_s = WAIT_S
    member = FakeMember(Member("instance", 0), front_end.members_address)
    with Client(front_end.address) as client:
        chunks = client.generate([5], max_tokens=3)
        first = remote.controller.next_submission()
        member.deliver(first.request_id, 0, [20])
        assert next(chunks).token_ids == (20,)
        # The same port takes it back as that of another controller would.
        link._call.cancel()
        again = remote.controller.next_submission()
        assert (again.request_id, again.arrival.attempt) == (first.request_id, 1)
        assert list(again.prompt_ids) == [5, 20]
        member.deliver(first.request_id, 1, [98], attempt=0)
        member.deliver(first.request_id, 1, [21, 22], FinishReason.LENGTH, attempt=1)
        assert ids_of(chunks) == [21, 22]
        assert remote.port._attendance.first_ids[0] == first.request_id + 2
        assert remote.controller.aborts.empty()
    member.close()


def test_a_lost_front_end_owes_no_answer(remote):
    assert remote.port.interrupted() == 2
    for _ in range(2):
        assert remote.num_resubmitted.acquire(timeout=WAIT_S)
    link, _ = remote.links[0]
    link.resubmitted = lambda: None
    assert remote.port.interrupted() == 2
    assert remote.num_resubmitted.acquire(timeout=WAIT_S)
    remote.kill(0)
    assert remote.num_resubmitted.acquire(timeout=WAIT_S)
    until(lambda: not remote.port._attached.get(0))
    assert remote.port.interrupted() == 1


def test_a_front_end_that_is_lost_is_not_waited_for():
    with contextlib.closing(Remote()) as remote:
        remote.begin(0)
        accepts = remote.port._attached[0].accepts
        assert not accepts.done(), "the cluster has yet to be ready"
        remote.kill(0)
        accepts.result(WAIT_S)


def test_the_port_asks_for_the_secret_of_a_front_end(remote):
    stranger = RemoteController(remote.address, member_metadata("front end 0", "x"), Observations())
    stranger._dial(FrontEndHello())
    with pytest.raises(grpc.RpcError, match=REFUSED):
        next(stranger._call)


def test_observations_are_the_same_calls_elsewhere():
    observations, recorder = Observations(), Recorder()
    assert observations.take() == b""
    ended = EndedRequest(3, 2, 9, 0.5, None, None, None, "mine", 8)
    observations.on_request(1)
    observations.on_submitted(3)
    observations.on_first_token(0.25)
    observations.on_token(0.125)
    observations.on_token(0.5, "term")
    observations.on_finished(FinishReason.STOP, ended)
    observations.on_request_over(2)
    observations.http_responded("/v1/models", "GET", 200)
    content = observations.take()
    assert json.loads(content)
    assert replay(content, recorder) == [ended]
    assert recorder.calls == [
        ("submitted", 3), ("first",), ("token",), ("token", "term"),
        ("finished", FinishReason.STOP, 2),
    ]  # fmt: skip
    assert recorder.longest == [2] and recorder.responses == [("/v1/models", "GET", 200)]


def times_dialled(
    monkeypatch: pytest.MonkeyPatch, orphan_ms: float, *, orphaned: bool = False
) -> int:
    """How often a front end dials until it gives up, when only the first dial finds anybody."""
    link, num_dials = RemoteController("127.0.0.1:1", (), Observations(), orphan_ms), 0
    link._channel = grpc.insecure_channel("127.0.0.1:1")

    def converse(*arguments: Any) -> None:
        nonlocal num_dials
        num_dials += 1
        link._has_heard = num_dials == 1
        if orphaned:
            # Threads of other tests may ask too: from the first dial on, all get one answer.
            monkeypatch.setattr(link_module.os, "getppid", lambda: 1)

    monkeypatch.setattr(link, "_converse", converse)
    monkeypatch.setattr(link, "_observe_for_ever", lambda: None)
    monkeypatch.setattr(link_module, "_REDIAL_S", 0.05)
    assert link.converse(object(), MEMBER_SECRETS) == "the controller is lost"  # type: ignore[arg-type]
    return num_dials


def test_another_controller_is_waited_for_as_long_as_configured(monkeypatch):
    began_s = time.monotonic()
    assert 2 <= times_dialled(monkeypatch, orphan_ms=500) <= 12  # It dials every 50 ms at most.
    assert time.monotonic() - began_s >= 0.45


def test_a_front_end_does_not_wait_when_nobody_could_start_a_controller(monkeypatch):
    assert times_dialled(monkeypatch, orphan_ms=600_000, orphaned=True) == 1
