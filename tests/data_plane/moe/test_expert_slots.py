"""Slots of experts: loaded beside the steps, one after the other, and no faster than allowed."""

import threading
from array import array
from types import SimpleNamespace

import pytest
import torch

from data_plane.model import weights as weights_module
from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from data_plane.moe import expert_weights
from data_plane.moe.expert_slots import LoadedSlots
from data_plane.moe.expert_tables import ExpertTables
from data_plane.moe.expert_weights import ExpertWeights
from nanocp.values.experts import ExpertTable, home_table
from nanocp.values.members import ExpertLoad, ExpertsHere

WAIT_S = 30


class FakeStep:
    """Notes the tables that rows follow."""

    def __init__(self):
        self.tables = []

    def place_experts(self, table):
        """See Step."""
        self.tables.append(table)

    def loads(self):
        """See Step."""
        return torch.tensor([[1, 2, 3]])


@pytest.fixture
def slots(models):
    """Seat 0 of two with three slots more, and its step."""
    path = models("tiny").path
    model = ModelConfig.from_folder(path)
    held = load_weights(path, model, torch.float32, range(model.num_experts // 2))
    experts = ExpertWeights(path, model, torch.float32, held, 0)
    step = FakeStep()
    slots = LoadedSlots([step], experts, mb_per_s=1_000_000)
    slots.came = threading.Event()
    slots.wake = slots.came.set
    home = home_table(model.num_experts, 2, redundant=3)
    slots.place(home)
    return SimpleNamespace(slots=slots, weights=held, step=step, home=home, model=model, path=path)


def moved(made, experts):
    """The table in which the free slots of seat 0 hold these experts, by layer."""
    first = made.model.num_experts // 2
    layers = []
    for in_layer in experts:
        held = [*made.home.experts()]
        held[first : first + len(in_layer)] = in_layer
        layers.append(held)
    return ExpertTable.of(made.home.num_slots, *layers)


def mlps_of(made):
    return [layer.moe.mlps for layer in made.weights.layers if layer.moe]


def test_each_layer_gets_its_own_experts(slots):
    last = slots.model.num_experts - 1
    num_layers = len(mlps_of(slots))
    assert num_layers > 1
    table = moved(slots, [[last - layer, last] for layer in range(num_layers)])
    slots.slots.fill(7, table)
    assert slots.slots.came.wait(WAIT_S)
    assert slots.slots.filled() == (7, "") and slots.slots.filled() is None
    assert slots.step.tables == [slots.home], "no row has come there yet"
    whole = load_weights(slots.path, slots.model, torch.float32, range(slots.model.num_experts))
    first, x_BX = slots.model.num_experts // 2, torch.randn(3, slots.model.hidden_size)
    expected = [layer.moe.mlps for layer in whole.layers if layer.moe]
    for layer, mlps in enumerate(mlps_of(slots)):
        for slot, expert in ((first, last - layer), (first + 1, last)):
            assert torch.equal(mlps[slot].gate_up(x_BX), expected[layer][expert].gate_up(x_BX))
    held = [array("h", each) for each in slots.slots.held()]
    assert [each[first] for each in held] == [last - layer for layer in range(num_layers)]
    assert {len(each) for each in held} == {slots.home.num_slots}


def test_experts_are_here_once_the_last_is_and_what_is_half_there_is_unknown(slots, monkeypatch):
    first, num_layers = slots.model.num_experts // 2, len(mlps_of(slots))
    slots.slots.fill(1, moved(slots, [[first + 1]] * num_layers))
    assert slots.slots.came.wait(WAIT_S) and slots.slots.filled() == (1, "")
    slots.slots.came.clear()
    reads, may_read = threading.Event(), threading.Event()
    read = weights_module.WeightLoader.expert

    def slow(self, layer, expert):
        reads.set()
        assert may_read.wait(WAIT_S)
        return read(self, layer, expert)

    monkeypatch.setattr(weights_module.WeightLoader, "expert", slow)
    slots.slots.fill(2, moved(slots, [[first]] * num_layers))
    assert reads.wait(WAIT_S)
    assert slots.slots.filled() is None, "it is read"
    assert array("h", slots.slots.held()[0])[first] == -1
    may_read.set()
    assert slots.slots.came.wait(WAIT_S) and slots.slots.filled() == (2, "")


def test_what_cannot_be_read_is_named(slots, monkeypatch):
    def gone(self, layer, expert):
        raise OSError("the file is gone")

    monkeypatch.setattr(weights_module.WeightLoader, "expert", gone)
    slots.slots.fill(1, moved(slots, [[5]] * len(mlps_of(slots))))
    assert slots.slots.came.wait(WAIT_S)
    number, problem = slots.slots.filled()
    assert number == 1
    assert problem.startswith("OSError: the file is gone; expert 5 of layer ")
    assert problem.endswith(str(slots.path))


def test_a_checkpoint_that_is_gone_is_reported(slots, monkeypatch):
    def gone(path, config, experts):
        raise ValueError(f"{path}: no such file")

    monkeypatch.setattr(expert_weights, "open_tensors", gone)
    slots.slots.fill(1, moved(slots, [[5]] * len(mlps_of(slots))))
    assert slots.slots.came.wait(WAIT_S)
    assert slots.slots.filled() == (1, f"ValueError: {slots.path}: no such file")


def test_an_answer_is_the_newest_and_none_outlives_its_term(slots):
    for number in (1, 2):
        slots.slots.came.clear()
        slots.slots.fill(number, slots.home)
        assert slots.slots.came.wait(WAIT_S)
    assert slots.slots.filled() == (2, "") and slots.slots.filled() is None
    slots.slots.came.clear()
    slots.slots.fill(3, slots.home)
    assert slots.slots.came.wait(WAIT_S)
    slots.slots.stop()
    assert slots.slots.filled() is None


def test_before_the_first_table_nothing_is_said_of_slots(slots):
    fresh = LoadedSlots([slots.step], slots.slots._weights, mb_per_s=1)
    assert fresh.held() == (), "shorter layers would shift those of later seats"


def test_a_load_that_is_not_wanted_any_more_ends_at_once_and_says_nothing(slots):
    slots.slots._bytes_per_s = 1e-3  # it would take hours
    last = slots.model.num_experts - 1
    slots.slots.fill(1, moved(slots, [[last, last - 1]] * len(mlps_of(slots))))
    slots.slots.stop()
    assert slots.slots.filled() is None and not slots.slots.came.is_set()
    slots.slots._bytes_per_s = 1e12
    slots.slots.fill(2, moved(slots, [[last, last - 1]] * len(mlps_of(slots))))
    assert slots.slots.came.wait(WAIT_S) and slots.slots.filled() == (2, "")


class StillSlots:
    """Slots of which only the calls are of interest."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def loads(self):
        """Whatever there was since the last call."""
        self.calls.append(("loads",))
        return (b"pairs",)

    def filled(self):
        """Nothing has come."""


def test_windows_follow_the_table_that_they_name_and_loads_name_theirs():
    slots, events = StillSlots(), []
    tables = ExpertTables(3, slots, events)
    tables.begin_term("home")
    tables.report_s = 3600.0
    slots.calls.clear()
    tables.change(1, "first")
    tables.change(2, "second")
    tables.begin_window(0, 0)
    tables.end_window(0)
    assert slots.calls == [("fill", 1, "first"), ("fill", 2, "second")] and not events
    tables.begin_window(1, 2)
    assert events == [ExpertLoad(3, 0, 0, (b"pairs",))], "of the table before"
    assert slots.calls[-1] == ("follow", "second")
    tables.end_window(2)
    tables.report_s = 0.0
    tables.end_window(3)
    assert events[1:] == [ExpertLoad(3, 2, 3, (b"pairs",))]
    slots.filled = lambda: (3, "")
    tables.poll()
    assert events[-1] == ExpertsHere(3, 3)
    tables.begin_term("home")
    tables.begin_window(4, 0)
    assert ("stop",) in slots.calls and slots.calls[-1] == ("loads",), "numbers begin anew"
