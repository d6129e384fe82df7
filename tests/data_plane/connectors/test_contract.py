"""The connector between a fake vLLM and recorded rings: every page is the one cut from dense KV."""

import threading
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.prefill.connector.ticket import KEY, EngineTicket
from data_plane.transport.exchange import PeerLost
from harness.hash_clusters.hash_model import HashModel
from harness.vllm.fake_vllm import SAMPLED, FakeVllm

MODEL = HashModel()
WAIT_S = 120


class Places:
    """Rings that record pages. With a gate, each page waits until the test lets it through."""

    def __init__(self, is_gated=False):
        self.pages = defaultdict(list)
        self.at_gate = threading.Semaphore(0)
        self.gate = threading.Semaphore(0) if is_gated else None
        self.lost = set()

    def write(self, ticket, instance, *, page, num_tokens, payload, is_cancelled):
        # The payload is copied once there is a place, as a ring does.
        if self.gate is not None:
            self.at_gate.release()
            while not self.gate.acquire(timeout=0.01):
                if is_cancelled():
                    return False
        if instance in self.lost:
            raise PeerLost(f"instance {instance} is gone")
        kv = np.array(payload).view(np.uint64).reshape(ticket.num_layers, -1)
        self.pages[ticket.ticket, page].append((instance, num_tokens, kv))
        return True

    def close(self):
        pass


def ticket_of(number, num_tokens, shared_pages=0, num_instances=2, **other):
    """A ticket for all pages but the first `shared_pages`, over two runs."""
    num_pages = -(-num_tokens // 64)
    middle = (shared_pages + num_pages) // 2
    runs = ((shared_pages, middle - shared_pages, 0), (middle, num_pages - middle, 1))
    fields = {
        "cluster": "c",
        "term": 1,
        "ticket": number,
        "num_tokens": num_tokens,
        "targets": tuple(run for run in runs if run[1]),
        "peers": {0: ("node", ""), 1: ("node", "")},
        "writer": 0,
        "timeout_ms": 1000,
        "page_backend": "auto",
        "kv_dtype": "auto",
        "num_layers": MODEL.num_layers,
        "fingerprint": {},
        "engine": "",
    } | other
    return EngineTicket(**fields)


def run(engine, limit_s=WAIT_S):
    deadline = time.monotonic() + limit_s
    while engine.is_busy:
        assert time.monotonic() < deadline, "the engine does not come to rest"
        engine.step()


def expected(token_ids, ticket, has_mtp=False):
    """By page: (instance, tokens, KV [layers, 64]). An MTP layer that the engine lacks is zero."""
    pages = MODEL.prefill((*token_ids, SAMPLED), ticket.num_tokens, has_mtp)
    none = np.zeros((1, 64), np.uint64)
    return {
        page: (
            ticket.instance_of(page),
            min(64, ticket.num_tokens - 64 * page),
            np.concatenate([kv, none])[: ticket.num_layers],
        )
        for page, kv in enumerate(pages)
        if ticket.instance_of(page) is not None
    }


def assert_pages(places, token_ids, ticket, is_complete=True, has_mtp=False):
    """Each page that was sent is right, however often; with is_complete all of them were."""
    wanted = expected(token_ids, ticket, has_mtp)
    sent = {page for number, page in places.pages if number == ticket.ticket}
    assert sent == set(wanted) if is_complete else sent <= set(wanted)
    for page in sent:
        for instance, num_tokens, kv in places.pages[ticket.ticket, page]:
            assert (instance, num_tokens) == wanted[page][:2]
            np.testing.assert_array_equal(kv, wanted[page][2])


PROMPTS = st.lists(
    st.tuples(
        st.integers(1, 300),  # length
        st.integers(0, 1),  # prompts of one family begin alike
        st.integers(0, 2),  # pages that the receivers share already
        st.one_of(st.none(), st.integers(0, 12)),  # the step before which it is aborted
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    block_size=st.sampled_from([16, 32, 64, 128]),
    prompts=PROMPTS,
    seed=st.integers(0, 2**16),
    chunk=st.sampled_from([(1, 40), (1, 200), (64, 64), (300, 300)]),
    preempted_share=st.sampled_from([0.0, 0.3]),
    has_mtp=st.booleans(),
)
def test_every_page_that_is_sent_is_right(
    block_size, prompts, seed, chunk, preempted_share, has_mtp
):
    """Prompts of instances with drafts and without: the engine has KV of an MTP layer or not."""
    places = Places()
    engine = FakeVllm(block_size, places, seed, chunk, preempted_share, has_mtp=has_mtp)
    answers, tickets = {}, {}
    for number, (length, family, num_shared, _) in enumerate(prompts):
        ids = [(family * 37 + position * 5) % MODEL.vocab_size for position in range(length)]
        layers = MODEL.num_layers + (seed + number) % 2
        shared = min(num_shared, length // 64)
        tickets[number] = ids, ticket_of(number, length, shared, num_layers=layers)
        engine.add(
            f"r{number}",
            ids,
            tickets[number][1].to_params(),
            lambda answer, number=number: answers.__setitem__(number, answer),
        )
    for step in range(13):
        for number, (*_, aborted_at) in enumerate(prompts):
            if aborted_at == step:
                engine.abort(f"r{number}")
        engine.step()
    run(engine)
    for number, (ids, ticket) in tickets.items():
        assert_pages(places, ids, ticket, prompts[number][3] is None, has_mtp)
        if prompts[number][3] is None:
            assert answers[number][KEY]["num_pages"] == -(-len(ids) // 64)
    assert engine.num_blocks_used == 0 and not engine.requests.is_holding
    engine.sender.close()


def one_prompt(length=200, **options):
    """A prompt in an engine whose pages wait at a gate."""
    places = Places(is_gated=True)
    engine = FakeVllm(16, places, 0, (300, 300), **options)
    ids = list(range(7, 7 + length))
    ids = [token % MODEL.vocab_size for token in ids]
    ticket = ticket_of(1, length)
    engine.add("r", ids, ticket.to_params())
    return engine, places, ids, ticket


def test_blocks_of_an_ended_prompt_are_held_until_its_pages_are_sent():
    engine, places, ids, ticket = one_prompt()
    for _ in range(5):
        engine.step()
    assert places.at_gate.acquire(timeout=WAIT_S)
    assert engine.num_blocks_used == 13 and engine.requests.is_holding
    places.gate.release(10)
    run(engine)
    assert_pages(places, ids, ticket)
    assert engine.num_blocks_used == 0


def test_an_abort_frees_the_blocks_at_once_though_the_ring_is_full():
    engine, places, ids, ticket = one_prompt()
    engine._chunk_tokens = (100, 100)
    engine.step()
    assert places.at_gate.acquire(timeout=WAIT_S)
    engine.abort("r")
    run(engine, limit_s=5)
    assert engine.num_blocks_used == 0
    assert_pages(places, ids, ticket, is_complete=False)


def test_pages_of_a_preempted_prompt_are_sent_again_from_its_new_blocks():
    engine, places, ids, ticket = one_prompt()
    engine._chunk_tokens = (140, 140)
    engine.step()
    assert places.at_gate.acquire(timeout=WAIT_S)
    engine._preempted_share = 1.0
    engine.step()
    engine._preempted_share = 0.0
    places.gate.release(20)
    run(engine)
    assert_pages(places, ids, ticket)


def test_a_receiver_that_is_lost_costs_its_ticket_only():
    places = Places()
    places.lost.add(0)
    engine = FakeVllm(32, places, 0, (30, 50))
    tickets = {n: ([n + 1] * 200, ticket_of(n, 200, targets=((0, 4, n),))) for n in (0, 1)}
    for number, (ids, ticket) in tickets.items():
        engine.add(f"r{number}", ids, ticket.to_params())
    run(engine)
    assert_pages(places, *tickets[1])
    assert not [key for key in places.pages if key[0] == 0]
    assert engine.num_blocks_used == 0


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"fingerprint": {"rope": "plain"}}, "rope is yarn in this engine and plain in NanoCP"),
    ({"fingerprint": {"rope": "yarn", "x": "1"}}, "x is None in this engine and 1 in NanoCP"),
    ({"num_tokens": 199}, "the prompt has 200 tokens, its ticket 199"),
    ({"page_backend": "nixl"}, "page_backend is nixl, and NIXL is not installed beside vLLM"),
])  # fmt: skip
def test_a_ticket_that_does_not_fit_is_refused_with_both_values(changed, sentence, monkeypatch):
    monkeypatch.setattr("data_plane.prefill.connector.requests.nixl_package", lambda: None)
    places = Places()
    engine = FakeVllm(16, places, 0, fingerprint={"rope": "yarn"})
    ticket = replace(ticket_of(1, 200, fingerprint={"rope": "yarn"}), **changed)
    answers = []
    engine.add("r", [1] * 200, ticket.to_params(), answers.append)
    run(engine)
    assert answers == [{KEY: {"refused": sentence}}]
    assert not places.pages and engine.num_blocks_used == 0


