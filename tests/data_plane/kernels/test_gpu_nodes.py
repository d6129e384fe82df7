"""Instances of two nodes of GPUs, by stand-ins: how they meet, and what keeps them from it."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data_plane.startup import gpu
from data_plane.startup.experimental import deep_ep, nvshmem
from data_plane.startup.experimental.nvshmem import Nvshmem
from data_plane.startup.instance import build_instance
from data_plane.transport.exchange import ExchangeTimeout
from harness.exact.decode_cluster import DecodeCluster, Prompt
from harness.gpu_stand_ins import deep_ep_stand_in
from harness.gpu_stand_ins.fake_nvshmem import FakeLibrary, Group
from harness.gpu_stand_ins.weak_memory import WeakMemory, network
from harness.gpu_stand_ins.whole_instances import stand_in_for_deep_ep
from harness.transports.tcp_nodes import tcp_nodes
from nanocp.config.limits import LimitsConfig
from nanocp.values.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@pytest.fixture
def by_nvshmem(two_instances, monkeypatch):
    """Two instances on a node each: (configuration by dispatch, group of NVSHMEM, libraries).

    A library by seat, and each seat's version of DeepEP by setting `deep_ep_version` of its own.
    """
    config, _ = two_instances
    group, building = Group(2, far=[(0, 1)]), threading.local()
    libraries = {seat: FakeLibrary(group) for seat in range(2)}

    def opened(segments, instance, *site):
        building.instance = instance
        return nvshmem.NvshmemEnd(segments, instance, *site)

    monkeypatch.setattr(
        nvshmem, "load_nvshmem", lambda address: Nvshmem(libraries[building.instance])
    )
    exchange = gpu.EXCHANGES["nvshmem"]._replace(obstacle=lambda **site: "", open=opened)
    monkeypatch.setitem(gpu.EXCHANGES, "nvshmem", exchange)
    monkeypatch.setattr(nvshmem, "forwarding_module", lambda exchange: 5)
    stand_in_for_deep_ep(monkeypatch, libraries)
    own = deep_ep_stand_in.deep_ep

    def deep_ep_here(name):
        here = libraries[building.instance]
        return SimpleNamespace(
            Buffer=own.Buffer, __version__=getattr(here, "deep_ep_version", own.__version__)
        )

    monkeypatch.setattr(deep_ep, "import_module", deep_ep_here)

    def configured(dispatch):
        return replace(
            config,
            cluster=replace(config.cluster, instances_per_node=1, redundant_experts=1),
            scheduler=replace(config.scheduler, policy="fixed_degree:2"),
            data_plane=replace(
                config.data_plane, exchange_backend="nvshmem", dispatch_backend=dispatch
            ),
        )

    return configured, group, libraries


@pytest.mark.parametrize("dispatch", ["auto", "deep_ep"])
def test_instances_of_two_nodes_meet_by_nvshmem(mini, by_nvshmem, dispatch):
    """Each is alone at first; then NVSHMEM's memory is taken, and its module initialised.

    Beside DeepEP it is DeepEP that starts it, and both are in one group. Experts move.
    """
    (path, oracle), (configured, group, libraries) = mini, by_nvshmem
    config, prompts = configured(dispatch), []
    moving = replace(config, cluster=replace(config.cluster, expert_load_mb_per_s=1000))
    with network(WeakMemory(group, seed=1)), DecodeCluster(moving, path) as cluster:
        while not cluster.moved.counts["moves_done"]:
            ids = [*range(2, 72 - len(prompts))]
            prompts += cluster.run([Prompt(ids, SamplingParams(max_tokens=5, temperature=0.0))])
            assert len(prompts) < 10, cluster.moved.counts
        selected = cluster.instances[0].selected
    assert [library.modules for library in libraries.values()] == [[5], [5]]
    num_users = 1 + (dispatch == "deep_ep")
    assert [library.num_users for library in libraries.values()] == [num_users] * 2
    assert all(memory.any() for memories in group.memory.values() for memory in memories)
    expected = {"deep_ep": "deep_ep, as configured"}.get(
        dispatch, "exchange, because exchange_backend is nvshmem"
    )
    assert f"dispatch: {expected}" in selected
    assert any(each.startswith("exchange: nvshmem, experimental") for each in selected)
    for prompt in prompts:
        assert oracle.judge(prompt.ids, prompt.output).exact and len(prompt.output) == 5


@pytest.mark.parametrize(("dispatch", "fault", "sentence"), [
    ("auto", "NVSHMEM", r"instance 1 has NVSHMEM 3.3.9, and instance 0 NVSHMEM 3.4.5: install the"),
    ("deep_ep", "NVSHMEM", r"instance 1 has NVSHMEM 3.3.9, and instance 0 NVSHMEM 3.4.5: install"),
    ("deep_ep", "DeepEP", r"instance 1 has deep_ep 2.0.0, torch .*, and instance 0 deep_ep 2.1.0"),
    ("auto", "network", r"exchange-1 could not be attached at 127.0.0.1:\d+ in 300 ms: .*refused.*"
                        "; nodes must reach each other on all ports"),
])  # fmt: skip
def test_what_keeps_nodes_from_meeting_is_said_before_anything_is_captured(
    mini, by_nvshmem, cluster_id, dispatch, fault, sentence
):
    """By every node that can see it, in one sentence; NVSHMEM has not started then."""
    (path, _), (configured, group, libraries) = mini, by_nvshmem
    limits = LimitsConfig(retry_ms=10, plan_timeout_ms=200, exchange_timeout_ms=300)
    config = replace(configured(dispatch), limits=limits)
    if fault == "NVSHMEM":
        libraries[1].version = (3, 3, 9)
    libraries[1].deep_ep_version = "2.0.0" if fault == "DeepEP" else "2.1.0"

    def entered(seat):
        instance = build_instance(config, seat, nodes[seat], path)
        try:
            instance.connect()
        except Exception as error:
            return error, instance._num_graphs
        finally:
            instance.close()

    with tcp_nodes(cluster_id) as nodes, ThreadPoolExecutor(2) as pool:
        if fault == "network":
            nodes[1].close()
        found = list(pool.map(entered, range(1 if fault == "network" else 2)))
    kind = ExchangeTimeout if fault == "network" else ValueError
    assert all(isinstance(error, kind) and num is None for error, num in found), found
    assert re.search(sentence, str(found[0][0])), found
    assert not group.memory and [each.num_users for each in libraries.values()] == [0, 0]
