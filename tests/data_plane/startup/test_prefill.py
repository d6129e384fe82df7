"""Start-up of the prefill is refused where the whole model does not fit the machine."""

import types

import pytest

from data_plane.startup import prefill
from data_plane.transport.segments import Segments
from nanocp.config.whole import Config


def test_model_larger_than_the_free_memory_is_refused_by_numbers(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(
        prefill.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1 << 20)
    )
    with pytest.raises(
        ValueError,
        match=r"0\.0 GiB in float32, but 0\.0 GiB of memory are free; use --synthetic-kv",
    ):
        prefill.build_prefill_stage(Config(), 0, Segments("unused"), tiny_checkpoint)
