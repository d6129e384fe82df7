"""The pipeline's benchmark: parts that fail cost no other part its results; what is not judged."""

import json
from contextlib import nullcontext

import pytest

from benchmarks.kit.machine import TwoProcesses
from benchmarks.pipeline import pipeline_cpu, pipeline_link
from benchmarks.pipeline.pipeline_layouts import StageClaim, best_of, changes_of, in_layout
from benchmarks.pipeline.pipeline_link import Decoded
from data_plane.profiling.stages import PassTime
from nanocp.config.passes import PassCosts
from nanocp.simulator.fit.pipeline import Played

TWO_CORES = TwoProcesses(compute=2.0, memory=1.9)


def test_a_part_that_fails_is_a_claim_that_does_not_hold(monkeypatch, tmp_path, capsys):
    def run(self, part):
        if part == "layouts":
            raise RuntimeError("out of memory")
        return [StageClaim(part, "<= 7%", "6%", True)]

    monkeypatch.setattr(pipeline_cpu.Subjects, "run", run)
    monkeypatch.setattr(pipeline_cpu, "two_processes", lambda: TWO_CORES)
    path = tmp_path / "results.json"
    with pytest.raises(SystemExit) as raised:
        pipeline_cpu.main(["--json", str(path)])
    assert raised.value.code == 1
    claims = {each["claim"]: each for each in json.loads(path.read_text())}
    assert list(claims) == ["predictor", "part layouts", "prefill", "link"]
    assert claims["part layouts"]["found"] == "RuntimeError('out of memory')"
    assert claims["part layouts"]["holds"] is False
    machine = json.loads((tmp_path / "results.machine.json").read_text())
    assert machine["two_processes_over_one"] == {"compute": 2.0, "memory": 1.9}
    assert "cannot be judged" not in capsys.readouterr().out


def test_shares_of_the_link_are_those_of_bytes_over_time():
    # Two times 32 rows send 14 KB each in a layer, half of it in each direction: 448 KB.
    assert pipeline_link.link_share(32, 154.0, 1000, 2.0) == pytest.approx(8 * 448e-3 / 2)
    # 32 rows of 21,504 bytes take 5.5 ms, and a layer 50/61 ms.
    assert pipeline_link.gpu_share(32) == pytest.approx(5.505 / 0.8197, rel=1e-3)


def claims_with(monkeypatch, tmp_path, ms=2.0, measured=0.955, lanes_per_s=160.0):
    """Claims of part_link where layers take `ms`, and links let a share `measured` through."""
    decoded = {
        "pipeline": Decoded(300.0, 0.1, 8.0),
        "instances": Decoded(150.0, 0.7, 154.0),
        "lanes": Decoded(lanes_per_s, 0.4, 154.0),
    }
    for name, replaced in {
        "why_not": lambda: "",
        "layer_ms": lambda checkpoint, num_rows: ms,
        "nodes_behind": nullcontext,
        "rates": lambda mbit: (1.0 * mbit, measured * mbit),
        "decode": lambda checkpoint, layout, rows, tokens, costs: decoded[layout],
    }.items():
        monkeypatch.setattr(pipeline_link, name, replaced)
    monkeypatch.setattr(pipeline_link.os, "sched_getaffinity", lambda _: {0, 1})
    return pipeline_link.part_link(tmp_path, tmp_path, lambda _: PassCosts(), is_quick=False)


@pytest.mark.parametrize(("ms", "measured", "holds", "reason"), [
    (2.0, 0.955, True, "Mbit/s through"),
    (1.3, 0.955, None, "a layer has more of the link than a GPU's"),
    (2.0, 0.89, None, "the link is off by more than 10%"),
    (2.0, 1.11, None, "the link is off by more than 10%"),
])  # fmt: skip
def test_over_another_link_or_with_faster_layers_nothing_is_judged(
    monkeypatch, tmp_path, ms, measured, holds, reason
):
    gigabit, slower, *shown = claims_with(monkeypatch, tmp_path, ms, measured)
    assert slower.holds is holds and slower.found.endswith(reason)
    assert gigabit.holds is (True if measured == 0.955 else None)
    assert f"{1000 * measured:.1f}" in gigabit.found and "Mbit/s" in gigabit.found
    assert {each.holds for each in shown} == {None}


def test_stages_are_judged_by_the_faster_instances(monkeypatch, tmp_path):
    gigabit, *_ = claims_with(monkeypatch, tmp_path, lanes_per_s=201.0)
    assert gigabit.holds is False and "2.00x, 1.49x of those in two lanes" in gigabit.found


@pytest.mark.parametrize(("here", "found", "holds", "reason"), [
    (TWO_CORES, (1.6, 0.7), [False, False], ["", ""]),
    (TwoProcesses(2.0, 1.6), (1.6, 0.7), [None, False], ["memory of two processes is 1.60", ""]),
    (TwoProcesses(1.2, 1.9), (1.6, 0.7), [None] * 2, ["compute of two processes is 1.20"] * 2),
    (TwoProcesses(1.2, 1.9), (1.8, 0.6), [True, True], ["", ""]),
])  # fmt: skip
def test_two_stages_miss_nothing_where_two_processes_do_less_than_is_asked(
    monkeypatch, tmp_path, here, found, holds, reason
):
    monkeypatch.setattr(pipeline_cpu, "two_stages", lambda *_, **__: found)
    rate, first_token, _ = pipeline_cpu.part_prefill(tmp_path, is_quick=False, here=here)
    assert [rate.holds, first_token.holds] == holds
    for claim, why in zip((rate, first_token), reason, strict=True):
        assert why in claim.found and ("two processes" in claim.found) == bool(why)


def test_the_best_whole_layers_are_found_by_what_an_even_layouts_took():
    """Layers of 2 ms, the first of 1, and 1 ms besides in each stage; sampling takes 12."""
    layers_us = [1000.0, *[2000.0] * 10]
    even = [PassTime(0, -1, (), [12_000.0, 25_000.0], layers_us, 12_000.0)]
    assert best_of(even) == (19_000.0, 9)
    prompts = [PassTime(0, -1, (), [12_000.0, 13_000.0], layers_us)]
    assert best_of(prompts) == (13_000.0, 6)


def test_a_run_says_what_its_passes_would_have_taken_in_another_layout():
    """Layers 0 to 10 take 1 to 11 ms. The first stage has 6 of 12, and 9 from pass 1 on."""
    layers_us = [1000.0 * (number + 1) for number in range(11)]
    times = [
        PassTime(0, -1, (), [22_000.0, 60_000.0], layers_us),
        PassTime(1, -1, (), [46_000.0, 36_000.0], layers_us),
    ]
    played = Played(times, [], [(1, (9, 3))], {}, 0.0)
    assert [each.stage_us for each in in_layout(played, 6)] == [[22_000, 60_000]] * 2
    assert [each.stage_us for each in in_layout(played, 8)] == [[37_000, 45_000]] * 2
    assert times[1].stage_us == [46_000, 36_000], "what was measured stays"


def test_changes_are_named_by_their_passes():
    assert changes_of(Played([], [], [], {}, 0.0)) == "0 changes"
    changed = Played([], [], [(30, (9, 3)), (99, (6, 6))], {}, 0.0)
    assert changes_of(changed) == "2 changes (30: 9,3; 99: 6,6)"
