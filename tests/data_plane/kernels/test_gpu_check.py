"""The GPU's commands: without a GPU they say so, and their checks run under the interpreter too."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch

from data_plane.attention.triton_mla import TritonMla
from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.cuda_graphs import CudaGraphs
from data_plane.moe.fused.mixture import GateTiles
from data_plane.transport.gpu.cuda_runtime import CudaRuntime
from harness.gpu import check_run, gpu_cluster, gpu_token_checks, one_of_many
from harness.gpu.check_run import run
from harness.gpu.gpu_cluster import GpuCluster
from harness.gpu.gpu_exchange_checks import exchange_checks
from harness.gpu.gpu_kernel_checks import (
    attention_checks,
    fused_checks,
    merge_and_expert_checks,
    pages_in_pinned_memory,
)
from harness.gpu.gpu_layer_checks import layer_checks
from harness.gpu.gpu_loss_checks import LEAVE_S, survives_a_kill
from harness.gpu.gpu_machine import command_of
from harness.gpu.gpu_token_checks import decode_process, token_checks
from harness.gpu_stand_ins.cuda_stand_in import Cuda
from harness.gpu_stand_ins.fake_cudart import FakeCudart
from harness.gpu_stand_ins.whole_instances import launched
from harness.kernels.fused_cases import SMALL_TILES
from harness.paths import ROOT
from harness.transports.exchange_cases import NARROW
from nanocp.config.cluster import BoundsConfig
from nanocp.overlap.policies.orders import BehindFirst, DualBatchOverlap

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def compiling_environment():
    """Make the environment of a process that compiles its kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so():
    """It needs torch and Triton alone: nothing else is imported at its start."""
    command = command_of(ROOT / "tests/gpu_check.py", absent=["transformers"])
    environment = compiling_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), environment["PYTHONPATH"]])
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1 and "no NVIDIA GPU is here" in result.stderr, result.stderr


@without_gpu
def test_the_checks_themselves_run():
    checks = [
        *layer_checks("cpu", is_small=True),
        *attention_checks("cpu", (32, 16), 2, num_parts=2),
        *merge_and_expert_checks("cpu"),
    ]
    exchange = exchange_checks("cpu", 2, 2, NARROW)
    results = run([*checks[:8], *checks[-5:], *exchange])
    assert not [result for result in results if result["error"]]


@without_gpu
def test_the_check_of_pinned_memory_runs(monkeypatch, tmp_path):
    Cuda().install(monkeypatch)
    library = FakeCudart(tmp_path)
    pages_in_pinned_memory("cpu", CudaRuntime(library, 0))
    assert "cudaHostRegister" in library.names() and not library.pinned


@pytest.mark.system
@without_gpu
def test_the_checks_of_a_fused_mixture_run():
    tiles = SMALL_TILES._replace(rows=16, columns=64, depth=64, gate=GateTiles(8, 16, 64, 2))
    checks = fused_checks("cpu", max_rows=6, num_epochs=1, tiles=tiles, limit_ms=0.01)
    assert not [result for result in run(checks) if result["error"]]


@without_gpu
def test_the_checks_of_tokens_run(mini):
    """The exact check and the one for FP8 run, with one token each."""
    exact, _, _, _, near = token_checks(
        *mini, "cpu", num_instances=2, lengths=(1, 70), num_tokens=1
    )
    results = run([exact, near])
    assert not [result for result in results if result["error"]]


class StandInStream:
    """Stands for a stream and for an event: here all work is in one order."""

    def __init__(self, *arguments):
        pass

    def wait_stream(self, other):
        pass

    synchronize = record = wait = wait_stream


