"""The embedded prefill's pages are what an instance's ring takes."""

from data_plane.startup.prefill import build_prefill
from nanocp.config import Config


def test_pages_are_the_bytes_that_a_ring_takes(tiny_checkpoint):
    prefill = build_prefill(Config(), tiny_checkpoint)
    pages = list(prefill.pages(list(range(2, 102)), num_tokens=99))
    assert [page for page, _ in pages] == [0, 1]
    assert all(payload.nbytes == 4 * 64 * 96 * 4 for _, payload in pages)
