"""Streams: what reads waits for what was made elsewhere. Stand-ins note who waits for whom."""

from collections import Counter, defaultdict
from contextlib import contextmanager

import pytest
import torch

from data_plane.graph.cuda_graphs import CudaGraphs
from data_plane.graph.lane_parts import LanePart, in_order, order_of_lanes
from harness.gpu_stand_ins.cuda_stand_in import Cuda
from harness.overlap.overlap_models import recorded
from nanocp.overlap.engine import engine as engines
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.engine.streams import CudaStreams, streams_of
from nanocp.overlap.ops import SplitFunc, SplitModule
from nanocp.overlap.policies.orders import (
    ATTENTION,
    NETWORK,
    DualBatchOverlap,
    NanoFlow,
    Sequential,
    SingleBatchOverlap,
    TokenWeave,
)

pytestmark = pytest.mark.usefixtures("fresh")

RULES = (SplitModule(torch.nn.Linear, "attention"), SplitFunc("relu", NETWORK))
WIDTH = 16


class Branches(torch.nn.Module):
    """Two branches in each layer; one of them is sent, and they meet."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, rows):
        for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            rows = torch.relu(one(rows)) + other(rows)
        return rows


class Clocks:
    """Stand-in for a device's streams: a vector clock of each."""

    def __init__(self):
        self.known = {"": Counter()}
        self.name, self.used, self.uses = "", Counter(), set()

    @contextmanager
    def forked(self):
        yield
        for clock in self.known.values():
            self.known[""] |= clock

    @contextmanager
    def on(self, name):
        self.name = name
        if name not in self.known:
            self.known[name] = Counter(self.known[""])
        self.used[name] += 1
        yield
        self.name = ""

    def launch(self):
        self.known[self.name][self.name] += 1
        return self.name, self.known[self.name][self.name]

    def has_ended(self, launched):
        name, number = launched
        return self.known[self.name][name] >= number

    def record(self):
        return Counter(self.known[self.name])

    def wait(self, event):
        self.known[self.name] |= event

    def use(self, values):
        self.uses |= {(self.name, id(value)) for value in values}


class Watched(engines.Forward):
    """A forward that notes when each value was made, and that its readers waited for it.

    What writes to memory must have waited for all that touched it, and what touches it for that.
    """

    def run_on(self, streams):
        self.clocks, self.made = streams, {}
        self.touched, self.written, self.kept = defaultdict(list), {}, []
        return super().run_on(streams)

    def _run_step(self, step):
        memory = []
        for op in step.ops:
            for value in self._program.operators[op.number].inputs:
                made = self.made.get((op.micro_batch, value))
                assert made is None or self.clocks.has_ended(made), "read before it was made"
                tensor = self._values[op.micro_batch][value]
                if made is not None and made[0] != self.clocks.name:
                    assert (self.clocks.name, id(tensor)) in self.clocks.uses, "freed too early"
                if isinstance(tensor, torch.Tensor):
                    where = op.micro_batch, tensor.untyped_storage().data_ptr()
                    memory.append((where, tensor, tensor._version))
        super()._run_step(step)
        self.kept += memory  # freed memory would be given to others
        launched = self.clocks.launch()
        for where, tensor, version in memory:
            is_written = tensor._version > version
            earlier = self.touched[where] if is_written else self.written.get(where, [])
            assert all(map(self.clocks.has_ended, earlier)), "touched while others touch it"
        for where, tensor, version in memory:
            self.touched[where].append(launched)
            if tensor._version > version:
                self.written.setdefault(where, []).append(launched)
        for op in step.ops:
            for value in self._program.operators[op.number].outputs:
                self.made[op.micro_batch, value] = launched


@pytest.mark.parametrize("policy", [NanoFlow, SingleBatchOverlap])
def test_what_reads_waits_for_what_was_made_on_another_stream(monkeypatch, policy):
    clocks = []

    def streams(inputs):
        clocks.append(Clocks())
        return clocks[-1]

    found = []
    model = Branches().eval()
    run = overlap(model, policy(RULES), found.append)
    rows = torch.randn(8, WIDTH)
    run(rows)
    (engine,) = found
    engine._streams_of = streams
    monkeypatch.setattr(engines, "Forward", Watched)
    assert torch.equal(run(rows), model(rows))
    assert clocks[0].used[NETWORK] >= 2 and clocks[0].used[""] >= 2
    assert any(step.after for step in recorded(engine, 8).steps)


class Written(torch.nn.Module):
    """Writes to what another stream may still read; next, another stream reads what it wrote."""

    def __init__(self, of):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.of = of

    def forward(self, rows, cache):
        made = self.of(self.one(rows), cache)
        sent = torch.relu(made)
        made.add_(rows)
        return torch.relu(self.other(sent)) + torch.relu(made)


@pytest.mark.parametrize("of", [lambda made, _: made, lambda _, cache: cache.view(-1, WIDTH)])
def test_memory_is_written_when_other_streams_have_read_it(monkeypatch, of):
    found, model = [], Written(of).eval()
    run = overlap(model, NanoFlow(RULES), found.append)
    rows, mine, cache = torch.randn(8, WIDTH), *torch.zeros(2, 8, WIDTH)
    run(rows, mine)
    model(rows, cache)
    (engine,) = found
    engine._streams_of = lambda inputs: Clocks()
    monkeypatch.setattr(engines, "Forward", Watched)
    assert torch.equal(run(rows, mine), model(rows, cache)) and torch.equal(mine, cache)
    assert recorded(engine, 8).has_streams