@pytest.mark.parametrize("params", [{"protocol": 1}, {"protocol": 2, "cluster": 3}])
def test_a_ticket_that_cannot_be_read_is_refused(params):
    engine = FakeVllm(16, Places(), 0)
    answers = []
    engine.add("r", [1] * 20, {KEY: params}, answers.append)
    run(engine)
    assert list(answers[0][KEY]) == ["refused"]


def test_a_request_without_a_ticket_is_none_of_ours():
    engine = FakeVllm(16, Places(), 0)
    answers = []
    for params in (None, {}, {"do_remote_decode": True}):
        engine.add(f"r{len(answers)}", [1] * 200, params, answers.append)
        run(engine)
    assert answers == [None] * 3


def test_an_engine_that_holds_many_blocks_says_that_it_is_busy():
    engine, places, _, _ = one_prompt(max_held_blocks=12)
    answers = []
    engine.step()
    assert places.at_gate.acquire(timeout=WAIT_S)
    engine.add("late", [1] * 20, ticket_of(2, 20).to_params(), answers.append)
    while not answers:
        engine.step()
    assert list(answers[0][KEY]) == ["busy"]
    places.gate.release(10)
    run(engine)


def test_a_process_that_was_not_probed_sends_nothing():
    engine = FakeVllm(16, Places(), 0)
    answers = []
    engine.add("probe", [1] * 65, ticket_of(1, 65).to_params(), answers.append)
    run(engine)
    own = answers[0][KEY]["engine"]
    for number, name in enumerate((own, "another")):
        ticket = ticket_of(2 + number, 65, engine=name)
        engine.add(name, [1] * 65, ticket.to_params(), answers.append)
        run(engine)
    assert "num_pages" in answers[1][KEY]
    assert list(answers[2][KEY]) == ["restarted"]
