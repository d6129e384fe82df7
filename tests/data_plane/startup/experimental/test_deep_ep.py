"""DeepEP against its stand-in: rows between instances, who meets whom, what is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from data_plane.model.norm import rms_norm
from data_plane.moe.rows import name_slots
from data_plane.startup.experimental import deep_ep
from data_plane.startup.experimental.deep_ep import DeepEpExchange, deep_ep_obstacle
from data_plane.startup.experimental.gathering import Gathering
from data_plane.startup.experimental.nvshmem import require_one_library
from data_plane.transport.exchange import ExchangeTimeout, PeerLost, TermOver
from harness.gpu_stand_ins.deep_ep_stand_in import Buffer
from harness.transports.random_tables import numbers_of, random_table
from harness.transports.tcp_nodes import tcp_nodes
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.values.experts import home_table

LIMITS = LimitsConfig(start_timeout_ms=10_000)
CPU = torch.device("cpu")


class Package(SimpleNamespace):
    """A package of this version, whose ranks take turns in one thread once they have met."""

    class Buffer(Buffer):
        wait_s = 0


def package(version="2.1.0"):
    return Package(__version__=version, Buffer=Package.Buffer)


@pytest.fixture
def nodes(cluster_id):
    """A function that makes the segments of instances of so many nodes."""
    with ExitStack() as held:
        yield lambda num: held.enter_context(tcp_nodes(cluster_id, num))


def opened(segments, model, versions=("2.1.0",) * 9, limits=LIMITS, redundant=0):
    """Open every instance's exchange at once; return the exchanges, or what each raised."""
    cluster = ClusterConfig(
        num_instances=len(segments),
        instances_per_node=1,
        redundant_experts=redundant,
        bounds=BoundsConfig(max_rows=16),
    )

    def open_one(instance):
        exchange = DeepEpExchange(segments[instance], instance, cluster, model, limits, CPU)
        try:
            exchange.begin_term(range(len(segments)), package(versions[instance]))
        except Exception as error:
            return error
        return exchange

    with ThreadPoolExecutor(len(segments)) as pool:
        return list(pool.map(open_one, range(len(segments))))


class Numbered:
    """Experts that multiply a row by their number, plus 1."""

    def __init__(self, table, instance):
        held = table.at(instance)
        self.factor_E = torch.tensor([1 + held.get(slot, 0) for slot in range(table.num_slots)])

    def run_grouped(self, x_ESX, count_E):
        return x_ESX * self.factor_E[:, None, None]


def test_rows_of_three_nodes_are_combined_by_weight_with_experts_anywhere(nodes):
    """Seven experts are no multiple of three; a table has them in any of twelve slots."""
    exchanges = opened(nodes(3), SimpleNamespace(num_experts=7, hidden_size=48), redundant=1)
    assert all(isinstance(each, DeepEpExchange) for each in exchanges), exchanges
    generator = torch.Generator().manual_seed(0)
    x_BX = torch.randn(16, 48, generator=generator).bfloat16()
    expert_BK = torch.rand(16, 7, generator=generator).argsort(dim=1)[:, :3]
    weight_BK = torch.rand(16, 3, generator=generator)
    live_B, norm_X = torch.arange(16) % 4 != 1, torch.ones(48, dtype=torch.bfloat16)
    sum_B = (weight_BK * (1 + expert_BK)).sum(dim=1).masked_fill(~live_B, 0)
    for table in (home_table(7, 3, 1), random_table(7, 3, 0, 4)):
        sent, named, load_NE = [], [], torch.zeros(3, 4, dtype=torch.int64)
        for seat, exchange in enumerate(exchanges):
            number_BK = name_slots(expert_BK, live_B, numbers_of(table, 7), seat)
            named.append(number_BK[live_B].flatten())
            sent.append(exchange.dispatch(x_BX * (1 + seat), number_BK, weight_BK))
        for number, exchange in enumerate(exchanges):
            exchange.receive(sent[number])
            exchange.run_experts(sent[number], Numbered(table, number), load_NE[number])
        assert load_NE.flatten().equal(torch.bincount(torch.cat(named), minlength=12))
        for number, (exchange, each) in enumerate(zip(exchanges, sent, strict=True)):
            exchange.receive_sums(each)
            y_BX, normed_BX = exchange.combine(each, x_BX, x_BX, norm_X, 1e-6)
            expected = (2 + (1 + number) * sum_B[:, None]) * x_BX.float()
            torch.testing.assert_close(y_BX.float(), expected, atol=3e-2, rtol=3e-2)
            assert normed_BX.equal(rms_norm(y_BX, norm_X, 1e-6))


