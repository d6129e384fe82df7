"""States of rows in linear attention layers, compared, and how late they are folded."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from data_plane.kv.carry_pool import CarryPool
from data_plane.model.sizes import carry_bytes


def assert_same_state(seen: CarryPool, expected: CarryPool, num_tokens: int) -> None:
    """Frame 0 of both has the state of these tokens; earlier inputs of the convolution may vary."""
    for ours, theirs in zip(seen.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.state[0], theirs.state[0], atol=5e-5, rtol=1e-3)
        assert ours.folded[0].unique().tolist() == [num_tokens]
        places = [position % ours.channels.shape[1] for position in range(num_tokens)[-3:]]
        channels = [fields.channels[0, places] for fields in (ours, theirs)]
        torch.testing.assert_close(*channels, atol=2e-5, rtol=1e-4)


@contextmanager
def depth_of_states(depth: int) -> Iterator[None]:
    """Let all that is built meanwhile in this process keep so many newest tokens as records."""
    pool = CarryPool.__init__
    (page_bytes, _, *others) = pool.__defaults__ or ()
    with (
        mock.patch.object(pool, "__defaults__", (page_bytes, depth, *others)),
        mock.patch.object(carry_bytes, "__defaults__", (depth,)),
    ):
        yield
