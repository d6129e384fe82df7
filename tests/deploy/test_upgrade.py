"""An upgrade on Kubernetes stands beside what serves, and Ray ends one process at a time."""

import json
import re
from pathlib import Path

import pytest
import yaml

from harness.paths import ROOT
from harness.programs.manifests import AWS, DEPLOY, GPUS, ON_PREMISES, pods_of


@pytest.fixture
def manifests():
    """Those of the service, by kind."""
    text = (DEPLOY / "k8s" / "nanocp.yaml").read_text()
    return {entry["kind"]: entry for entry in yaml.safe_load_all(text)}


RAY_STARTS = ("RAY_worker_killing_policy_by_group", "true")


@pytest.mark.parametrize("path", [ON_PREMISES, GPUS, AWS], ids=lambda path: path.name)
def test_ray_ends_one_process_when_memory_is_short(path, manifests):
    """Ray 2.60.0 ends all workers of a group together by default."""
    import ray

    config = yaml.safe_load(path.read_text())
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2 and all("=".join(RAY_STARTS) + " " in each for each in starts)
    for template in pods_of(manifests["RayJob"]):
        (container,) = template["spec"]["containers"]
        assert RAY_STARTS in [(each["name"], each["value"]) for each in container["env"]]
    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    name = RAY_STARTS[0].removeprefix("RAY_").encode()
    assert name in raylet.read_bytes(), "Ray knows the name"


def released(entry, release):
    """The manifest as it is for another release."""
    text = json.dumps(entry).replace(f'"release": "{release}"', '"release": ""')
    return re.sub(r'"registry\.example/nanocp:[\d.]+"', '""', text)


def test_an_upgrade_is_the_same_job_beside_the_first(manifests):
    """It shares no pod, Service or budget with it; the policy and the keys are for both."""
    entries = list(yaml.safe_load_all((DEPLOY / "k8s" / "upgrade.yaml").read_text()))
    assert [entry["kind"] for entry in entries] == ["RayJob", "Service", "PodDisruptionBudget"]
    assert {entry["metadata"]["name"] for entry in entries} == {"nanocp-green"}
    before = list(yaml.safe_load_all((DEPLOY / "k8s" / "nanocp.yaml").read_text()))
    for entry in entries:
        first = next(each for each in before if each["kind"] == entry["kind"])
        assert released(entry["spec"], "green") == released(first["spec"], "blue")
    labels = [template["metadata"]["labels"] for template in pods_of(entries[0])]
    for entry in before:
        spec = entry["spec"]
        selector = spec.get("selector") if entry["kind"] == "Service" else None
        if entry["kind"] == "PodDisruptionBudget":
            selector = spec["selector"]["matchLabels"]
        if selector:
            assert not any(selector.items() <= each.items() for each in labels), entry["kind"]
    policy = manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert all(policy.items() <= each.items() for each in labels)


def test_the_page_s_commands_of_an_upgrade_name_what_is_there(manifests):
    page = (ROOT / "docs" / "use" / "deploy.md").read_text()
    section = page.partition("### Upgrades on Kubernetes")[2].partition("\n## ")[0]
    upgrade = list(yaml.safe_load_all((DEPLOY / "k8s" / "upgrade.yaml").read_text()))
    assert "kubectl apply -f deploy/k8s/upgrade.yaml" in section
    (patch,) = set(re.findall(r"-p '(\{.*\})'", section))
    head = pods_of(upgrade[0])[1]["metadata"]["labels"]
    head = head if head["nanocp/role"] == "head" else pods_of(upgrade[0])[0]["metadata"]["labels"]
    before = list(yaml.safe_load_all((DEPLOY / "k8s" / "nanocp.yaml").read_text()))
    services = [each for each in before if each["kind"] == "Service"]
    assert f"for name in {' '.join(each['metadata']['name'] for each in services)}; do" in section
    for service in services:
        selector = service["spec"]["selector"] | json.loads(patch)["spec"]["selector"]
        assert selector.items() <= head.items()
