"""Whose requests are in the cluster, for operators."""

from control_plane.observe.cluster_view import TenantLoad, tenant_loads
from control_plane.scheduler.scheduler import Scheduler
from nanocp.cli.operate.top import _tenants
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival


def test_the_tenant_with_most_requests_comes_first():
    cluster = ClusterConfig(num_instances=1, num_frames=8, max_model_len=1000)
    scheduler = Scheduler(cluster, SchedulerConfig())
    assert tenant_loads(scheduler) == ()
    arrivals = [Arrival(number, 100, 20, tenant="flood") for number in range(1, 7)]
    scheduler.plan_window([Arrival(9, 200, 20, tenant="other"), *arrivals], 0)
    first, second = tenant_loads(scheduler)
    # The other's request takes four frames, two of the flood's the rest.
    assert second == TenantLoad("other", 1, 0, 256, 200)
    assert first == TenantLoad("flood", 2, 4, 256, 200)
    lines = [line.plain for line in _tenants([one._asdict() for one in (first, second)])]
    assert lines[1:] == [
        "tenant flood: 2 placed, 4 queued, 256 KV tokens",
        "tenant other: 1 placed, 0 queued, 256 KV tokens",
    ]


def test_without_keys_and_users_there_is_nothing_to_show():
    assert _tenants([]) == []
    assert _tenants([TenantLoad("", 3, 0, 64, 9)._asdict()]) == []
