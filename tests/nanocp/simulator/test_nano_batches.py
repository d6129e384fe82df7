"""Steps in the order of a searched schedule: searched for one load, simulated under others."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.overlap.first_schedule import first_schedule
from nanocp.overlap.interference import MEMORY, NETWORK
from nanocp.overlap.schedule import violations
from nanocp.overlap.search import sequence
from nanocp.simulator.costs import nano_batches
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel, LayerTime, Loads, StepTime
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Run
from nanocp.simulator.simulation import FLUID, Mechanisms, make_simulation

CLUSTER = "h200x32-deepseek-v3"
CASE = nano_batches.Case(CLUSTER, "fitted", rows=64, tokens=300_000, links=4)
FILE = load_cluster_file(CLUSTER)
MODEL = CostModel(FILE, "fitted")


@pytest.fixture(scope="module")
def found():
    operations = nano_batches.layer_operations(MODEL, CASE.loads)
    return first_schedule([operations], MODEL.interference)


def test_a_layers_operations_are_the_cost_models_layer(found):
    operations = nano_batches.layer_operations(MODEL, CASE.loads)
    assert sum(each.us for each in operations) == pytest.approx(sum(MODEL.step(CASE.loads).layer))
    resources = {each.name: each.resource for each in operations}
    assert resources["dispatch"] == resources["combine"] == NETWORK
    assert resources["experts"] == resources["attention"] == MEMORY
    half = next(each for each in operations if each.name == "experts")
    layers = MODEL.step(Loads([150_000], [32], [34], [2], [0])).layer
    assert half.fixed_us + (half.us - half.fixed_us) / 2 == pytest.approx(layers.expert_us)
    assert list(violations(found.schedule, MODEL.interference)) == []


def test_latencies_of_parts_pass_together():
    """A single row travels in every part, and the parts of the network are its whole."""
    loads = replace(CASE, links=1).loads
    whole, half = (MODEL.step(each).layer.exchange_us for each in (loads, loads.part(0.5)))
    assert half == whole > 0 and loads.part(1.0) == loads
    (exchange,) = (
        each for each in nano_batches.layer_operations(MODEL, loads) if each.name == "exchange"
    )
    assert exchange.fixed_us == 0 and exchange.us == whole


def test_a_step_by_the_schedule_is_shorter_where_it_was_searched_and_never_longer(found):
    steps = nano_batches.ScheduledSteps(MODEL, FILE, found.schedule)
    plain, by_schedule = MODEL.step(CASE.loads), steps.step(CASE.loads)
    assert by_schedule.by_schedule and by_schedule.step_us < plain.step_us
    layers_us = FILE.model.num_moe_layers * found.schedule.period_us
    assert by_schedule.step_us == pytest.approx(
        layers_us + 3 * sum(plain.layer[:3]) + MODEL.once_us, rel=0.1
    )
    small = Loads([100], [1], [1], [0], [0])
    assert steps.step(small) == MODEL.step(small), "nothing is to be won there"
    plain_order = sequence(nano_batches.layer_operations(MODEL, CASE.loads))
    sequential = nano_batches.ScheduledSteps(MODEL, FILE, plain_order)
    for rows in range(1, 129):
        loads = Loads([1000 * rows], [rows], [rows + rows % 3], [rows % 3], [0])
        assert not sequential.step(loads).by_schedule, "program order is no gain over itself"


def test_a_schedule_is_refused_for_what_it_was_not_made_for(found, tmp_path):
    path = tmp_path / "schedule.yaml"
    nano_batches.write(path, found.schedule, CASE, MODEL)
    assert nano_batches.read(path, CLUSTER, "fitted", MODEL).slots
    with pytest.raises(ValueError, match=r"case\.constants is 'fitted'; it must be 'peak'"):
        nano_batches.read(path, CLUSTER, "peak", MODEL)
    sixteen = CostModel(load_cluster_file(CLUSTER, 16), "fitted")
    with pytest.raises(ValueError, match="search again"):
        nano_batches.read(path, CLUSTER, "fitted", sixteen)
    path.write_text(path.read_text().replace("case:", "cases:"))
    with pytest.raises(ValueError, match="nanocp overlap search --cluster makes one"):
        nano_batches.read(path, CLUSTER, "fitted", MODEL)
    with pytest.raises(ValueError, match="cannot be read"):
        nano_batches.read(Path("/nowhere"), CLUSTER, "fitted", MODEL)


def test_windows_take_as_long_as_their_schedule_says(monkeypatch):
    """But for the fluid bound's, which have none."""
    step = StepTime(7_000, LayerTime(1, 2, 3, 4, 5), by_schedule=True)
    monkeypatch.setattr(nano_batches.ScheduledSteps, "step", lambda self, loads: step)
    schedule = sequence(nano_batches.layer_operations(MODEL, CASE.loads))
    scheduled, fluid = (
        make_simulation(FILE, "fitted", policy, Run(0, 200_000), Mechanisms(schedule=schedule)).run(
            Workload("issue-0", 600, 1).requests(20_000)
        )
        for policy in ("dual_balanced", FLUID)
    )
    assert scheduled.scheduled_share == 1 and scheduled.step_ms_mean == 7
    assert fluid.scheduled_share == 0 and fluid.step_ms_mean != 7
