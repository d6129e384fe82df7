"""Which instance takes a request's coming pages."""

from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, WindowDone

NUM_INSTANCES = 4


def test_an_extension_goes_to_the_rows_own_node_first_however_loaded():
    """Instances 0 and 1 are a node, 2 and 3 another; nothing is promised, so that rows extend."""
    cluster = ClusterConfig(num_instances=NUM_INSTANCES, instances_per_node=2, num_frames=4)
    scheduler = Scheduler(
        cluster, SchedulerConfig(policy="dual_balanced", growth_promise="tokens:0")
    )
    prompt_lens = {1: 255, 2: 10, 3: 10, 4: 150}
    scheduler.plan_window(
        [
            Arrival(request_id, prompt_len, 40, needs_prefill=False)
            for request_id, prompt_len in prompt_lens.items()
        ],
        now_us=0,
    )
    places = [scheduler.requests.placement(request_id).moe_binding for request_id in prompt_lens]
    assert places == [0, 2, 3, 1], "instance 1 has more KV than the other node's instances"
    for window in range(4):
        scheduler.plan_window([WindowDone(i, window) for i in range(NUM_INSTANCES)], window)
    assert scheduler.requests.placement(1).kv_split() == ((0, 4), (1, 1))
