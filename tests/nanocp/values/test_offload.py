"""Settings of pages outside the frames: what fits, and what is refused."""

from dataclasses import replace
from math import inf

import pytest

from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.kv_offload import KvOffloadConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.offload import next_page_hash

ON = KvOffloadConfig(host_gib=1.0)


def test_slots_are_what_fits():
    config = Config(kv_offload=KvOffloadConfig(0.5, 2.0, "/tmp"))
    scheduler = config.with_slots(1 << 20).scheduler
    assert (scheduler.offload_host_pages, scheduler.offload_file_pages) == (512, 2048)
    assert Config().with_slots(1 << 20) == Config()


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"host_gib": -1.0}, "host_gib is -1.0; it must be a number of GiB, at least 0"),
    ({"host_gib": inf}, "host_gib is inf; it must be a number of GiB"),
    ({"host_gib": 1.0, "file_gib": inf, "file_dir": "/tmp"}, "file_gib is inf; it must be"),
    ({"file_gib": 1.0, "file_dir": "/tmp"}, "pages reach the file through memory"),
    ({"host_gib": 1.0, "file_gib": 1.0}, "set both or neither"),
    ({"host_gib": 1.0, "file_dir": "/tmp"}, "set both or neither"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        KvOffloadConfig(**fields)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"cluster": ClusterConfig(layout="pipeline")}, "layout is pipeline"),
    ({"prefill": PrefillConfig(synthetic_kv=True)}, "no page has content to keep"),
    ({"scheduler": SchedulerConfig(prefix_sharing=False)}, "no page has a hash"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(changes, sentence):
    assert Config(kv_offload=ON, data_plane=DataPlaneConfig(device="cuda")).has_slots
    with pytest.raises(ValueError, match=sentence):
        Config(kv_offload=ON, **changes)


def test_a_page_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"host_gib is 1.0; a page of this model has 2,147,483,648"
    ):
        Config(kv_offload=ON).with_slots(2 << 30)
    with pytest.raises(ValueError, match="offload_file_pages is set without"):
        replace(Config(), scheduler=SchedulerConfig(offload_file_pages=1))


def test_a_hash_stands_for_all_tokens_before():
    first = next_page_hash(b"", [1] * 64)
    assert next_page_hash(first, [2] * 64) != next_page_hash(b"", [2] * 64)
