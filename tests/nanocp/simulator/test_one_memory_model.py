"""`nanocp plan` and the simulator's cluster files agree on what memory holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_plane.model.config import ModelConfig
from data_plane.startup.memory_need import memory_need
from harness.paths import TESTS
from nanocp.cli.plan.memory import DEVICES
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.simulator.costs.cluster_file import load_cluster_file, shipped_names

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def published(folder: Path, family: str) -> ModelConfig:
    """The family's model, with its experts in FP8 as the cluster files have them."""
    (path,) = (TESTS / "data_plane/model").glob(f"*/{family}*.json")
    fields = json.loads(path.read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": FP8}))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("name", shipped_names())
def test_frames_are_those_of_the_plan_for_every_family_and_device(name, tmp_path):
    device_name, _, family = name.partition("x32-")
    file, device = load_cluster_file(name), DEVICES[device_name]
    model, memory = published(tmp_path, family), file.memory
    assert memory is not None
    assert (memory.hbm_gb, memory.usable_share) == (device.memory_gb, device.usable_share)
    assert memory.reserve_gb == device.reserve_gb
    num_tried, max_rows = 0, file.cluster.bounds.max_rows
    data_plane = DataPlaneConfig(device="cuda", dtype="bfloat16")
    for num in (8, 16, 32, 64):
        cluster = replace(file.cluster, num_instances=num, instances_per_node=num)
        need = memory_need(model, cluster, data_plane, has_lanes=False, stores_bf16=False)
        left = 1e9 * (device.usable_share * device.memory_gb - device.reserve_gb) - need.fixed
        if left < need.page:
            with pytest.raises(ValueError, match="does not fit"):
                memory.num_frames(file.model, num, max_rows)
            continue
        num_tried += 1
        assert memory.num_frames(file.model, num, max_rows) == pytest.approx(
            left / need.page, rel=0.01
        )
    assert num_tried >= 2
