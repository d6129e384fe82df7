"""Which instance takes a request's coming pages."""

from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig


def test_an_extension_goes_to_the_rows_own_node_first_however_loaded():
    """Instances 0 and 1 are a node, 2 and 3 another; nothing is promised, so that rows extend."""
    cluster = ClusterConfig(num_instances=4, instances_per_node=2, num_frames=4)
    scheduler = FollowedScheduler(cluster, policy="dual_balanced", growth_promise="tokens:0")
    scheduler.arrive_all(255, 10, 10, 150, max_tokens=40)
    places = [scheduler.placement(request_id).moe_binding for request_id in range(1, 5)]
    assert places == [0, 2, 3, 1], "instance 1 has more KV than the other node's instances"
    for _ in range(4):
        scheduler.step()
    assert scheduler.placement().kv_split() == ((0, 4), (1, 1))
