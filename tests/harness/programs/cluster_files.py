"""Files of simulated clusters, made from one that ships."""

import yaml

from nanocp.simulator.costs.cluster_file import SHIPPED


def write_cluster(path, **changes):
    """Write a changed h200x32-deepseek-v3 and return its path. A section takes its new keys."""
    tree = yaml.safe_load((SHIPPED / "h200x32-deepseek-v3.yaml").read_text())
    for name, value in changes.items():
        tree[name] = tree[name] | value if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump({name: each for name, each in tree.items() if each is not None}))
    return str(path)
