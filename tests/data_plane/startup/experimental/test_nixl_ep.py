"""NIXL-EP against its stand-in: who meets whom, what is given up in silence, what is refused."""

import ast
import inspect
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.moe.backend import dispatch_backend
from data_plane.native.receiver import receive_puts
from data_plane.startup.experimental import nixl_ep
from data_plane.startup.experimental.nixl_ep import nixl_ep_obstacle
from data_plane.startup.shared_parts import moe_backends
from data_plane.transport.exchange import ExchangeTimeout, PeerLost, TermOver
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.gpu.nixl_ep_cluster import LIMITS, Member, meet
from harness.gpu_stand_ins.nixl_ep_stand_in import Buffer
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.whole import Config
from nanocp.values.members import Peer

BOUNDS = BoundsConfig(max_rows=4, max_links=4, max_attention_rows=4, max_partials=4)
CLUSTER = ClusterConfig(num_instances=3, redundant_experts=1, bounds=BOUNDS)
MODEL = SimpleNamespace(num_experts=6, hidden_size=8)
GPU = torch.device("cuda")


class Plain:
    """Experts that multiply a row by the number of their slot, plus 1."""

    def run_grouped(self, x_ESX, count_E):
        number_E = torch.arange(1, 1 + len(x_ESX))
        return x_ESX * number_E[:, None, None]


@pytest.fixture
def members():
    """A function that makes ends of instances of one cluster, in threads of one process."""
    cluster_id, made = f"nixl-ep-{uuid.uuid4().hex[:8]}", []

    def make(*seats, **keys):
        made.extend(Member(cluster_id, seat, CLUSTER, MODEL, **keys) for seat in seats)
        return made[-len(seats) :]

    yield make
    for member in made:
        member.exchange.leave()


def rows(seed, seats=(0, 1, 2), num_rows=3):
    """Rows, the two slots of each, at these seats, and their weights; the last row is not live."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor([3 * seat + slot for seat in seats for slot in range(3)])
    number_BK = numbers[
        torch.rand(num_rows, len(numbers), generator=generator).argsort(dim=1)[:, :2]
    ]
    number_BK[-1] = -1
    weight_BK = torch.rand(num_rows, 2, generator=generator)
    return torch.randn(num_rows, 8, generator=generator), number_BK, weight_BK


def layer(members, named):
    """Run one layer of every member; compare each row's sum with that of the slots it names.

    named: seats of these, also of those that are not in the term.
    """
    given = [rows(member.seat, named) for member in members]
    sent = [m.exchange.dispatch(*each) for m, each in zip(members, given, strict=True)]
    all_named = torch.cat([number_BK.flatten() for _, number_BK, _ in given])
    for member, each in zip(members, sent, strict=True):
        load_E = torch.zeros(3, dtype=torch.int64)
        member.exchange.receive(each)
        member.exchange.run_experts(each, Plain(), load_E)
        assert load_E.tolist() == [int((all_named == 3 * member.seat + e).sum()) for e in range(3)]
    seats = torch.tensor([member.seat for member in members])
    for member, each, (x_BX, number_BK, weight_BK) in zip(members, sent, given, strict=True):
        each.receive()
        member.exchange.check()
        is_here_BK = torch.isin(number_BK.div(3, rounding_mode="floor"), seats)
        factor_BK = (number_BK % 3 + 1) * weight_BK * is_here_BK
        torch.testing.assert_close(each.y, x_BX * factor_BK.sum(dim=1, keepdim=True))


ALL = (0, 1, 2)


def test_rows_reach_the_slots_that_they_name_in_one_term_after_the_other(members):
    """An instance is alone first; then one is lost, rows name others' slots, and another comes."""
    zero, one, two = members(*ALL)
    layer([one], ALL)
    meet([zero, one, two], 1, ALL)
    layer([zero, one, two], ALL)
    meet([zero, two], 2, [0, 2])
    layer([zero, two], [0, 2])
    (newcomer,) = members(1)
    meet([zero, newcomer, two], 3, ALL)
    layer([zero, newcomer, two], ALL)


