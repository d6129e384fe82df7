"""Start-up of the prefill is refused where the whole model does not fit the machine."""

import types

import pytest

from data_plane.startup import prefill
from data_plane.transport.segments import Segments
from nanocp.config.whole import Config
from nanocp.serve.service import member_environment


def test_model_larger_than_the_free_memory_is_refused_by_numbers(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(
        prefill.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1 << 20)
    )
    with pytest.raises(
        ValueError,
        match=r"0\.0 GiB in float32, but 0\.0 GiB of memory are free; use --synthetic-kv",
    ):
        prefill.build_prefill_stage(Config(), 0, Segments("unused"), tiny_checkpoint)


def test_few_programs_of_shapes_are_kept_unless_somebody_wants_more(monkeypatch):
    """A prefill sees prompts of all lengths, and torch keeps a program of each."""
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert member_environment(Config())["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    assert member_environment(Config())["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1024"
