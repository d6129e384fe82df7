"""Streams: what reads waits for what was made elsewhere. Stand-ins note who waits for whom."""

from collections import Counter, defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from data_plane.graph.cuda_graphs import CudaGraphs
from harness.gpu_stand_ins.cuda_stand_in import Cuda
from harness.overlap.overlap_models import recorded
from nanocp.overlap.engine import engine as engines
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.engine.streams import CudaStreams, green_context, streams_of
from nanocp.overlap.ops import SplitFunc, SplitModule
from nanocp.overlap.policies.orders import NETWORK, NanoFlow, SingleBatchOverlap

pytestmark = pytest.mark.usefixtures("fresh")

RULES = (SplitModule("Linear", "attention"), SplitFunc("relu", NETWORK))
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
        ("caller", "records"),
        ("side 0", "waits", "caller"),
        ("side 0", "awaits", event),
        ("side 0", "records"),
        ("caller", "waits", "side 0"),
    ]
    assert streams_of([torch.zeros(1), 3]) is None, "a CPU has none"


def lane(cuda, name):
    """A lane's pool, and its step, which notes where it runs."""
    pool = SimpleNamespace(
        device="cuda:0", start=lambda: cuda.log.append((cuda.now.name, "starts", name))
    )
    return pool, lambda context: cuda.log.append((cuda.now.name, "runs", context))


def test_lanes_are_one_graph_in_which_they_fork_and_join(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    replay = CudaGraphs(*lane(cuda, 0), lane(cuda, 1)).capture("own", "other")
    assert cuda.log == [
        "capture",
        ("side 1", "waits", "side 0"),
        ("side 0", "runs", "own"),
        ("side 1", "runs", "other"),
        ("side 0", "waits", "side 1"),
        "captured",
    ]
    cuda.log.clear()
    replay()
    assert cuda.log == [
        ("side 0", "waits", "caller"),
        ("side 0", "starts", 0),
        ("side 0", "starts", 1),
        ("side 0", "replays"),
        ("caller", "waits", "side 0"),
    ]


def test_a_window_of_one_lane_has_a_graph_without_the_other_s_stream(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    replay = CudaGraphs(*lane(cuda, 0), lane(cuda, 1)).capture("own")
    replay()
    assert "side 1" not in {where for where, *_ in cuda.log}
    assert [each for each in cuda.log if "starts" in each] == [("side 0", "starts", 0)]


@pytest.mark.parametrize("number", ["device", "device_id"])
def test_a_part_of_the_gpu_is_asked_for_as_this_release_of_torch_has_it(monkeypatch, number):
    from torch.cuda import green_contexts

    asked = []

    class Context:
        Stream = create = None

    by_number = {
        "device": lambda *, num_sms=None, device=None: asked.append((num_sms, device)),
        "device_id": lambda *, num_sms=None, device_id=None: asked.append((num_sms, device_id)),
    }
    Context.create = staticmethod(by_number[number])
    monkeypatch.setattr(green_contexts, "GreenContext", Context)
    monkeypatch.setattr(green_contexts, "SUPPORTED", True)
    green_context(24, torch.device("cuda", 1))
    assert asked == [(24, 1)]
    monkeypatch.setattr(green_contexts, "SUPPORTED", False)
    with pytest.raises(RuntimeError, match="has no streams of green contexts"):
        green_context(24, torch.device("cuda", 1))
