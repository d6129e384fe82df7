"""The files of deploy/ that start clusters, and the pods in a manifest."""

import re
import shlex

from harness.paths import ROOT

DEPLOY = ROOT / "deploy"
ON_PREMISES = DEPLOY / "ray-cluster.yaml"
GPUS = DEPLOY / "ray-cluster-gpu.yaml"
AWS = DEPLOY / "ray-cluster-aws.yaml"
SERVICE = DEPLOY / "k8s" / "nanocp.yaml"
GPU_SERVICE = DEPLOY / "k8s" / "gpu.yaml"


def serve_words(path):
    """The command line of `nanocp serve` in a file, which ends with the instances of a node."""
    text = re.sub(r"\n *#? *", " ", path.read_text())
    return shlex.split(re.search(r"nanocp serve [^'#]*?--instances-per-node \d+", text)[0])


def pods_of(manifest):
    """The templates of its pods, which a RayJob has two of."""
    if manifest["kind"] != "RayJob":
        return [template] if (template := manifest["spec"].get("template")) else []
    cluster = manifest["spec"]["rayClusterSpec"]
    return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
