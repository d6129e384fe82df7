"""Schedules that the search finds keep every law and lose little to the bound."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.overlap.first_schedule import first_schedule
from harness.paths import ROOT
from nanocp.overlap import paper, schedule
from nanocp.overlap import search as search_module
from nanocp.overlap.interference import COMPUTE, MEMORY, NETWORK, RESOURCES, Interference
from nanocp.overlap.layers import NANO_BATCHING_COST, collective_forms
from nanocp.overlap.operations import Operation, cut, waits, without_empty
from nanocp.overlap.schedule import Schedule, duration_us, violations
from nanocp.overlap.search import fluid_bound, search, sequence, totals

LAYER, TABLE_3 = paper.layer(), paper.TABLE_3
FREE = Interference(memory=((0, 0), (0.01, 1), (1, 1)), network=((0, 0), (0.01, 1), (1, 1)))
"""Nothing disturbs anything."""
TILE = 128 / paper.BATCH


@pytest.fixture(scope="module")
def found():
    """The paper's case, without the all-reduce; the first try is the best in halves."""
    return search([LAYER], TILE, TABLE_3, limit_s=6)


def test_the_papers_schedule_reaches_95_percent_of_the_bound(found):
    assert list(violations(found.schedule, TABLE_3)) == []
    assert 0.95 <= found.fluid_us / found.schedule.period_us <= 1
    assert found.sequential_us == pytest.approx(sum(operation.us for operation in LAYER))
    assert found.structure_us < found.schedule.period_us < found.sequential_us
    assert {slot.nano.operation for slot in found.schedule.slots} == set(LAYER)


def test_sizes_finer_cuts_and_the_other_form_of_a_collective_gain_more_than_halves(monkeypatch):
    """With the one stretch that is the best of all, and without a limit of time."""
    monkeypatch.setattr(search_module, "_STRETCHES", ((2.0, 1.3),))
    found = first_schedule(collective_forms(LAYER), TABLE_3, 1.111, TILE)
    assert list(violations(found.schedule, TABLE_3)) == []
    parts = {slot.nano for slot in found.schedule.slots}
    assert {nano.operation.name for nano in parts} >= {"all-reduce-1", "all-reduce"}
    assert all((edge * 16).is_integer() for nano in parts for edge in nano[1:])


RESULTS = json.loads((ROOT / "benchmarks/results/gpu_overlap.json").read_text())
CARD = [each for each in RESULTS if each["kind"] == "lanes"]
ALONE = {each["rows"]: each["one_us"] for each in CARD if not each["waits_of_compute"]}


@pytest.mark.parametrize(
    "point", CARD, ids=lambda each: f"{each['rows']}-{each['waits_of_compute']}"
)
def test_two_lanes_win_and_lose_where_they_did_on_the_card(monkeypatch, point):
    """By the lanes' model and by the search; a lane's compute is that of points without waits."""
    rows, one_us = point["rows"], point["one_us"]
    lane_us = float(np.interp(rows / 2, list(ALONE), list(ALONE.values())))
    wait_us = one_us - ALONE[rows]
    assert (TABLE_3.two_lanes_us(lane_us, wait_us, wait_us) > one_us) == (point["ratio"] > 1)
    monkeypatch.setattr(search_module, "_STRETCHES", ((1.0, 1.0),))
    compute_us = ALONE[rows], 2 * lane_us - ALONE[rows]
    compute = Operation("compute", COMPUTE, *compute_us, needs_before=("wait",))
    layer = without_empty((compute, Operation("wait", NETWORK, wait_us, 0.0, ("compute",))))
    assert (search([layer], 1 / 64, TABLE_3).gain > 1) == (point["ratio"] < 1)


def test_without_overlap_the_bound_is_the_sequence():
    work_us = totals(cut(LAYER, {}, ()))
    assert fluid_bound(work_us, TABLE_3, (COMPUTE,)) == pytest.approx(sum(work_us.values()))
    assert fluid_bound(work_us, FREE) == pytest.approx(max(work_us.values()), rel=0.06)


def test_what_cannot_overlap_stays_in_sequence():
    """Two operations of one resource that wait for each other: nothing is faster than both."""
    one = Operation("one", COMPUTE, 10.0, 1.0, needs_before=("two",))
    two = Operation("two", COMPUTE, 10.0, 1.0, needs=("one",))
    found = search([(one, two)], TILE, TABLE_3, limit_s=5)
    assert found.schedule == sequence((one, two)) and found.gain == 1.0


@st.composite
def layers(draw):
    """A chain of operations with random times, some of which skip their neighbour."""
    operations = []
    for number in range(count := draw(st.integers(2, 5))):
        skipped = 1 + (number > 1 and draw(st.booleans()))
        needs = (f"op{number - skipped}",) if number else ()
        resource, us = draw(st.sampled_from(RESOURCES)), draw(st.floats(10, 1000))
        fixed_us = us * draw(st.floats(0, 0.2))
        before = (f"op{count - 1}",) if number == 0 else ()
        operations.append(Operation(f"op{number}", resource, us, fixed_us, needs, before))
    return tuple(operations)


