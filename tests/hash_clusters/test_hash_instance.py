"""HashInstance's arithmetic, and its interface when each instance waits in a thread of its own."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.scheduler import Scheduler
from harness.exact.settings import configured
from harness.hash_clusters import hash_model
from harness.hash_clusters.hash_instance import HashInstance, region_layout
from harness.hash_clusters.hash_model import HashModel
from harness.transports.local_exchange import LocalExchange
from harness.transports.local_pages import LocalPageRing, local_peer_rings
from nanocp.values.plan import Arrival, TargetRun, Transfer, TransferDone, TransferFenced
from nanocp.values.sampling import RowInput, SamplingParams
from nanocp.wire.rows import encode_row_input

CONFIG = configured(
    num_instances=3, num_frames=16, max_model_len=1024, policy="fixed_degree:3", steps_per_window=2
)


def make_instances(config=CONFIG, model=None):
    num = config.cluster.num_instances
    exchanges = LocalExchange.create_all(num, region_layout(config), config.limits)
    return [
        HashInstance(config, model or HashModel(), exchange, [LocalPageRing()], moves)
        for exchange, moves in zip(exchanges, local_peer_rings(num), strict=True)
    ]


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8),
    st.integers(0, 8),
)
def test_partials_of_shards_add_to_the_whole(query, entries, cut):
    whole = hash_model.partial(query, sum(entries))
    shards = hash_model.partial(query, sum(entries[:cut])) + hash_model.partial(
        query, sum(entries[cut:])
    )
    assert shards % 2**64 == whole


def test_a_model_with_more_dense_layers_than_layers_is_refused():
    with pytest.raises(ValueError, match="num_dense_layers is 3; it must be from 0 to 2"):
        HashModel(num_layers=2, num_dense_layers=3)


def test_every_input_changes_the_output():
    model = HashModel(vocab_size=1 << 30)
    params = SamplingParams(max_tokens=4)
    base = model.generate([1, 2, 3], params)
    others = [
        model.generate([1, 9, 3], params),
        model.generate([2, 1, 3], params),
        model.generate([1, 2, 3], SamplingParams(max_tokens=4, seed=1)),
    ]
    assert all(other[0] != base[0] for other in others)


def test_kv_is_a_function_of_all_that_comes_before_and_of_nothing_else():
    model = HashModel()
    page = model.prefill(list(range(80)), 80)[1]
    assert (model.prefill(list(range(90)), 79)[1][:, :15] == page[:, :15]).all()
    other = model.prefill([1, 1, *range(2, 80)], 80)[1]
    assert (other[0] == page[0]).all() and not (other[1, :16] == page[1, :16]).any(), (
        "the first layer sees no other token"
    )


def test_begin_and_run_step_wait_in_threads():
    """The tokens are the oracle's, over three shards."""
    instances = make_instances()
    scheduler = Scheduler(CONFIG.cluster, CONFIG.scheduler)
    params = SamplingParams(max_tokens=9, seed=5)
    prompt_ids = [7] + list(range(200)) * 2
    row_start = encode_row_input(RowInput(prompt_ids[-1], params, "front-end:1"))
    plan = scheduler.plan_window([Arrival(1, len(prompt_ids), 9, row_start)], 0)
    transfer = plan.transfers[0]
    pages = HashModel().prefill(prompt_ids, transfer.num_tokens)
    for page, instance in transfer.instances().items():
        instances[instance].pages.rings[0].put(transfer.ticket, page, pages[page])
    events = []
    for instance in instances:
        instance.pages.copy_arrived_pages()
        assert instance.poll().events == (), "a page before its `expect` waits in the ring"
        instance.pages.expect(transfer)
        instance.pages.copy_arrived_pages()
        events += instance.poll().events
    assert events == [TransferDone(transfer.ticket, instance) for instance in range(3)]
    tokens = []
    for _ in range(6):
        plan = scheduler.plan_window(events, 0)
        if plan.window is None and not events:
            break
        events = []
        threads = [
            threading.Thread(target=run_window, args=pair)
            for pair in zip(instances, plan.instances, strict=False)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for instance in instances:
            polled = instance.poll()
            events += polled.events
            tokens += [token.token_id for token in polled.tokens]
    assert tokens == HashModel().generate(prompt_ids, params)
    assert scheduler.requests.num_running == 0


def run_window(instance, plan):
    assert instance.begin(plan) is None
    for _ in range(plan.num_steps):
        instance.run_step()


def test_a_fenced_ticket_is_refused_also_for_pages_that_already_arrived():
    instance = make_instances()[0]
    transfer = Transfer(3, 1, 100, (TargetRun(0, 2, 0, 4),))
    instance.pages.expect(transfer)
    instance.pages.rings[0].put(3, 0, np.ones((2, 64), np.uint64))
    instance.pages.copy_arrived_pages()
    before = instance._frames.kv.copy()
    instance.pages.rings[0].put(3, 1, np.ones((2, 64), np.uint64))
    instance.pages.fence(3)
    instance.pages.fence(77)
    instance.pages.copy_arrived_pages()
    assert instance.poll().events == (TransferFenced(3, 0), TransferFenced(77, 0))
    assert (instance._frames.kv == before).all()


def test_a_page_that_two_writers_send_is_taken_once_and_a_new_ticket_holds_up_its_own_ring():
    instance = make_instances()[0]
    instance.pages.rings = [LocalPageRing(), LocalPageRing()]
    content = np.ones((2, 64), np.uint64)
    instance.pages.expect(Transfer(3, 1, 128, (TargetRun(0, 2, 0, 4),)))
    instance.pages.rings[0].put(4, 0, content)
    for page in (0, 0, 1, 1):
        instance.pages.rings[1].put(3, page, content)
    instance.pages.copy_arrived_pages()
    assert instance.poll().events == (TransferDone(3, 0),)
    assert [len(ring) for ring in instance.pages.rings] == [1, 0]
    instance.pages.expect(Transfer(4, 2, 64, (TargetRun(0, 1, 0, 6),)))
    instance.pages.copy_arrived_pages()
    assert instance.poll().events == (TransferDone(4, 0),)
