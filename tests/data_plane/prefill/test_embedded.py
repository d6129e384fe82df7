"""The embedded prefill is refused where the whole model does not fit one process."""

import types

import pytest

from data_plane.prefill import embedded as embedded_prefill
from nanocp.config import Config


def test_model_larger_than_the_free_memory_is_refused_by_numbers(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(
        embedded_prefill.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1 << 20)
    )
    with pytest.raises(
        ValueError,
        match=r"0\.0 GiB in float32, but 0\.0 GiB of memory are free; use --synthetic-kv",
    ):
        embedded_prefill.build_prefill(Config(), tiny_checkpoint)


def test_pages_are_the_bytes_that_a_ring_takes(tiny_checkpoint):
    prefill = embedded_prefill.build_prefill(Config(), tiny_checkpoint)
    pages = list(prefill.pages(list(range(2, 102)), num_tokens=99))
    assert [page for page, _ in pages] == [0, 1]
    assert all(payload.nbytes == 4 * 64 * 96 * 4 for _, payload in pages)
