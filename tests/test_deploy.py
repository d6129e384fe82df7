"""deploy/ray-cluster.yaml against Ray's own validation; no network."""

from pathlib import Path

import pytest
import yaml

PATH = Path(__file__).parent.parent / "deploy" / "ray-cluster.yaml"


@pytest.fixture
def config():
    return yaml.safe_load(PATH.read_text())


def bootstrapped(config):
    """What `ray up` makes of the file before it dials the first machine."""
    from ray.autoscaler._private.commands import _bootstrap_config

    return _bootstrap_config(config, no_config_cache=True)


def test_ray_up_accepts_the_file(config):
    cluster = bootstrapped(config)
    (node_type,) = cluster["available_node_types"].values()
    num_workers = len(config["provider"]["worker_ips"])
    assert (node_type["min_workers"], node_type["max_workers"], cluster["max_workers"]) == (num_workers,) * 3
    assert cluster["head_start_ray_commands"] == config["head_start_ray_commands"]


def test_ray_up_refuses_a_key_that_does_not_exist(config):
    config["head_start_commands"] = []
    with pytest.raises(Exception, match="head_start_commands"):
        bootstrapped(config)
