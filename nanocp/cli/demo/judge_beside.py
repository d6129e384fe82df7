"""A judge in a process of its own, beside the load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanocp.cli.demo.load import Asked
from nanocp.cli.demo.report import Judgement, judgement_of, summed

if TYPE_CHECKING:  # it imports torch
    from nanocp.cli.demo.judge import Judge

_LOOK_S = 1.0


class JudgeBeside:
    """Judges each request once it has ended: little is left at the end."""

    def __init__(self, make_judge: Callable[[Path], Judge], checkpoint: Path) -> None:
        """make_judge: a module's function, called in the other process."""
        # A fork of a process that has threads may hang.
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._make_judge = make_judge
        self._checkpoint = checkpoint
        self._judgements: list[Future[Judgement]] = []

    def close(self) -> None:
        """Judge no more; the present work ends first."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self, request: Asked) -> None:
        """Judge a request that has ended."""
        try:
            made = self._pool.submit(_judge, self._make_judge, self._checkpoint, request)
        except BrokenExecutor as error:  # The judge's process is gone, and the run goes on.
            made = Future()
            made.set_exception(error)
        self._judgements.append(made)

    def found(
        self, asked: Sequence[Asked], limit_s: float, judged: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """Sum up judgements within a time from now.

        Others count as `unjudged`. judged: gets (number judged, all). Raises as the judge did.
        """
        end_s, pending = time.monotonic() + limit_s, set(self._judgements)
        while (pending := wait(pending, 0).not_done) and (left_s := end_s - time.monotonic()) > 0:
            judged(len(self._judgements) - len(pending), len(self._judgements))
            wait(pending, min(_LOOK_S, left_s))
        ended = [each for each in self._judgements if each not in pending]
        return summed(
            asked, [e.result() for e in ended if not isinstance(e.exception(), BrokenExecutor)]
        )


@cache
def _judge_of(make_judge: Callable[[Path], Judge], checkpoint: Path) -> Judge:
    return make_judge(checkpoint)


def _judge(make_judge: Callable[[Path], Judge], checkpoint: Path, request: Asked) -> Judgement:
    return judgement_of(request, _judge_of(make_judge, checkpoint))