def test_an_error_of_an_operator_on_a_stream_names_it(monkeypatch):
    found, rows = [], torch.randn(8, WIDTH)
    run = overlap(Branches().eval(), NanoFlow(RULES), found.append)
    run(rows)
    found[0]._streams_of = lambda inputs: Clocks()
    monkeypatch.setattr(engines.Forward, "_run_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        run(rows)
    assert raised.value.__notes__ == ["in operator 0 of micro-batch 0"]


def test_side_streams_fork_from_the_caller_and_join_it(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    streams = CudaStreams(torch.device("cuda", 0))
    with pytest.raises(KeyError), streams.forked():
        with streams.on(""):
            event = streams.record()
        with streams.on("network"):
            streams.wait(event)
        with streams.on("network"):
            streams.record()
        raise KeyError
    assert cuda.log == [
        ("caller", "records"), ("side 0", "waits", "caller"), ("side 0", "awaits", event),
        ("side 0", "records"), ("caller", "waits", "side 0"),
    ]  # fmt: skip
    assert streams_of([torch.zeros(1), 3]) is None, "a CPU has none"


class Whole(Sequential):
    """Both lanes as one micro-batch."""

    def begin(self, ops):
        ops.split((2,))


class Noted(LanePart):
    """A part that notes with how many others it runs."""

    def __init__(self, lane, context, tag):
        super().__init__(tag)
        self.lane, self.context = lane, context

    def run_with(self, others):
        self.lane.note(self.context, len(others))


class Lane:
    """A lane's pool, and its step, which notes where each part runs."""

    tags = ("other", ATTENTION, NETWORK, "experts")

    def __init__(self, cuda, name):
        self.cuda, self.name, self.device = cuda, name, "cuda:0"

    def start(self):
        self.cuda.log.append((self.cuda.now.name, "starts", self.name))

    def note(self, context, what):
        self.cuda.log.append((self.cuda.now.name, "runs", context, what))

    def run(self, context):
        self.note(context, "all")

    def phases(self, context):
        for tag in self.tags:
            yield Noted(self, context, tag)
            self.note(context, tag)


def test_lanes_are_one_graph_in_which_they_fork_and_join(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    lanes = [(Lane(cuda, name),) * 2 for name in (0, 1)]
    replay = CudaGraphs(*lanes).capture("own", "other")
    assert cuda.log[0] == "capture" and cuda.log[-2:] == [("side 0", "waits", "side 1"), "captured"]
    runs = [each for each in cuda.log if "runs" in each]
    assert runs == [
        (f"side {number}", "runs", context, tag)
        for tag in Lane.tags for number, context in enumerate(("own", "other"))
    ]  # fmt: skip
    assert ("side 1", "waits", "side 0") in cuda.log[:3]
    assert not any("awaits" in each for each in cuda.log), "each lane goes on by itself"
    cuda.log.clear()
    replay()
    assert cuda.log == [
        ("side 0", "waits", "caller"),
        ("side 0", "starts", 0),
        ("side 0", "starts", 1),
        ("side 0", "replays"),
        ("caller", "waits", "side 0"),
    ]


def test_a_wait_of_a_lane_is_beside_what_the_other_computes(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    lanes = [(Lane(cuda, name),) * 2 for name in (0, 1)]
    CudaGraphs(*lanes, policies=[DualBatchOverlap()]).capture("own", "other")
    runs = [each for each in cuda.log if "runs" in each]
    assert [each[2:] for each in runs if ATTENTION in each or 1 in each] == [
        ("own", 1), ("own", ATTENTION), ("other", ATTENTION),
    ], "once for both"  # fmt: skip
    of_waits = {where for where, _, _, what in runs if what == NETWORK}
    assert of_waits.isdisjoint(where for where, _, _, what in runs if what == "experts")
    begun = {each[2:]: place for place, each in enumerate(cuda.log) if "runs" in each}
    for context in ("own", "other"):
        between = cuda.log[begun[context, NETWORK] : begun[context, "experts"]]
        assert any("awaits" in each for each in between), "experts wait for their rows"


def test_what_a_part_reads_is_kept_while_its_stream_reads_it():
    clocks, rows = Clocks(), [torch.zeros(1) for _ in range(2)]
    lanes = [iter([LanePart(tag, (own,)) for tag in Lane.tags]) for own in rows]
    assert [*in_order(lanes, order_of_lanes(Lane.tags, 2, DualBatchOverlap()), clocks)]
    for name in ("", NETWORK):
        assert {(name, id(own)) for own in rows} < clocks.uses


@pytest.mark.parametrize(("policy", "words"), [
    (TokenWeave((), lambda *each: each), "TokenWeave replaces operators"),
    (Whole(), "Whole makes 1 micro-batches of 2 lanes"),
])  # fmt: skip
def test_an_order_that_no_graph_of_lanes_can_have_is_refused(policy, words):
    with pytest.raises(ValueError, match=words):
        order_of_lanes(Lane.tags, 2, policy)


def test_a_window_of_one_lane_has_a_graph_without_the_other_s_stream(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    lanes = [(Lane(cuda, name),) * 2 for name in (0, 1)]
    replay = CudaGraphs(*lanes).capture("own")
    replay()
    assert "side 1" not in {where for where, *_ in cuda.log}
    assert [each for each in cuda.log if "starts" in each] == [("side 0", "starts", 0)]
