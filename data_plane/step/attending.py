"""The attention of a step on a GPU: rows of one lane, or of several lanes in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data_plane.attention.paged import Attention
from data_plane.graph.lane_parts import LanePart
from nanocp.overlap.policies.orders import ATTENTION


class LocalRows:
    """Rows that attend to frames here, for every layer of a step."""

    __slots__ = ("_attention", "_frame_AP", "_length_A", "_plans", "_width", "slots")

    def __init__(
        self, attention: Attention, frame_AP: Tensor, length_A: Tensor, slot_A: Tensor, width: int
    ) -> None:
        """Arguments of Attention.plan, with width its num_queries. slot_A: int64, to append at."""
        self._attention, self._frame_AP, self._length_A = attention, frame_AP, length_A
        self._width, self.slots = width, slot_A
        self._plans: dict[int, Any] = {}
        """Number of lanes -> the plan of their rows."""

    def attend(
        self,
        q_AHD: Tensor,
        pool_FSW: Tensor,
        scale: float,
        needs_lse: bool = True,
        beside: Sequence[LocalRows] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return what Attention.run does. beside: rows of other lanes, behind these in q_AHD."""
        every = (self, *beside)
        if len(every) not in self._plans:
            frames, lengths = [own._frame_AP for own in every], [own._length_A for own in every]
            tables = (torch.cat(frames), torch.cat(lengths)) if beside else (frames[0], lengths[0])
            self._plans[len(every)] = self._attention.plan(*tables, self._width)
        plan = self._plans[len(every)]
        return self._attention.run(q_AHD, pool_FSW, plan, scale, needs_lse)


class Attending(LanePart):
    """The attention of a lane's own rows in a layer."""

    __slots__ = ("_arguments", "_found", "_q_AHD", "_rows")

    def __init__(
        self, rows: LocalRows, q_AHD: Tensor, pool_FSW: Tensor, scale: float, needs_lse: bool
    ) -> None:
        super().__init__(ATTENTION, (q_AHD,))
        self._rows, self._q_AHD, self._arguments = rows, q_AHD, (pool_FSW, scale, needs_lse)
        self._found: tuple[Tensor, Tensor] | None = None

    def run_with(self, others: Sequence[Attending]) -> None:
        every = (self, *others)
        q_AHD = torch.cat([part._q_AHD for part in every])
        out, lse = self._rows.attend(q_AHD, *self._arguments, [part._rows for part in others])
        sizes = [len(part._q_AHD) for part in every]
        for part, *found in zip(
            every, torch.split(out, sizes), torch.split(lse, sizes), strict=True
        ):
            part._found = found[0], found[1]

    def run(self) -> tuple[Tensor, Tensor]:
        """Attend, unless another lane's part has done so: what Attention.run returns."""
        return self._found or self._rows.attend(self._q_AHD, *self._arguments)
