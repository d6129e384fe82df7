"""Drafting at the end of a step: the MTP layer drafts the tokens for the next step to check.

It runs at every position that the step committed; each further draft is a turn of one position a
row. Every instance takes all turns (protocol.md, equal width).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, inference_mode

from data_plane.instance.lanes import WindowLane, run_in_turns
from data_plane.instance.rows import Row
from data_plane.instance.sampler import takes_highest
from data_plane.instance.step_lane import DeviceDraftingStep, DraftingStep, StepLane
from data_plane.instance.window_edge import Window
from data_plane.transport.exchange import Exchange
from nanocp.overlap.ops import OverlapPolicy

Guess = Callable[[Sequence[Row], Tensor], Sequence[int | None]]
"""Makes the next draft of each row from its logits; None: the row has no more."""


@inference_mode()
def draft(
    window: Window,
    lanes: Sequence[StepLane],
    exchange: Exchange,
    guess: Guess,
    order: OverlapPolicy,
) -> None:
    """Draft the window's rows by guess; raises what a wait of the exchange raises."""
    used = [lanes[lane.number] for lane in window.lanes]
    last = [
        _at_known_tokens(lane, of.engine.rows, window.width)
        for lane, of in zip(window.lanes, used, strict=True)
    ]
    for turn in range(window.plan.num_drafts):
        steps: list[Any] = [of.engine.next_step() for of in used]
        run_in_turns([step.draft_phases() for step in steps], exchange, order)
        for of in used:
            of.step.check()
        for lane, of, places in zip(window.lanes, used, last, strict=True):
            _take_drafts(lane, of, places, window.width, turn, guess)


def can_draft_alone(window: Window) -> bool:
    """True if the window's tokens are the highest logits, so the device needs no host."""
    rows = window.live_rows()
    return bool(rows) and all(takes_highest(row.params, row.output_ids) for row in rows)


def draft_alone(window: Window, lane: StepLane) -> list[list[int]]:
    """Launch all turns of drafting before the host knows the step's tokens, and wait.

    Returns each step row's highest-logit token: of the step, then of each turn. Raises the error of
    one.
    """
    captured: Any = lane.engine.next_step()
    for _ in range(window.plan.num_drafts):
        captured.draft_on_device()
    lane.step.check()
    step = cast(DeviceDraftingStep, lane.step)
    return step.highest_ids(window.plan.num_drafts, window.num_rows * window.width)


def take_drafts(window: Window, lane: StepLane, turns: Sequence[Sequence[int]]) -> None:
    """Give each row its drafts of the turns, a token of each step row by turn."""
    for index, row in enumerate(window.lanes[0].rows):
        if row.finished:
            continue
        first = index * window.width
        # The first turn ran at each token of the step, a later one where the row begins.
        place = first + row.position - int(lane.engine.rows.position[first]) - 1
        for drafted in turns:
            row.drafts.append(drafted[place])
            place = first


def _at_known_tokens(lane: WindowLane, state: Any, width: int) -> dict[int, int]:
    """Set up the first turn; return row index -> its last live step row."""
    state.live[:] = False
    last = {}
    for index, row in enumerate(lane.rows):
        first = index * width
        num_new = 0 if row.finished else row.position - int(state.position[first])
        for offset in range(num_new):
            state.live[first + offset] = True
            state.token[first + offset] = row.output_ids[offset - num_new]
            last[index] = first + offset
    return last


def _take_drafts(
    lane: WindowLane, of: StepLane, last: dict[int, int], width: int, turn: int, guess: Guess
) -> None:
    state = of.engine.rows
    state.live[:] = False
    if not last:
        return
    rows = [lane.rows[index] for index in last]
    step = cast(DraftingStep, of.step)
    logits = step.draft_logits_of(list(last.values()))
    drafted = guess(rows, logits)
    for index, row, token in zip(list(last), rows, drafted, strict=True):
        if token is None:
            del last[index]
        else:
            row.drafts.append(token)
    places = [index * width for index in last]
    step.go_on_drafting(places, list(last.values()))
    for index, place in zip(last, places, strict=True):
        row = lane.rows[index]
        state.live[place] = turn + 1 < row.num_left
        state.token[place] = row.drafts[-1]
        state.position[place] = row.position + turn
    last.update(zip(last, places, strict=True))
