"""Settings of several sections that do not go together are refused, and named."""

import pytest

from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config

SUPERVISED = ServiceConfig(controller_process=True)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"cluster": ClusterConfig(layout="pipeline")}, "layout is pipeline: it must be instances"),
        ({"data_plane": DataPlaneConfig(device="cuda")}, "device is cuda: it must be cpu"),
        (
            {"service": ServiceConfig(controller_process=True, node_streams=True)},
            "node_streams is true: it must be false",
        ),
        ({"limits": LimitsConfig(recovery_timeout_ms=0)}, "limits.recovery_timeout_ms: 0"),
    ],
    ids=["layout", "device", "node_streams", "recovery"],
)
def test_members_that_cannot_wait_for_another_controller_are_refused(sections, sentence):
    with pytest.raises(ValueError, match=f"controller_process is true, and .*{sentence}"):
        Config(**({"service": SUPERVISED, "scheduler": SchedulerConfig(lanes="off")} | sections))