def test_a_peer_whom_a_kernel_gave_up_in_silence_is_an_error_with_the_peer(members):
    zero, one = members(0, 1)
    meet([zero, one], 1, [0, 1])
    zero.exchange.check()
    sent = zero.exchange.dispatch(*rows(0))
    zero.exchange.receive(sent)
    zero.exchange.run_experts(sent, Plain(), torch.zeros(3, dtype=torch.int64))
    sent.receive()
    with pytest.raises(ExchangeTimeout, match="instance 0 waited for rows of instance 1") as found:
        zero.exchange.check()
    assert found.value.peer == 1
    zero.term.end(1)
    with pytest.raises(TermOver):
        zero.exchange.check()
    meet([zero, one], 2, [0, 1])
    layer([zero, one], ALL)


def test_what_a_lost_instance_sent_is_not_taken_for_rows_of_the_next_one(members):
    zero, one = members(0, 1)
    meet([zero, one], 1, [0, 1])
    one.exchange.dispatch(*rows(1))
    (newcomer,) = members(1)
    meet([zero, newcomer], 2, [0, 1])
    sent = zero.exchange.dispatch(*rows(0))
    sent.receive()
    with pytest.raises(ExchangeTimeout):
        zero.exchange.check()


def test_a_wait_for_a_member_that_does_not_come_ends_with_the_term_or_at_a_limit(members):
    zero, impatient = *members(0), *members(2, limits=replace(LIMITS, start_timeout_ms=50))
    with pytest.raises(ExchangeTimeout) as found:
        impatient.begin_term(1, [0, 2])
    assert found.value.peer == 0
    timer = threading.Timer(0.05, zero.term.end, [2])
    timer.start()
    began = time.monotonic()
    with pytest.raises(TermOver):
        zero.begin_term(2, [0, 1])
    assert time.monotonic() - began < LIMITS.start_timeout_ms / 2000
    timer.join()


def stores(members, by_tcp, limits=LIMITS):
    """The stores of two instances that have published their metadata."""
    both = members(0, 1, limits=limits)
    if by_tcp:
        for name, member in zip("ab", both, strict=True):
            member.segments.node = name
            member.segments._server = TcpSegmentServer("127.0.0.1", receive_puts)
        for member in both:
            member.segments.meet([Peer(m.segments.node, m.segments.address) for m in both])
    found = [member.exchange._metadata for member in both]
    for seat, store in enumerate(found):
        store.set(f"NIXL_EP/{seat}", bytes([seat]) * 100_000)
    return both, found


@pytest.mark.parametrize("by_tcp", [False, True])
def test_nobody_connects_before_all_have_read_all_metadata(members, by_tcp):
    """A peer of another node needs a thread of this process, which then may not run."""
    both, (zero, one) = stores(members, by_tcp)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(zero.multi_get, ["NIXL_EP/1"])
        time.sleep(0.2)
        assert not read.done()
        assert one.multi_get(["NIXL_EP/0"]) == [bytes(100_000)]
        assert read.result(10) == [b"\1" * 100_000]
    for store in (zero, one):
        store.delete_key("")
    assert one.multi_get(["NIXL_EP/0"]) == [bytes(100_000)], "it stays until the term is left"
    for member in both:
        member.exchange.leave()
        member.segments.close()


@pytest.mark.parametrize(
    ("what", "error"), [("leaves", PeerLost), ("stays away", ExchangeTimeout), ("over", TermOver)]
)
def test_a_wait_until_a_peer_has_read_ends_too(members, what, error):
    limits = replace(LIMITS, start_timeout_ms=300) if what == "stays away" else LIMITS
    (member, _), (zero, one) = stores(members, False, limits)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(zero.multi_get, ["NIXL_EP/1"])
        time.sleep(0.1)
        if what == "leaves":
            one.leave()
        if what == "over":
            member.term.end(1)
        with pytest.raises(error):
            read.result(10)


