"""The GPU's benchmark of steps and exchange, with small shapes under the interpreter: it runs, and says what it is
for."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu_step

CEILINGS = {"kind": "ceilings", "copy_gb_per_s": 1.0, "matmul_tflop_per_s": 1.0}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@without_gpu
@pytest.mark.parametrize("measure", gpu_step.MEASURES)
def test_every_measurement_runs(measure):
    results = list(measure(gpu_step.Card(gpu_step.TINY), CEILINGS))
    assert results and {result["kind"] for result in results} == {measure.__name__.removeprefix("measure_")}
    assert all(result[key] > 0 for result in results for key in result if key == "us" or key.endswith("_us"))


@without_gpu
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="no NVIDIA GPU is here"):
        gpu_step.main(None, tiny=False)


def test_broken_claims_are_said():
    step = {"kind": "step", "rows": 64, "replay_cpu_us": 100.0}
    graphs = {"kind": "graphs", "graphs": 48, "gib": 5.32}
    assert gpu_step.broken_claims([{**step, "replay_cpu_us": 99.0}, graphs]) == []
    assert len(gpu_step.broken_claims([step, {**graphs, "gib": 5.4}, {**graphs, "graphs": 49}])) == 3


def test_the_papers_bounds_have_no_more_graphs_than_the_paper():
    bounds = gpu_step.PAPER_BOUNDS
    buckets = gpu_step.BucketTable(bounds.max_rows, bounds.max_attention_rows, gpu_step.ROW_BUCKETS).all()
    assert len(buckets) <= gpu_step.MAX_GRAPHS
