"""What a puller says to engines, and when: heartbeats, deadlines, ends, engines that are gone."""

from dataclasses import replace

import pytest

from data_plane.prefill.pull.connections import MAX_ENGINES
from harness.members.pulled_engines import (
    EXPIRED,
    LEASE_S,
    PATIENT,
    URL,
    Clock,
    assert_arrives,
    blocks,
    failures,
    now_of,
    prefill,
    pulling,
    refusals,
    reports,
    say,
    taken,
)
from harness.waits import until
from nanocp.values.commands import (
    CancelPrefill,
    HoldBlocks,
    PagesArrived,
    RefuseBlocks,
    ReleaseBlocks,
)
from nanocp.values.members import BlocksRefused, EnginesNow


def test_blocks_that_wait_or_are_read_get_heartbeats_and_can_be_read_later(link, engine, both):
    clock = Clock()
    engine.may_read.clear()
    with pulling(link, engine, PATIENT, clock):
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")), prefill(11))
        until(lambda: engine.beats() and engine.beats()[-1] == ["a", "b"])
        for number in range(12):
            num_told = len(engine.told)
            clock.forward_s = 6.0 * (number + 1)
            say(link, CancelPrefill(1 << 40))
            until(lambda: len(engine.told) > num_told)  # noqa: B023
        assert all(each == ["a", "b"] for each in engine.beats()[-12:])
        engine.may_read.set()
        assert_arrives(both, "a", 11)
        say(link, prefill(12, 2))
        assert_arrives(both, "b", 12)
    assert not failures(link)


def test_nothing_is_read_after_the_deadline(link, engine, both):
    """Also in the middle of a read, and by a prompt that only waits for another one's end."""
    clock = Clock()
    engine.may_read.clear()
    with pulling(link, engine, PATIENT, clock):
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")))
        say(link, prefill(11), prefill(12, 2))
        until(lambda: now_of(link) and now_of(link).tokens_in_flight == 300)
        clock.forward_s = LEASE_S - 4.0  # the process was stopped
        say(link, CancelPrefill(1 << 40))
        until(lambda: len(failures(link)) == 2)
        engine.may_read.set()
        say(link, prefill(13))
        until(lambda: len(failures(link)) == 3)
        assert sorted(failures(link)) == [(11, EXPIRED), (12, EXPIRED), (13, EXPIRED)]
        assert not engine.reads and not taken(both[0])
        say(link, ReleaseBlocks(1), ReleaseBlocks(2))
        until(lambda: engine.freed() == ["a", "b"])


def test_a_page_that_comes_too_late_is_not_sent(link, engine, both):
    clock = Clock()

    def late(pages):
        yield next(pages)
        clock.forward_s = LEASE_S
        yield from pages

    engine.through = late
    with pulling(link, engine, PATIENT, clock):
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: failures(link) == [(11, EXPIRED)])
        assert [page for _, page, *_ in taken(both[0])] == [0]


def test_a_lease_is_not_renewed_by_heartbeats_that_reach_nobody(link, engine, both):
    clock = Clock()
    with pulling(link, engine, PATIENT, clock):
        say(link, HoldBlocks(1, blocks("a")))
        until(lambda: engine.beats() and now_of(link).is_up)
        engine.is_up = False
        for number in range(4):
            clock.forward_s += 5.5
            say(link, CancelPrefill(1 << 40))
            until(lambda: engine.num_unreached == number + 1)  # noqa: B023
        engine.is_up, clock.forward_s = True, 26.0
        say(link, prefill(11))
        until(lambda: failures(link) == [(11, EXPIRED)])
        say(link, HoldBlocks(2, blocks("b")))
        until(lambda: engine.beats()[-1] == ["b"])


def test_blocks_of_two_requests_are_freed_after_the_second(link, engine, both):
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("a")), prefill(11))
        assert_arrives(both, "a", 11)
        say(link, PagesArrived(11), RefuseBlocks(blocks("a")), prefill(12, 2))
        assert_arrives(both, "a", 12)
        assert engine.freed() == []
        say(link, ReleaseBlocks(2))
        until(lambda: engine.freed() == ["a"])


def test_refused_blocks_are_freed_at_once(link, engine, both):
    """A request that comes with them later finds no KV."""
    with pulling(link, engine, PATIENT):
        say(link, RefuseBlocks(blocks("a")), RefuseBlocks(blocks("a")))
        until(lambda: engine.freed() == ["a"])
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: failures(link) == [(11, EXPIRED)])
        say(link, ReleaseBlocks(1), RefuseBlocks(blocks("b")))
        until(lambda: engine.freed() == ["a", "b"])
    assert engine.beats() == []


def test_an_engine_that_is_gone_fails_its_prompts_and_is_met_again(link, engine, both):
    clock = Clock()
    with pulling(link, engine, PATIENT, clock):
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        assert_arrives(both, "a", 11)
        engine.is_up = False
        say(link, HoldBlocks(2, blocks("b")), prefill(12, 2))
        problem = f"prefill failed: {URL}: {URL} does not answer"
        until(lambda: failures(link) == [(12, problem)])
        until(lambda: not now_of(link).is_up and now_of(link).problem)
        engine.is_up = True
        clock.forward_s = 1.5
        say(link, prefill(13, 2))
        assert_arrives(both, "b", 13)
        until(lambda: now_of(link).is_up)
    assert engine.num_meetings == 2


