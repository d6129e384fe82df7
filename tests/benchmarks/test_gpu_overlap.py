"""gpu_overlap without a GPU: what it claims, and that it says so where it cannot measure."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import green_contexts

from benchmarks.gpu import gpu_overlap as bench
from benchmarks.kit import bench as kit
from harness.paths import ROOT
from nanocp.simulator.costs.cluster_file import cluster_path, load_cluster_file

LANES = {"kind": "lanes", "rows": 64, "waits_of_compute": 1.0, "ratio": 0.8, "hidden": 0.6}
ENGINE = {"kind": "engine", "rows": 64, "equal": True, "ratio": 0.9}


@pytest.mark.parametrize(("result", "sentence"), [
    (LANES, None),
    (LANES | {"ratio": 0.86}, "two lanes take 0.86 of one"),
    (LANES | {"hidden": 0.4}, "0.4 of the waits are hidden"),
    (LANES | {"ratio": 1.2, "waits_of_compute": 0.0}, None),
    (ENGINE, None),
    (ENGINE | {"equal": False}, "halves give the bits"),
    (ENGINE | {"ratio": 1.01}, "halves take 1.01 of the whole"),
    ({"kind": "interference"}, "something that is claimed was measured"),
])  # fmt: skip
def test_each_claim_can_fail(result, sentence):
    missed = [claim.sentence for claim in bench.claims([result]) if not claim.holds]
    assert [sentence in each for each in missed] == ([True] if sentence else [])


def test_the_spread_over_shapes_is_said_beside_the_papers():
    pair = {"kind": "interference", "mechanism": "two streams", "of": "memory"}
    (line,) = bench.spread([pair | {"r": 0.8, "p": 0.4}, pair | {"r": 0.7, "p": 0.3}])
    assert "R + P is 1.10, its deviation between shapes 9.1% (paper: 5%)" in line


def test_measured_interference_is_a_section_of_a_cluster_file_that_the_search_takes(tmp_path):
    results = json.loads((ROOT / "benchmarks/results/gpu_overlap.json").read_text())
    pair = {"kind": "interference", "mechanism": "two streams", "of": "memory", "r": 0.4, "p": 0.7}
    path, shipped = tmp_path / "cluster.yaml", cluster_path("h200x32-deepseek-v3").read_text()
    path.write_text(bench.table([*results, pair]) + shipped)
    found = load_cluster_file(str(path)).interference
    assert found.memory == ((0, 0), (0.507, 0.787), (1, 1)) and "here by memory" in found.source


def test_without_a_gpu_nothing_is_measured_and_that_is_no_success():
    with pytest.raises(SystemExit, match="no NVIDIA GPU is here"):
        bench.main([])
    whats = [what for what, _ in bench.measurements(False)]
    assert len(whats) == len(set(whats)) == 3 * 6 + 3 * 5
    # Green contexts can end the process.
    assert all(str(what[1]).endswith(" SMs") for what in whats[-12:])
    assert not any(str(what[1]).endswith(" SMs") for what in whats[:-12])


def test_a_run_whose_time_is_over_before_a_claim_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(kit, "_gpu", lambda *_: "none")
    with pytest.raises(SystemExit) as ended:
        bench.main(["--limit-s", "-1"])
    assert ended.value.code == 1
    assert "missed: something that is claimed was measured" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["device", "device_id"])
def test_a_part_of_the_gpu_is_asked_for_as_this_release_of_torch_has_it(monkeypatch, number):
    asked = []
    by_number = {
        "device": lambda *, num_sms=None, device=None: asked.append((num_sms, device)),
        "device_id": lambda *, num_sms=None, device_id=None: asked.append((num_sms, device_id)),
    }
    context = SimpleNamespace(Stream=None, create=by_number[number])
    monkeypatch.setattr(green_contexts, "GreenContext", context)
    monkeypatch.setattr(green_contexts, "SUPPORTED", True)
    bench.green_context(24, torch.device("cuda", 1))
    assert asked == [(24, 1)]
    monkeypatch.setattr(green_contexts, "SUPPORTED", False)
    with pytest.raises(RuntimeError, match="has no streams of green contexts"):
        bench.green_context(24, torch.device("cuda", 1))
