"""The files of deploy/ that start clusters, and the pods in a manifest."""

from harness.paths import ROOT

DEPLOY = ROOT / "deploy"
ON_PREMISES = DEPLOY / "ray-cluster.yaml"
AWS = DEPLOY / "ray-cluster-aws.yaml"


def pods_of(manifest):
    """The templates of its pods, which a RayJob has two of."""
    if manifest["kind"] != "RayJob":
        return [template] if (template := manifest["spec"].get("template")) else []
    cluster = manifest["spec"]["rayClusterSpec"]
    return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