@without_gpu
def test_what_captures_runs_up_to_the_captures_themselves(mini, monkeypatch, tmp_path):
    """CUDA does nothing here: only what a graph would have computed is missing."""
    path, _ = mini
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, StandInStream)
    graph = type("Graph", (), {"replay": lambda self: None})
    for name, stand_in in (
        ("CUDAGraph", graph),
        ("graph", lambda *_, **__: contextlib.nullcontext()),
        ("stream", lambda _: contextlib.nullcontext()),
        ("graph_pool_handle", lambda: 1),
        ("current_stream", StandInStream),
        ("synchronize", lambda *_: None),
        ("empty_cache", lambda: None),
        ("mem_get_info", lambda _: (0, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        gpu_token_checks, "BOUNDS", BoundsConfig(max_rows=4, max_attention_rows=4, max_partials=1)
    )
    monkeypatch.setattr(gpu_cluster, "BucketTable", OneBucket)
    runtime = CudaRuntime(FakeCudart(tmp_path), 0)
    monkeypatch.setattr(one_of_many, "load_runtime", lambda device: runtime)
    decode_process(0, 1, tmp_path, path, "cpu")
    found = json.loads((tmp_path / "0.json").read_text())
    assert [len(ids) - num_prompt for ids, num_prompt in found] == [8] * 4


@pytest.mark.system
@without_gpu
def test_one_of_two_processes_is_killed_and_the_other_goes_on(mini):
    """The check for a card, with eager steps; what processes map of each other is in files."""
    found = survives_a_kill(*mini, device="cpu")
    assert found["ended_s"] > LEAVE_S, "the survivor waited"


@without_gpu
@pytest.mark.parametrize(("policy", "num_calls"), [(BehindFirst(), 2), (DualBatchOverlap(), 1)])
def test_graphs_of_two_lanes_give_the_tokens_of_the_reference(mini, monkeypatch, policy, num_calls):
    """A graph runs its interpreted steps anew; one instance, since nobody takes turns.

    One call of attention is enough for both lanes, where the policy says so.
    """
    cuda, run_attention, rows = Cuda(), TritonMla.run, []
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(CudaGraphs, "_run", launched(cuda, CudaGraphs._run))
    monkeypatch.setattr(gpu_cluster, "BucketTable", OneBucket)
    path, oracle = mini
    cluster = GpuCluster(
        path, num_instances=1, num_parts=2, is_captured=True, num_lanes=2, policy=policy
    )
    cluster.add_drawn((1, 70, 63), (1, 1, 1))
    monkeypatch.setattr(
        TritonMla, "run", lambda *call: rows.append(len(call[1])) or run_attention(*call)
    )
    cluster.step()
    cluster.assert_exact(oracle)
    assert rows == [4 * 2 // num_calls] * num_calls * cluster.model.num_layers
    assert len(cuda.graphs) == 1 and sum("replays" in each for each in cuda.log) == 1


class OneBucket(BucketTable):
    """A table with one bucket for all shapes."""

    def all(self):
        return [self.lookup(4, 0)]

    def lookup(self, num_rows, num_received, width=1, has_links=True):
        return Bucket(4, 4) if num_received else Bucket(4, 0)


def test_a_run_goes_on_where_it_stopped_and_says_what_it_did_not_reach():
    def fine():
        order.append("fine")

    order, checks = [], [("one", fine), ("two", fine), ("three", fine)]
    done = [
        {"check": "one", "seconds": 1, "error": ""},
        {"check": "two", "seconds": 1, "error": "not reached"},
    ]
    results = run(checks, done)
    assert order == ["fine", "fine"] and [result["check"] for result in results] == [
        "one",
        "two",
        "three",
    ]
    assert [result["error"] for result in run(checks, deadline=0.0)] == ["not reached"]


def test_a_check_that_does_not_end_is_ended_and_the_next_run_goes_on_behind_it():
    program = """
import json, time
from harness.gpu import check_run
check_run.LIMIT_S = 0.5
def endless():
    time.sleep(600)
checks = [("one", lambda: None), ("two", endless), ("three", lambda: None)]
check_run.run(checks, keep=lambda results: print(json.dumps(results), flush=True))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "in endless" in ended.stderr, "it says where it was"
    kept = json.loads([line for line in ended.stdout.splitlines() if line[0] == "["][-1])
    assert [bool(result["error"]) for result in kept] == [False, True]
    again = run([("one", pytest.fail), ("two", pytest.fail), ("three", lambda: None)], kept)
    assert [bool(result["error"]) for result in again] == [False, True, False]


def test_behind_a_check_that_lost_the_device_another_process_goes_on(monkeypatch):
    def fault():
        raise RuntimeError("an illegal memory access was encountered")

    checks = [("one", lambda: None), ("two", fault), ("three", lambda: None)]
    monkeypatch.setattr(check_run, "context_is_lost", lambda: True)
    results = run(checks)
    assert [result["check"] for result in results] == ["one", "two"] and results[-1]["is_lost"]
    monkeypatch.setattr(check_run, "context_is_lost", lambda: pytest.fail("nothing failed"))
    results = run(checks, results, after="two")
    assert [bool(result["error"]) for result in results] == [False, True, False]
    again = run([*checks[:1], ("two", lambda: None), *checks[2:]], results)
    assert not any(result["error"] for result in again) and len(again) == 3


def test_a_wrong_result_is_a_failed_check():
    (result,) = run([("wrong", lambda: torch.testing.assert_close(torch.ones(1), torch.zeros(1)))])
    assert "Tensor-likes are not close" in result["error"]


@pytest.mark.gpu
def test_every_kernel_on_the_gpu():
    command = [sys.executable, ROOT / "tests/gpu_check.py"]
    subprocess.run(command, env=compiling_environment(), check=True, timeout=480)
