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
    [({"cluster": ClusterConfig(layout="pipeline")}, "layout is pipeline: it must be instances"),
     ({"data_plane": DataPlaneConfig(device="cuda")}, "device is cuda: it must be cpu"),
     ({"service": ServiceConfig(controller_process=True, node_streams=True)},
      "node_streams is true: it must be false"),
     ({"limits": LimitsConfig(recovery_timeout_ms=0)}, "limits.recovery_timeout_ms: 0")],
    ids=["layout", "device", "node_streams", "recovery"],
)  # fmt: skip
def test_members_that_cannot_wait_for_another_controller_are_refused(sections, sentence):
    with pytest.raises(ValueError, match=f"controller_process is true, and .*{sentence}"):
        Config(**({"service": SUPERVISED, "scheduler": SchedulerConfig(lanes="off")} | sections))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [({"cluster": ClusterConfig(layout="pipeline", num_instances=2)},
      "scheduler.num_drafts 1: its last stage does not draft"),
     ({"scheduler": SchedulerConfig(num_drafts=1, drafting="always", lanes="always"),
       "data_plane": DataPlaneConfig(device="cuda", dispatch_backend="exchange")},
      "num_drafts is 1 and scheduler.lanes always; on a GPU one of them must be off")],
    ids=["pipeline", "cuda"],
)  # fmt: skip
def test_drafts_where_nothing_drafts_are_refused(sections, sentence):
    scheduler = SchedulerConfig(num_drafts=1, lanes="off")
    with pytest.raises(ValueError, match=sentence):
        Config(**({"scheduler": scheduler} | sections))


@pytest.mark.parametrize(("num_drafts", "num_steps", "reach"), [(1, 33, 66), (15, 4, 78)])
def test_a_window_that_may_write_more_than_a_page_is_refused(num_drafts, num_steps, reach):
    sentence = f"num_drafts is {num_drafts} .* may write {reach} tokens in a window; 64, a page"
    with pytest.raises(ValueError, match=sentence):
        SchedulerConfig(num_drafts=num_drafts, steps_per_window=num_steps)
    SchedulerConfig(steps_per_window=num_steps)
    SchedulerConfig(num_drafts=1, steps_per_window=32)


def test_numbers_and_ways_of_drafting_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="num_drafts"):
        SchedulerConfig(num_drafts=-1)
    with pytest.raises(
        ValueError, match="drafting is 'often'; it must be measured, always or random"
    ):
        SchedulerConfig(drafting="often")


@pytest.mark.parametrize(("sections", "sentence"), [
    ({"scheduler": SchedulerConfig(num_drafts=1)}, "num_drafts 1: it must be 0"),
    ({"cluster": ClusterConfig(layout="pipeline")}, "it must be instances"),
])  # fmt: skip
def test_what_rows_with_states_do_not_go_with_is_refused(sections, sentence):
    config = Config(**sections)
    with pytest.raises(ValueError, match=f"linear attention layers, and .*{sentence}"):
        config.with_carry(2)
