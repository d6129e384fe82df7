"""Files for nodes of GPUs: the paper's cluster, and how they differ from those for CPUs."""

import os
import shutil
import subprocess

import pytest
import torch
import yaml

from data_plane.model.config import ModelConfig
from data_plane.startup.experimental import deep_ep
from harness.paths import ROOT, TESTS
from harness.programs.command_line import nanocp
from harness.programs.manifests import GPU_SERVICE, GPUS, ON_PREMISES, SERVICE, pods_of, serve_words
from nanocp.config.file import load_config
from nanocp.serve.served import check_model


@pytest.fixture
def v3(tmp_path):
    """A folder with DeepSeek-V3's configuration, as it is published."""
    folder = tmp_path / "v3"
    folder.mkdir()
    published = TESTS / "data_plane/model/published/deepseek-v3.json"
    shutil.copy(published, folder / "config.json")
    return folder


@pytest.mark.parametrize("path", [GPUS, GPU_SERVICE], ids=lambda path: path.name)
def test_the_paper_s_cluster_is_accepted_and_planned(path, v3, monkeypatch, tmp_path):
    """4 nodes of 8 H200s, DeepSeek-V3, FlashMLA, DeepEP, exchange by NVSHMEM (6.1)."""
    printed = nanocp("serve", v3, *serve_words(path)[3:], "--print-config")
    assert printed.exit_code == 0, printed.output
    (file := tmp_path / "serve.yaml").write_text(printed.stdout)
    config, model = load_config(file, {}, {}), ModelConfig.from_folder(v3)
    cluster, own = config.cluster, config.data_plane
    assert (cluster.num_nodes, cluster.instances_per_node) == (4, 8)
    assert (own.device, own.dtype, own.attention_backend) == ("cuda", "bfloat16", "flashmla")
    assert (own.exchange_backend, own.dispatch_backend) == ("nvshmem", "deep_ep")
    check_model(config, model, v3)
    monkeypatch.setattr(deep_ep, "find_spec", lambda name: name)
    site = (torch.bfloat16, model, cluster.num_instances, cluster.bounds.max_rows)
    assert deep_ep.deep_ep_obstacle(*site, environment={}) == ""
    planned = nanocp("plan", v3, "--instances", cluster.num_instances, "--device", "h200")
    assert planned.exit_code == 0 and "It fits. KV: " in planned.output, planned.output
    assert f"{cluster.num_frames:,} pages of 4.50 MB" in planned.output


def test_nodes_of_gpus_differ_from_others_by_what_gpus_need():
    plain, gpus = (yaml.safe_load(path.read_text()) for path in (ON_PREMISES, GPUS))
    added = [
        command for command in gpus["setup_commands"] if command not in plain["setup_commands"]
    ]
    assert [c for c in gpus["setup_commands"] if c not in added] == plain["setup_commands"]
    assert "nvidia-smi" in gpus["setup_commands"][0], "before anything is installed"
    assert [name for name in ("[gpu,nvshmem]", "[deep_ep]", "sgl-flash-mla") if name in str(added)]
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        without = [command.replace(" ulimit -l unlimited;", "") for command in gpus[name]]
        assert without == plain[name] != gpus[name]
    num_nodes = 1 + len(gpus["provider"]["worker_ips"])
    assert gpus["min_workers"] == gpus["max_workers"] == num_nodes - 1 == 3
    same = plain.keys() - {"provider", "setup_commands", "min_workers", "max_workers"}
    same -= {"head_start_ray_commands", "worker_start_ray_commands"}
    assert {name: plain[name] for name in same} == {name: gpus[name] for name in same}


def test_the_page_has_two_nodes_in_ten_commands_and_its_edit_makes_them(tmp_path):
    page = (ROOT / "docs/use/deploy.md").read_text()
    section = page.partition("## Several machines with GPUs")[2].partition("\n## ")[0]
    block = section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", "")
    commands = block.splitlines()
    assert len(commands) == 10
    (edit,) = [command for command in commands if command.startswith("sed ")]
    shutil.copytree(GPUS.parent, tmp_path / "deploy")
    subprocess.run(edit, shell=True, check=True, cwd=tmp_path)
    config = yaml.safe_load((tmp_path / "deploy" / GPUS.name).read_text())
    assert config["provider"] == {
        "type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"],
    }  # fmt: skip
    assert (config["min_workers"], config["max_workers"]) == (1, 1)


def test_a_pod_has_all_gpus_of_its_node_and_the_way_to_their_cards():
    (job, budget), others = (
        list(yaml.safe_load_all(path.read_text())) for path in (GPU_SERVICE, SERVICE)
    )
    head, worker = pods_of(job)
    for pod in (head, worker):
        (container,) = pod["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "8" and limits["rdma/hca"]
    assert [template["metadata"] for template in pods_of(others[0])] == [
        head["metadata"], worker["metadata"],
    ], "the Services and the policy find them"  # fmt: skip
    assert (job["metadata"], budget["metadata"]) == (
        others[0]["metadata"],
        next(each["metadata"] for each in others if each["kind"] == budget["kind"]),
    ), "they take the place of those"


@pytest.mark.parametrize(
    ("has_driver", "reaches", "taken"),
    [(True, True, ""), (False, True, "https://download.pytorch.org/whl/cpu"), (False, False, "")],
)
def test_setup_takes_the_small_torch_where_there_is_no_driver(has_driver, reaches, taken, tmp_path):
    """And where its index can be reached, which Python asks."""
    commands = {"python": f"exit {not reaches:d}"} | ({"nvidia-smi": ""} if has_driver else {})
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")}
    command = [shutil.which("make"), "--dry-run", "--always-make", "setup", "PYTHON=python"]

    def index(*more):
        said = subprocess.run(
            [*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout
        (line,) = [line for line in said.splitlines() if line.endswith(" torch")]
        return line.removesuffix(" torch").partition(" --extra-index-url ")[1:]

    assert index()[1] == taken
    assert index("TORCH_INDEX=") == ("", ""), "pip's own index"