MODEL = SimpleNamespace(num_experts=4, hidden_size=48)


def test_another_version_on_one_node_is_named_by_all_before_anything_starts(nodes):
    found = opened(nodes(3), MODEL, versions=("2.1.0", "2.0.0", "2.1.0"))
    assert all(isinstance(each, ValueError) for each in found), found
    sentences = [str(each) for each in found]
    assert sentences[0].startswith("instance 1 has deep_ep 2.0.0, torch")
    assert sentences[1].startswith("instance 0 has deep_ep 2.1.0, torch")
    assert all("install the same on every node" in each for each in sentences)


def test_two_nvshmem_libraries_in_a_process_are_refused(tmp_path):
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 08:01 1 /opt/{}/lib/libnvshmem_host.so.3\n"
    maps.write_text(line.format("a") * 2 + "7f02-7f03 rw-p 00000000 00:00 0\n")
    require_one_library(maps)
    maps.write_text(line.format("a") + line.format("b"))
    with pytest.raises(ValueError, match=r"libraries, /opt/a/\S+ and /opt/b/\S+: build deep_ep"):
        require_one_library(maps)


def one_of_two(segments, limits=LIMITS):
    """The first of two instances, whose peer has not come."""
    exchange = DeepEpExchange(segments, 0, ClusterConfig(num_instances=2), MODEL, limits, CPU)
    return lambda: exchange.begin_term([0, 1], package())


def test_a_wait_for_a_peer_ends_with_the_limit_and_with_the_term(nodes):
    segments, _ = nodes(2)
    short = LimitsConfig(start_timeout_ms=300)
    with pytest.raises(ExchangeTimeout) as late:
        one_of_two(segments, short)()
    assert late.value.peer == 1
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(one_of_two(segments))
        segments.term.end(1)
        with pytest.raises(TermOver):
            opening.result(10)


def test_a_peer_that_ends_while_it_starts_is_lost(nodes, monkeypatch):
    """Instance 1 has said its version, and fails then."""

    class Failing(Package.Buffer):
        def __init__(self, *arguments, **keys):
            if keys["comm"].Get_rank():
                raise RuntimeError("no such device")
            super().__init__(*arguments, **keys)

    monkeypatch.setattr(Package, "Buffer", Failing)
    own, peer = opened(nodes(2), MODEL)
    assert isinstance(peer, RuntimeError) and str(peer) == "no such device"
    assert isinstance(own, PeerLost | ExchangeTimeout) and own.peer == 1, repr(own)


def test_an_instance_that_has_read_all_may_leave_before_its_word_arrives(nodes):
    """The word and the end come by two connections."""
    slow, quick = nodes(2)
    limits, has_left = LimitsConfig(tick_ms=10), threading.Event()
    receive = slow._server._receiver

    def late(*where):
        has_left.wait(20)
        return receive(*where)

    slow._server._receiver = late
    first, second = (
        Gathering(each, "met", seat, 2, limits) for seat, each in enumerate((slow, quick))
    )
    first.offer("from 0")
    second.offer("from 1")
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(first.gather, [1])
        assert second.gather([0]) == ["from 0"]
        second.leave()
        try:
            with pytest.raises(TimeoutError):
                gathering.result(0.3)
        finally:
            has_left.set()
        assert gathering.result(20) == ["from 1"]
    first.leave()


SIZES = {"hidden_size": 7168, "num_experts": 256, "num_experts_per_token": 8}
SITE = {"dtype": torch.bfloat16, "num_instances": 32, "max_rows": 128}


@pytest.mark.parametrize(("what", "words"), [
    ({}, None),
    ({"dtype": torch.float32}, "carries bfloat16"),
    ({"hidden_size": 1024}, "hidden size is 1024"),
    ({"num_experts_per_token": 12}, "at most 11"),
    ({"num_instances": 24}, None),
    ({"num_instances": 2, "max_rows": 33}, "multiple of 4"),
    ({"max_rows": 512}, "needs at least 1026"),
])  # fmt: skip
def test_what_deep_ep_cannot_serve_is_named(monkeypatch, what, words):
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: name)
    site = SITE | SIZES | what
    model = SimpleNamespace(**{name: site.pop(name) for name in SIZES})
    obstacle = deep_ep_obstacle(model=model, **site, environment={})
    assert words in obstacle if words else obstacle == ""


def test_an_absent_deep_ep_is_a_sentence():
    assert "deep_ep is not installed" in deep_ep_obstacle(model=None, **SITE, environment={})