def test_a_thousand_requests_dial_a_dead_engine_once_a_second(link, engine, both):
    clock = Frozen()
    engine.is_up = False
    with pulling(link, engine, PATIENT, clock):
        for number in range(1000):
            say(link, HoldBlocks(number, blocks(f"p{number}")), prefill(number, number))
        until(lambda: len(failures(link)) == 1000)
        assert engine.num_meetings == 1
        clock.forward_s += 1.5
        say(link, *(prefill(number + 1000, number) for number in range(1000)))
        until(lambda: len(failures(link)) == 2000)
        assert engine.num_meetings == 2
        say(link, *(ReleaseBlocks(number) for number in range(1000)), prefill(5000))
        until(lambda: len(failures(link)) == 2001)
        assert engine.num_meetings == 2 and not reports(link, BlocksRefused)


class Frozen(Clock):
    """A time that only the test puts forward."""

    def __call__(self):
        return 1000.0 + self.forward_s


def test_what_cannot_be_read_is_refused_by_name(link, engine, both):
    engine.bad_blocks["b"] = "remote_block_ids has 99, and the engine has 90 blocks"
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")))
        say(link, prefill(12, 2))
        until(lambda: refusals(link) == [(2, engine.bad_blocks["b"])])
        say(link, prefill(11))
        assert_arrives(both, "a", 11)
        say(link, ReleaseBlocks(2))
        until(lambda: engine.freed() == ["b"])
    assert not failures(link) and engine.reads == {"a": 3}


def test_an_engine_that_cannot_be_read_refuses_all_its_requests(link, engine):
    engine.refusal = "remote_host is 10.0.0.1, which prefill.pull.allowed does not have"
    engine.may_meet.clear()
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")), prefill(12, 2))
        until(lambda: engine.num_meetings == 1)
        engine.may_meet.set()
        say(link, prefill(11))
        until(lambda: {request_id for request_id, _ in refusals(link)} == {1, 2})
    assert {message for _, message in refusals(link)} == {engine.refusal}
    assert not failures(link)


def test_another_registration_needs_another_handshake(link, engine, both):
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a", generation=1)), prefill(11))
        assert_arrives(both, "a", 11)
        say(link, HoldBlocks(2, blocks("b", generation=2)), prefill(12, 2))
        assert_arrives(both, "b", 12)
        say(link, HoldBlocks(3, blocks("c", generation=1)), prefill(13, 3))
        assert_arrives(both, "c", 13)
    assert engine.num_meetings == 2


@pytest.mark.parametrize(
    ("error", "is_up"),
    [(RuntimeError("page 1 has another prompt's KV"), True),
     (ConnectionError("the read ended as ERR"), False)],
    ids=["other KV", "NIXL"],
)  # fmt: skip
def test_a_read_that_fails_is_told_and_only_a_broken_connection_is_forgotten(
    link, engine, both, error, is_up
):
    engine.failure = error
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: failures(link) == [(11, f"prefill failed: {URL}: {error}")])
        until(lambda: now_of(link).num_failed == 1)
        assert now_of(link).is_up == is_up
        assert engine.freed() == []


def test_a_read_that_ends_with_an_older_connection_leaves_the_new_one(link, engine, both):
    engine.may_read.clear()
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a", generation=1)), prefill(11))
        until(lambda: now_of(link) and now_of(link).tokens_in_flight == 150)
        say(link, HoldBlocks(2, blocks("b", generation=2)))
        until(lambda: engine.num_meetings == 2 and ["a", "b"] in engine.beats())
        engine.failure = ConnectionError("the engine is met again")
        engine.may_read.set()
        until(lambda: failures(link))
        engine.failure = None
        say(link, prefill(12, 2))
        assert_arrives(both, "b", 12)
    assert engine.num_meetings == 2


def test_a_shutdown_frees_every_block(link, engine, both):
    engine.may_read.clear()
    with pulling(link, engine, PATIENT):
        for number in range(20):
            say(link, HoldBlocks(number, blocks(f"p{number}")))
        say(link, prefill(11), HoldBlocks(50, blocks("other", engine="unmet")))
        until(lambda: now_of(link) and now_of(link).tokens_in_flight == 150)
    assert sorted(engine.freed()) == sorted([*(f"p{number}" for number in range(20)), "other"])


def test_engines_of_long_ago_are_forgotten(link, engine):
    with pulling(link, engine, PATIENT):
        for number in range(MAX_ENGINES + 10):
            host = replace(blocks(f"p{number}", engine=f"e{number}"), port=1000 + number)
            say(link, HoldBlocks(number, host))
        until(lambda: engine.num_meetings == MAX_ENGINES + 10)
        until(lambda: len(reports(link, EnginesNow)[-1].engines) == MAX_ENGINES + 10)
        say(link, *(ReleaseBlocks(number) for number in range(1, MAX_ENGINES + 10)))
        until(lambda: len(engine.freed()) == MAX_ENGINES + 9)
        until(lambda: len(reports(link, EnginesNow)[-1].engines) == MAX_ENGINES)
        urls = [each.url for each in reports(link, EnginesNow)[-1].engines]
        assert "127.0.0.1:1000" in urls, "it is in use"
        until(lambda: engine.num_closed == 10)
