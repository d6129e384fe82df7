"""The GPU's step in one term after the other, interpreted: peers are lost, survivors go on."""

import pytest
import torch

from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.transport.exchange import ExchangeTimeout, TermOver
from harness.gpu import gpu_cluster
from harness.gpu.gpu_cluster import GpuCluster
from harness.gpu.nixl_ep_cluster import NixlEpCluster
from harness.gpu_stand_ins.recorded_calls import RecordedSteps
from nanocp.values.plan import PAGE_SIZE


def prompt(length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 320, (length,), generator=generator).tolist()


def advance(step):
    """Let an instance's step go on to where it waits; return whether it has not ended."""
    return next(step, StopIteration) is not StopIteration


def in_flight(cluster, instance):
    """(frame, offset) here of the positions that the next step writes."""
    places = set()
    for request in cluster.requests:
        page, offset = divmod(len(request.ids) - 1, PAGE_SIZE)
        holder, frame = request.pages[page]
        if holder == instance:
            places.add((frame, offset))
    return places


def changed(before, after):
    """(frame, offset) of what differs, of any layer."""
    differs = (before.view(torch.int32) != after.view(torch.int32)).any(dim=3).any(dim=0)
    return {(frame, offset) for frame, offset in differs.nonzero().tolist()}


def test_wherever_a_peer_is_lost_the_wait_ends_and_committed_kv_stays(mini):
    """Instance 1 stops before each part of a step; then instance 0's term is over."""
    path, oracle = mini
    cluster = GpuCluster(path, num_parts=2, seed=3)
    cluster.add(prompt(70), degree=2)
    cluster.add(prompt(63, seed=2), degree=2)
    cluster.step()
    survivor, term, num_over = cluster.instances[0], 1, 0
    scratch = survivor.frames.layers.shape[1] - 1
    num_parts = len(survivor.step.tags)
    last_put = num_parts - 3  # of the experts; then a wait, and their sum
    for num_begun in range(num_parts + 2):
        cluster.stage()
        own, lost = cluster.begin()
        for _ in range(num_begun):
            advance(own)
            advance(lost)
        before = survivor.frames.layers.clone()
        survivor.exchange.ended[0] = term
        while advance(own):
            pass
        try:
            survivor.step.check()
        except TermOver:
            num_over += 1
        places = changed(before, survivor.frames.layers)
        assert {place for place in places if place[0] != scratch} <= in_flight(cluster, 0)
        term += 1
        cluster.begin_term(term, [0, 1])
    assert num_over == last_put + 2, "behind the last put nothing is awaited"
    for _ in range(2):
        cluster.step()
    cluster.assert_exact(oracle)


class OneBucket(BucketTable):
    """A table with one bucket for all shapes."""

    def all(self):
        return [Bucket(4, 8)]

    def lookup(self, num_rows, num_received, width=1, has_links=True):
        return Bucket(4, 8)


@pytest.mark.parametrize("kind", [GpuCluster, NixlEpCluster])
@pytest.mark.parametrize("num_steps", [2])
def test_survivors_go_on_with_what_they_captured(mini, monkeypatch, num_steps, kind):
    """One of three instances is lost inside a step, two hold all experts, and it comes again."""
    monkeypatch.setattr(gpu_cluster, "BucketTable", OneBucket)
    path, oracle = mini
    cluster = kind(path, num_instances=3, num_parts=2, num_redundant=1)
    recorder = RecordedSteps()
    cluster.phases = recorder.phases
    for number, length in enumerate((1, 70, 63, 66)):
        cluster.add(prompt(length, seed=number), degree=min(number + 1, 2))
    for _ in range(num_steps):
        cluster.step()
    captured = {key: list(phases) for key, phases in recorder.phases_of.items()}
    assert len(captured) == 3
    cluster.stage()
    steps = cluster.begin()
    for step in steps * 5:
        advance(step)
    for seat, step in enumerate(steps[:2]):
        cluster.instances[seat].exchange.ended[0] = 1
        while advance(step):
            pass
        with pytest.raises(TermOver, match="term 1 is over"):
            cluster.instances[seat].step.check()

    cluster.begin_term(2, [0, 1])
    lost = [r for r in cluster.requests if any(holder == 2 for holder, _ in r.pages)]
    kept = [r for r in cluster.requests if r not in lost]
    assert kept and lost, "of both kinds"
    for request in kept:
        request.kv_binding = sorted({*request.kv_binding} - {2}) or [0]
        if request.moe_binding == 2:
            request.moe_binding = request.kv_binding[0]
    for request in lost:
        cluster.submit_again(request)
    for _ in range(num_steps):
        cluster.step()

    newcomer = cluster.instances[2]
    newcomer.frames.layers.fill_(7.0)
    if kind is NixlEpCluster:
        cluster.start(2)
    for key in [key for key in recorder.phases_of if key[0] is newcomer]:
        del recorder.phases_of[key]
    cluster.begin_term(3, [0, 1, 2])
    cluster.add(prompt(64, seed=9), degree=3)
    for _ in range(num_steps):
        cluster.step()
    for key, phases in captured.items():
        if key[0] is not newcomer:
            assert recorder.phases_of[key] == phases, "nothing was captured again"
    cluster.assert_exact(oracle)
    assert max(len(request.output) for request in cluster.requests) == 3 * num_steps


def test_rows_by_nixl_ep_have_the_tokens_of_the_model_and_a_peer_given_up_is_an_error(mini):
    """A step whose mixture gave a peer up in silence is no step."""
    path, oracle = mini
    cluster = NixlEpCluster(path, num_parts=2, seed=3)
    cluster.add(prompt(70), degree=2)
    cluster.add(prompt(5, seed=2), degree=1)
    for _ in range(3):
        cluster.step()
    cluster.assert_exact(oracle)
    cluster.forget_requests(seed=0)
    cluster.stage()
    own, _ = cluster.begin()
    while advance(own):
        pass
    with pytest.raises(ExchangeTimeout, match="rows of instance 1 in a mixture"):
        cluster.instances[0].step.check()
