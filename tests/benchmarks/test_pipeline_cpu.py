"""The pipeline's benchmark: a part that fails costs no other part its results."""

import json

import pipeline_cpu
import pytest
import typer
from pipeline_layouts import StageClaim


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
