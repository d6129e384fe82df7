"""The only importer of experimental/, which no card or no second node has run (decision 0069)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from data_plane.startup.experimental.deep_ep import DeepEpEnd, deep_ep_obstacle
from data_plane.startup.experimental.nixl_ep import (
    NixlEpExchange,
    nixl_ep_obstacle,
    open_nixl_ep,
)
from data_plane.startup.experimental.nvshmem import NvshmemEnd, nvshmem_choice, nvshmem_obstacle

TermEnd = DeepEpEnd | NixlEpExchange | NvshmemEnd
"""A backend's part in terms; they begin once the exchange's memory is mapped."""


class ExperimentalDispatch(NamedTuple):
    """A carrier of rows to their experts."""

    obstacle: Callable[..., str]
    open: Callable[..., DeepEpEnd | NixlEpExchange]
    has_terms: bool
    """False: its instances are fixed, and none runs a step alone."""


class ExperimentalExchange(NamedTuple):
    """A carrier of the exchange."""

    obstacle: Callable[..., str]
    open: Callable[..., NvshmemEnd]
    choice: Callable[[bool], str]


DISPATCHES = {
    "deep_ep": ExperimentalDispatch(deep_ep_obstacle, DeepEpEnd, has_terms=False),
    "nixl_ep": ExperimentalDispatch(nixl_ep_obstacle, open_nixl_ep, has_terms=True),
}
EXCHANGES = {"nvshmem": ExperimentalExchange(nvshmem_obstacle, NvshmemEnd, nvshmem_choice)}