SIZES = {"hidden_size": 7168, "num_experts_per_token": 8}
SITE = {"dtype": torch.bfloat16, "num_instances": 32, "max_rows": 128}


@pytest.mark.parametrize(("what", "words"), [
    ({}, None),
    ({"num_instances": 6}, None),
    ({"dtype": torch.float32}, "carries bfloat16"),
    ({"hidden_size": 1024}, "hidden size is 1024"),
    ({"num_experts_per_token": 17}, "at most 16"),
    ({"num_instances": 2, "max_rows": 33}, "multiple of 4"),
    ({"num_instances": 12}, "takes multiples of 8, not 12"),
])  # fmt: skip
def test_what_nixl_ep_cannot_serve_is_named(monkeypatch, what, words):
    monkeypatch.setattr(nixl_ep, "_package_obstacle", lambda: "")
    site = SITE | SIZES | what
    model = SimpleNamespace(**{name: site.pop(name) for name in SIZES})
    obstacle = nixl_ep_obstacle(model=model, **site)
    assert words in obstacle if words else obstacle == ""


def test_an_absent_package_and_one_for_another_torch_are_sentences(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_ep, "find_spec", lambda name: None)
    site = SITE | {"model": SimpleNamespace(**SIZES)}
    assert "NIXL-EP is not installed" in nixl_ep_obstacle(**site)
    for version in ("212", "213"):
        (tmp_path / f"nixl_ep_cpp_torch{version}.cpython-311-x86_64-linux-gnu.so").touch()
    spec = SimpleNamespace(name="nixl_ep_cu13", origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(nixl_ep, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    obstacle = nixl_ep_obstacle(**site)
    assert "nixl_ep_cu13 has no build for torch 2.11.0+cu130, only nixl_ep_cpp_torch212" in obstacle
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    assert nixl_ep_obstacle(**site) == ""


def test_nixl_ep_is_taken_by_name_only_and_between_nodes_too(tiny_checkpoint, monkeypatch):
    model = replace(ModelConfig.from_folder(tiny_checkpoint), hidden_size=2048)
    site = model, "it needs native kernels"
    with pytest.raises(ValueError, match="dispatch_backend is nixl_ep: it needs NVIDIA GPUs"):
        dispatch_backend("nixl_ep", *site, {})
    assert dispatch_backend("auto", *site, {"nixl_ep": str}).name == "exchange"
    for exchange in ("auto", "nvshmem"):
        data_plane = DataPlaneConfig(
            device="cuda",
            dtype="bfloat16",
            expert_backend="grouped_mm",
            exchange_backend=exchange,
            dispatch_backend="nixl_ep",
        )
        config = Config(data_plane=data_plane)
        assert config.recovers == (exchange == "auto")
        chosen = moe_backends(config, model, range(8), GPU, "", {"nixl_ep": str})
        assert chosen.dispatch == "nixl_ep"
        assert "dispatch: nixl_ep, as configured" in chosen.sentences


def test_the_stand_in_has_the_parameters_of_the_installed_package():
    """Which cannot be imported without CUDA, but read."""
    spec = find_spec("nixl_ep_cu13")
    if spec is None:
        pytest.skip("nixl_ep_cu13 is not installed")
    source = Path(spec.origin).with_name("buffer.py").read_text()
    (installed,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Buffer"
    )
    functions = {node.name: node.args for node in installed.body if hasattr(node, "args")}
    pinned = [name for name in vars(Buffer) if name in functions]
    assert len(pinned) == 10
    for name in pinned:
        expected = functions[name]
        found = inspect.signature(getattr(Buffer, name)).parameters.values()
        names = [each.arg for each in expected.args]
        assert [each.name for each in found] == names, name
        defaults = [each.default for each in found if each.default is not each.empty]
        given = {"DEFAULT_TIMEOUT_MS": 30_000}
        assert defaults == [
            given[each.id] if isinstance(each, ast.Name) else ast.literal_eval(each)
            for each in expected.defaults
        ], name
