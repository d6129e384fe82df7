"""Stages of a pipeline that break in the middle of a copy of KV: a connection ends, or a process.

Each function makes a stage as startup.stage.build_stage does. Only processes of the first term
break, once some frames of a layer have travelled.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from data_plane.instance.stage_edge import StageEdge
from data_plane.startup import stage as startup
from data_plane.step.stage import CpuStageModel
from data_plane.transport.segments import Segments
from data_plane.transport.tcp.messages import shut
from nanocp.config.whole import Config

Stage = StageEdge[CpuStageModel]
NUM_FRAMES = 3
"""Frames of a layer that travel before."""


def cut_connection(config: Config, stage: int, segments: Segments, *rest: Any) -> Stage:
    """Stage 0 loses its connection to the one that it sends KV to; both processes live on."""
    built = startup.build_stage(config, stage, segments, *rest)
    mover: Any = built._mover

    def cut() -> None:
        shut(mover._writers[1]._segment._connection)

    if stage == 0 and segments.term.number == 1:
        mover.send = _then(mover.send, cut)
    return built


def dying_source(config: Config, stage: int, segments: Segments, *rest: Any) -> Stage:
    """Stage 0, which sends KV, is killed."""
    built = startup.build_stage(config, stage, segments, *rest)
    mover: Any = built._mover
    if stage == 0 and segments.term.number == 1:
        mover.send = _then(mover.send, _die)
    return built


def dying_target(config: Config, stage: int, segments: Segments, *rest: Any) -> Stage:
    """Stage 1, which gets KV, is killed."""
    built: Any = startup.build_stage(config, stage, segments, *rest)
    if stage == 1 and segments.term.number == 1:
        built.layers._arrive = _then(built.layers._arrive, _die)
    return built  # type: ignore[no-any-return]


def _then(move: Callable[..., None], end: Callable[[], None]) -> Callable[..., None]:
    """Move frames, and after the last of NUM_FRAMES make an end."""
    left = iter(range(NUM_FRAMES - 1, -1, -1))

    def moved(*arguments: Any, **page: Any) -> None:
        move(*arguments, **page)
        if next(left, None) == 0:
            end()

    return moved


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
