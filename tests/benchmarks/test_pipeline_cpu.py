"""The pipeline's benchmark: parts that fail cost no other part its results; what is not judged."""

import json
from contextlib import nullcontext

import pipeline_cpu
import pytest
import typer
from pipeline_layouts import StageClaim
from slow_link import Decoded


def test_a_part_that_fails_is_a_claim_that_does_not_hold(monkeypatch, tmp_path, capsys):
    def run(self, part):
        if part == "layouts":
            raise RuntimeError("out of memory")
        return [StageClaim(part, "<= 7%", "6%", True)]

    monkeypatch.setattr(pipeline_cpu.Subjects, "run", run)
    path = tmp_path / "results.json"
    with pytest.raises(typer.Exit) as raised:
        pipeline_cpu.main(json=path)
    assert raised.value.exit_code == 1
    claims = {each["claim"]: each for each in json.loads(path.read_text())}
    assert list(claims) == ["predictor", "part layouts", "prefill", "link"]
    assert claims["part layouts"]["found"] == "RuntimeError('out of memory')"
    assert claims["part layouts"]["holds"] is False
    assert "not judged" not in capsys.readouterr().out
    monkeypatch.setattr(pipeline_cpu.Subjects, "run", lambda self, part: [])
    with pytest.raises(typer.Exit) as raised:
        pipeline_cpu.main()
    assert raised.value.exit_code == 0


@pytest.mark.parametrize(
    ("ms", "measured", "holds", "reason"),
    [
        (0.80, 955.0, True, ""),
        (0.83, 955.0, None, "a layer takes longer than a GPU's"),
        (0.80, 890.0, None, "the link is off by more than 10%"),
        (0.80, 1110.0, None, "the link is off by more than 10%"),
    ],
)
def test_over_another_link_or_with_slower_layers_nothing_is_judged(
    monkeypatch, tmp_path, ms, measured, holds, reason
):
    stages, instances = Decoded(300.0, 0.1, 12.0), Decoded(150.0, 0.7, 160.0)
    for name, replaced in {
        "why_not": lambda: "",
        "layer_ms": lambda checkpoint, num_rows: ms,
        "nodes_behind": nullcontext,
        "rates": lambda mbit: (1.0 * mbit, measured / 1000 * mbit),
        "decode": lambda checkpoint, layout, *_: stages if layout == "pipeline" else instances,
    }.items():
        monkeypatch.setattr(pipeline_cpu, name, replaced)
    monkeypatch.setattr(pipeline_cpu.os, "sched_getaffinity", lambda _: {0, 1})
    asked, *shown = pipeline_cpu.part_link(tmp_path, tmp_path, is_quick=False)
    assert asked.holds is holds and asked.found.endswith(reason)
    assert f"{measured:.1f}" in asked.found and "Mbit/s" in asked.found
    assert [each.holds for each in shown] == [None, None]
