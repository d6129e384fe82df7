"""The only importer of experimental/, which no card or no second node has run (decision 0069)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from data_plane.startup.experimental.deep_ep import DeepEpExchange, deep_ep_obstacle
from data_plane.startup.experimental.nixl_ep import NixlEpExchange, nixl_ep_obstacle
from data_plane.startup.experimental.nvshmem import NvshmemEnd, nvshmem_choice, nvshmem_obstacle

TermEnd = DeepEpExchange | NixlEpExchange | NvshmemEnd
"""A backend's part in terms: a dispatch's begins before the exchange's memory is mapped."""
ExchangeEnd = NvshmemEnd


class ExperimentalDispatch(NamedTuple):
    """A carrier of rows to their experts."""

    obstacle: Callable[..., str]
    open: Callable[..., DeepEpExchange | NixlEpExchange]
    has_terms: bool
    """False: its instances are fixed, and none runs a step alone."""


class ExperimentalExchange(NamedTuple):
    """A carrier of the exchange."""

    obstacle: Callable[..., str]
    open: Callable[..., NvshmemEnd]
    choice: Callable[[bool], str]


DISPATCHES = {
    "deep_ep": ExperimentalDispatch(deep_ep_obstacle, DeepEpExchange.serve, has_terms=False),
    "nixl_ep": ExperimentalDispatch(nixl_ep_obstacle, NixlEpExchange.serve, has_terms=True),
}
EXCHANGES = {"nvshmem": ExperimentalExchange(nvshmem_obstacle, NvshmemEnd, nvshmem_choice)}
