"""Chaos on a service of real instances in its fastest form on a CPU; `transformers` judges."""

import json
import shutil

import pytest
import torch

from harness.kernels.native_cases import native
from nanocp.cli.demo.chaos_run import NUM_CLIENTS, ChaosRun, play
from nanocp.cli.demo.judge import ReferenceJudge
from nanocp.cli.demo.report import claims_of


@pytest.mark.system
def test_fused_mixtures_and_lanes_give_every_token_through_losses(tiny_checkpoint, tmp_path):
    """Rows are re-bound all the time; each window's lanes are drawn, and instances are killed.

    The folder has sampling defaults, as models/tale has, which both APIs take.
    """
    native((torch.float32, "avx2"))
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    defaults = {"repetition_penalty": 1.15, "top_p": 0.95}
    (checkpoint / "generation_config.json").write_text(json.dumps(defaults))
    run = ChaosRun(checkpoint, seconds=30.0, seed=7, pauses_s=(3.0, 8.0), settings={
        "cluster.num_frames": 128, "cluster.max_model_len": 2048,
        "data_plane.dispatch_backend": "fused", "scheduler.policy": "chaos",
        "scheduler.lanes": "random",
    })  # fmt: skip
    result = play(run, ReferenceJudge, lambda step: None)
    assert [claim for claim, holds in claims_of(result) if not holds] == [], (
        result["failures"],
        result["log_end"],
    )
    assert result["requests"] >= NUM_CLIENTS and result["losses"] >= 2


@pytest.mark.system
def test_pages_outside_the_frames_give_every_token_through_losses(tiny_checkpoint, tmp_path):
    """Few frames, little memory and a file behind it; instances are killed while pages move."""
    run = ChaosRun(tiny_checkpoint, seconds=25.0, seed=11, pauses_s=(3.0, 8.0), settings={
        "cluster.num_frames": 12, "cluster.max_model_len": 2048,
        "scheduler.growth_promise": "tokens:0", "kv_offload.host_gib": 0.005,
        "kv_offload.file_gib": 0.05, "kv_offload.file_dir": str(tmp_path),
    })  # fmt: skip
    result = play(run, ReferenceJudge, lambda step: None)
    assert [claim for claim, holds in claims_of(result) if not holds] == [], (
        result["failures"],
        result["log_end"],
    )
    assert result["outside_tokens"] > 0 and result["losses"] >= 2