@settings(max_examples=8, deadline=None)
@given(layers())
def test_any_layers_schedule_keeps_the_laws_and_the_bound(operations):
    found = search([operations], TILE, TABLE_3, limit_s=0.3)
    assert list(violations(found.schedule, TABLE_3)) == []
    assert found.schedule.period_us <= found.sequential_us * 1.0001
    assert found.schedule.period_us >= found.fluid_us * 0.9999


def moved(found, index, **changes):
    slots = list(found.schedule.slots)
    slots[index] = slots[index]._replace(**changes)
    return Schedule(found.schedule.period_us, tuple(slots))


def test_each_broken_law_is_a_sentence(found):
    slots = found.schedule.slots
    names = [schedule.name_of(slot.nano) for slot in slots]
    late = names.index("D 0.00-0.50")
    broken = list(violations(moved(found, late, start_us=slots[late].start_us - 300), TABLE_3))
    assert any("before UG 0.00-0.50 has ended" in each for each in broken)
    beside = names.index("DecAttn 0.00-0.50")
    broken = list(violations(moved(found, beside, share=0.9), TABLE_3))
    assert any("of the GPU together" in each for each in broken)
    both = [names.index(f"UG {part}") for part in ("0.00-0.50", "0.50-1.00")]
    same = moved(found, both[1], start_us=slots[both[0]].start_us)
    assert any("two of them on the same resource" in each for each in violations(same, TABLE_3))
    short = replace(found.schedule, period_us=100.0)
    assert any("takes longer than a period" in each for each in violations(short, TABLE_3))


def test_nano_operations_wait_only_for_those_that_share_rows():
    nano = cut(LAYER, {"KQV": (0.25, 0.5, 0.75)}, (0.5,))
    named = [schedule.name_of(one) for one in nano]
    pairs = {(named[wait.earlier], named[wait.later]) for wait in waits(nano)}
    assert ("KQV 0.25-0.50", "DecAttn 0.00-0.50") in pairs
    assert ("KQV 0.50-0.75", "DecAttn 0.00-0.50") not in pairs
    assert sum(one.us for one in nano if one.operation.name == "KQV") == pytest.approx(
        paper.MEASURED_US["KQV"] * (1 + 3 * NANO_BATCHING_COST)
    )


def test_a_part_of_the_gpu_makes_an_operation_as_slow_as_table_3_says(found):
    assert TABLE_3.speed(MEMORY, 0.4) == 0.8 and TABLE_3.speed(NETWORK, 0.15) == pytest.approx(0.4)
    assert TABLE_3.speed(COMPUTE, 0.35) == 0.35 and TABLE_3.speed(MEMORY, 1) == 1
    slot = next(slot for slot in found.schedule.slots if slot.nano.operation.name == "DecAttn")
    assert duration_us(slot._replace(share=0.4), TABLE_3) == pytest.approx(slot.nano.us / 0.8)


@pytest.mark.parametrize("points", [((0, 0),), ((0, 0), (0.5, 0.7), (0.9, 0.6), (1, 1)), ((0, 1),)])
def test_interference_that_makes_no_sense_is_refused(points):
    with pytest.raises(ValueError, match=r"interference of memory is .*; it must be pairs"):
        Interference(points, TABLE_3.network)


def test_a_schedules_file_comes_back_and_others_are_refused(found, tmp_path):
    path = tmp_path / "schedule.yaml"
    schedule.write(path, found.schedule, LAYER, TABLE_3)
    back = schedule.read(path, LAYER, TABLE_3)
    assert back.period_us == pytest.approx(found.schedule.period_us, abs=1e-3)
    assert len(back.slots) == len(found.schedule.slots)
    with pytest.raises(ValueError, match="search again"):
        schedule.read(path, LAYER[1:], TABLE_3)
    text = path.read_text()
    entry = "- " + text.split("\n- ")[1] + "\n"
    assert "KQV" in entry
    for changed, sentence in (
        (text.replace("version: 1", "version: 2"), "not a schedule of version 1"),
        (text.replace("share_of_gpu", "share"), "'share_of_gpu' is missing"),
        (text.replace("operation: UG", "operation: XY"), r"nano_operations.\d+.operation is 'XY'"),
        (text.replace("nano_operations:", f"nano_operations:\n{entry}"), "rows of KQV are"),
        (text.replace(entry, ""), "rows of KQV are"),
        ("[]", "not a schedule"),
    ):
        path.write_text(changed)
        with pytest.raises(ValueError, match=sentence):
            schedule.read(path, LAYER, TABLE_3)


def test_the_solver_says_nothing():
    """A process of its own: a solver's name comes once, from its library."""
    code = "from nanocp.overlap.search import _Program as P; p = P(); x = p.addIntegral(2, 5); "
    code += "print(p.least(x))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "2.0\n"
