"""The GPU's benchmarks run with torch and Triton alone, here with small shapes, interpreted."""

import json
import os
import subprocess
import weakref
from dataclasses import asdict

import pytest
import torch

from benchmarks.gpu import gpu_attention, gpu_costs, gpu_moe, gpu_shapes, gpu_step
from benchmarks.kit.bench import CANNOT_JUDGE
from harness.gpu.gpu_machine import command_of
from harness.paths import ROOT
from nanocp.simulator.costs.cluster_file import SHIPPED, load_cluster_file
from nanocp.simulator.costs.cost import CostModel

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def missed(claims):
    return [claim for claim in claims if not claim.holds]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run both benchmarks with small shapes; the folder holds what they wrote."""
    folder = tmp_path_factory.mktemp("results")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    for name in ("gpu_step", "gpu_attention"):
        script, path = ROOT / f"benchmarks/gpu/{name}.py", folder / f"{name}.json"
        command = command_of(script, "--tiny", "--json", path)
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.system
@without_gpu
@pytest.mark.parametrize(("name", "kinds"), [
    ("gpu_step",
     {"ceilings", "exchange", "exchange, packed", "graphs", "replay", "step", "widths"} | {"wire"}),
    ("gpu_attention", {"ceilings", "merge", "experts", "attention"}),
])  # fmt: skip
def test_every_measurement_runs_and_is_kept(results, name, kinds):
    found = json.loads((results / f"{name}.json").read_text())
    assert {result["kind"] for result in found} == kinds
    assert all(
        result[key] > 0 for result in found for key in result if key == "us" or key.endswith("_us")
    )
    cells = {
        (r["backend"], r["kv"], r["batch"], r["context"]) for r in found if r["kind"] == "attention"
    }
    backends = {"bf16": ["triton"], "fp8": ["triton"]}
    expected = {
        (b, kv, *cell)
        for kv, *cell in gpu_attention.cells(gpu_attention.TINY)
        for b in backends[kv]
    }
    assert cells == (expected if name == "gpu_attention" else set())


@pytest.mark.system
@without_gpu
def test_what_was_measured_becomes_a_set_of_the_simulator_with_its_source(results, tmp_path):
    """It is written twice: the second replaces the first."""
    cluster, text = tmp_path / "tiny.yaml", (SHIPPED / "h200x32-deepseek-v3.yaml").read_text()
    cluster.write_text(
        text.replace("num_layers: 61", "num_layers: 2").replace(
            "num_moe_layers: 58", "num_moe_layers: 1"
        )
    )
    sizes = []
    for _ in range(2):
        gpu_costs.main(out=cluster, results=results, cluster=str(cluster), base="peak")
        sizes.append(len(cluster.read_text()))
    file = load_cluster_file(str(cluster))
    assert list(file.costs) == ["peak", "fitted", "operators", "measured"]
    assert sizes[0] == sizes[1]
    measured = file.costs["measured"]  # what attention takes, by whichever of its terms
    attention = (
        measured.attention_us,
        measured.attention_ps_per_token,
        measured.attention_ns_per_row,
    )
    assert sum(attention) > 0
    assert CostModel(file, "measured").attention_us(1e6, 1) != CostModel(file, "peak").attention_us(
        1e6, 1
    )
    head, *lines = cluster.read_text().partition("  measured:")[2].splitlines()
    described = json.loads((results / "gpu_step.machine.json").read_text())
    assert described["commit"][:12] in head and "one none, torch" in head
    assert len(lines) == len(asdict(file.costs["measured"])) and all(
        "  # " in line for line in lines
    )


def test_constants_are_found_again_in_what_they_made():
    file = load_cluster_file("h200x32-deepseek-v3")
    costs, model = file.costs_of("peak"), CostModel(file, "peak")
    attention = [
        {"kind": "attention", "backend": "triton", "kv": "bf16", "batch": batch, "context": context}
        for batch, context in ((1, 2048), (16, 65536), (256, 8192), (256, 64))
    ]
    for cell in attention:
        cell["us"] = model.attention_us(cell["batch"] * cell["context"], cell["batch"])
    experts = [{"kind": "experts", "backend": "triton", "rows": rows} for rows in (8, 32, 128)]
    for cell in experts:
        cell["us"] = file.layer_expert_us(costs, cell["rows"])
    step = [
        {
            "kind": "step",
            "variant": "triton",
            "rows": r,
            "context": 8192,
            "layers": 61,
            "moe_layers": 58,
        }
        for r in (16, 64, 128)
    ]
    for cell in step:
        rows = cell["rows"]
        layer_us = (
            model.attention_us(rows * 8192, rows)
            + costs.other_us
            + costs.other_ns_per_row * rows / 1e3
        )
        expert_us = file.layer_expert_us(costs, rows)
        cell["replay_us"] = 61 * layer_us + 58 * expert_us + costs.step_us
    found, sources = gpu_costs.measured_costs([*attention, *experts], step, file, "peak")
    expected, fitted = asdict(costs), asdict(found)
    assert fitted.pop("dispatch_combine_us_at_128_rows") == expected.pop(
        "dispatch_combine_us_at_128_rows"
    )
    assert fitted == pytest.approx(expected, rel=2e-3)
    assert (
        sources["other_us"].startswith("3 points of gpu_step")
        and "not measured" in sources["exchange_us"]
    )
    exchange = [
        {"kind": "exchange", "backend": name, "us": 10.0}
        for name in ("put Q", "take Q", "put RES", "merge", "wait for nobody")
    ]
    found, sources = gpu_costs.measured_costs(
        [*attention, *experts], [*step, *exchange], file, "peak"
    )
    assert found.exchange_us == pytest.approx(6 * 10 + costs.attention_us + costs.exchange_us / 2)
    assert not found.hides_queries and "60.0 us" in sources["exchange_us"]
    assert costs.hides_queries and found.other_us == pytest.approx(costs.other_us, rel=2e-3)
    with pytest.raises(ValueError, match="flashmla, bf16 KV: 0 results are too few"):
        gpu_costs.measured_costs([*attention, *experts], step, file, "peak", "flashmla")
    more = [
        {**cell, "experts": num, "us": 15.0 + (cell["us"] if num == 8 else cell["us"] / 2)}
        for cell in experts
        for num in (8, 4)
    ]
    found, sources = gpu_costs.measured_costs([*attention, *more], step, file, "peak")
    assert found.weights_gb_per_s == pytest.approx(costs.weights_gb_per_s, rel=2e-3)
    assert found.gemm_tflops == pytest.approx(costs.gemm_tflops, rel=2e-3)
    assert "15.0 us of any number of experts are in other_us" in sources["weights_gb_per_s"]
    short = [{**cell, "replay_us": 1.0} for cell in step]
    found, sources = gpu_costs.measured_costs([*attention, *experts], short, file, "peak")
    assert (found.other_us, sources["other_us"][:7]) == (costs.other_us, "as peak")
    for wrong, words in (
        ([], "0 results are too few"),
        ([{**step[0], "layers": 2}], "measured 2 layers"),
    ):
        with pytest.raises(ValueError, match=words):
            gpu_costs.measured_costs([*attention, *experts], wrong, file, "peak")
    with pytest.raises(ValueError, match="gpu_attention, triton, bf16 KV: 0 results are too few"):
        gpu_costs.measured_costs(experts, step, file, "peak")


@without_gpu
def test_one_that_fails_does_not_keep_the_others_from_being_measured(monkeypatch, tmp_path, capsys):
    def broken():
        raise RuntimeError("out of something")

    def whole():
        yield {"kind": "whole"}

    kinds = {"broken": broken, "whole": whole}
    listed = [({"kind": kind}, measure) for kind, measure in kinds.items()]
    monkeypatch.setattr(gpu_step, "measures", lambda card, ceilings: listed)
    with pytest.raises(SystemExit) as ended:
        gpu_step.main(["--tiny", "--json", str(tmp_path / "results.json")])
    assert ended.value.code == 1 and "RuntimeError: out of something" in capsys.readouterr().out
    assert [r["kind"] for r in json.loads((tmp_path / "results.json").read_text())] == [
        "ceilings",
        "whole",
    ]


@without_gpu
@pytest.mark.parametrize("benchmark", [gpu_step, gpu_attention])
def test_without_a_gpu_it_says_so(benchmark):
    with pytest.raises(SystemExit, match="no NVIDIA GPU is here"):
        benchmark.main([])


@pytest.mark.system
@without_gpu
def test_a_fused_mixture_is_measured(tmp_path):
    """Sums are right, and a peer that stays away is an error; times mean nothing here."""
    path = tmp_path / "gpu_moe.json"
    with pytest.raises(SystemExit) as ended:
        gpu_moe.main(["--tiny", "--json", str(path)])
    found = json.loads(path.read_text())
    assert ended.value.code == 0
    assert {result["kind"] for result in found} == set(gpu_moe.MEASURES)
    wrong = [{**found[0], "different": 1}, {**found[0], "error": float("nan")}]
    wrong.append({**found[0], "sent": found[0]["sent"] + 1})
    assert len(missed(gpu_moe.faults(wrong))) == 3 and missed(gpu_moe.faults(found)) == []


def test_a_measurement_of_a_mixture_that_is_there_is_not_repeated(monkeypatch, tmp_path, capsys):
    path, asked = tmp_path / "gpu_moe.json", []

    def measure(shapes, cell):
        asked.append(cell["form"])
        if len(asked) == 2:
            raise RuntimeError("out of something")
        return {"ratio": 2.0}

    monkeypatch.setattr(gpu_moe, "MEASURES", {"time": measure})
    for limit_s, status, words in (
        ("-1", CANNOT_JUDGE, "the same command goes on"),
        ("100", 1, "RuntimeError: out of something"),
        ("100", 0, "cores, torch"),
    ):
        with pytest.raises(SystemExit) as ended:
            gpu_moe.main(["--tiny", "--json", str(path), "--limit-s", limit_s])
        assert ended.value.code == status and words in capsys.readouterr().out
    assert asked == ["fp32", "fp8", "fp8"]
    assert [result["form"] for result in json.loads(path.read_text())] == ["fp32", "fp8"]


def test_broken_claims_of_a_fused_mixture_are_said():
    cell = {"kind": "time", "form": "bf16", "experts": 8, "instances": 1, "busy": 0.9}
    fine = [{**cell, "rows": 32, "ratio": 0.85}, {**cell, "rows": 128, "ratio": 1.0}]
    assert missed(gpu_moe.claims(fine)) == []
    slow = [{**cell, "rows": 32, "ratio": 0.86}, {**cell, "rows": 128, "ratio": 1.0, "busy": 0.8}]
    gemm = {"kind": "gemm", "form": "fp8", "experts": 8, "rows": 1, "ratio": 0.89}
    operations = {"kind": "operations", "form": "fp8", "split": 30, "fused": 2}
    assert len(missed(gpu_moe.claims([*slow, gemm, operations]))) == 4


def test_broken_claims_are_said():
    step = {"kind": "step", "variant": "flashmla", "rows": 64, "context": 8192}
    fine = {**step, "replay_us": 38_000}
    graphs = {"kind": "graphs", "graphs": 48, "gib": 2.0}
    replay = {"kind": "replay", "part": "whole", "cpu_us": 99.9}
    assert missed(gpu_step.claims([fine, replay, graphs])) == []
    late = [{**fine, "replay_us": 38_001}, {**replay, "cpu_us": 100.0}]
    wrong = [*late, {**graphs, "gib": 2.1}, {**graphs, "graphs": 49}]
    assert len(missed(gpu_step.claims(wrong))) == 4


def test_the_papers_bounds_have_no_more_graphs_than_the_paper():
    bounds = gpu_shapes.PAPER_BOUNDS
    buckets = gpu_step.BucketTable(
        bounds.max_rows, bounds.max_attention_rows, gpu_shapes.ROW_BUCKETS, num_instances=2
    ).all()
    assert len(buckets) <= gpu_step.MAX_GRAPHS


@without_gpu
def test_graphs_are_counted_while_all_of_them_live(monkeypatch):
    """One that is let go gives its memory back, and the next one's would be counted again."""
    alive, living = weakref.WeakSet(), []

    class Replay:
        def __init__(self, context):
            alive.add(self)

        def __call__(self):
            pass

    card = gpu_step.Card(gpu_shapes.TINY)
    monkeypatch.setattr(card, "graphs", lambda parts: Replay)
    monkeypatch.setattr(card, "sync", lambda: living.append(len(alive)))
    (result,) = gpu_step.measure_graphs(card, {})
    assert living == [result["graphs"]] and result["graphs"] > 1
