"""Freed frames that an instance or a prefill may still write to (protocol.md, quarantine).

Enters: frames, the last window sent that contains their request, the instances of its binding, the
receivers of its ticket that have not answered. Leaves: frames that nothing can write to any more.
Does not know: why the request ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from control_plane.scheduler.state.frame_ledger import FrameRun


@dataclass(slots=True, eq=False)
class Held:
    """Frames of one ended request, by instance, and how many reports and answers they wait for."""

    frames: dict[int, list[FrameRun]]
    num_awaited: int = 0


class Quarantine:
    """Counts down what each ended request waits for."""

    def __init__(self, num_instances: int) -> None:
        self.last_reported = [-1] * num_instances
        """The last window that each instance has reported, -1 before the first."""
        self.seats: Collection[int] = range(num_instances)
        """Instances of the term: no other has a window to report."""
        self._by_window: list[dict[int, list[Held]]] = [{} for _ in range(num_instances)]
        """By instance: window -> what waits for its report."""
        self._by_ticket: dict[tuple[int, int], Held] = {}
        self._num_held = 0

    def __len__(self) -> int:
        return self._num_held

    def hold(
        self,
        frames: dict[int, list[FrameRun]],
        last_window: int | None,
        bound: Iterable[int],
        ticket: int | None,
        receivers: Iterable[int],
    ) -> dict[int, list[FrameRun]]:
        """Hold frames until bound instances have reported the window and receivers have answered.

        Returns what is free at once: all frames, or none.
        """
        held = Held(frames)
        if last_window is not None:
            for instance in bound:
                if self.last_reported[instance] < last_window and instance in self.seats:
                    self._by_window[instance].setdefault(last_window, []).append(held)
                    held.num_awaited += 1
        if ticket is not None:
            for instance in receivers:
                self._by_ticket[ticket, instance] = held
                held.num_awaited += 1
        if held.num_awaited == 0:
            return frames
        self._num_held += 1
        return {}

    @property
    def last_complete(self) -> int:
        """The last window that every instance of the term has reported."""
        return min(map(self.last_reported.__getitem__, self.seats))

    def windows_reported(
        self, reports: Iterable[tuple[int, int]]
    ) -> list[dict[int, list[FrameRun]]]:
        """Instances have run every step of a window: what became free.

        reports: (instance, window) of each.
        """
        last_reported, by_window = self.last_reported, self._by_window
        freed: list[dict[int, list[FrameRun]]] = []
        for instance, window in reports:
            assert window == last_reported[instance] + 1, (
                f"instance {instance} reported window {window} out of order"
            )
            last_reported[instance] = window
            if by_window[instance]:
                awaited = by_window[instance].pop(window, ())
                freed += [held.frames for held in awaited if self._is_released(held)]
        return freed

    def receiver_answered(self, ticket: int, instance: int) -> list[dict[int, list[FrameRun]]]:
        """The receiver has all pages of the ticket or refuses the rest: what became free."""
        held = self._by_ticket.pop((ticket, instance), None)
        return [held.frames] if held is not None and self._is_released(held) else []

    def end_term(self, last_window: int) -> list[dict[int, list[FrameRun]]]:
        """End all windows up to the last one and all tickets, reported or not.

        Every member has left the term or is lost. Returns all that was held.
        """
        self.last_reported = [last_window] * len(self.last_reported)
        return self.give_up()

    def give_up(self) -> list[dict[int, list[FrameRun]]]:
        """The cluster has ended, and no report or answer will come: returns all that is held."""
        frames = [held.frames for held in self._all()]
        self._by_ticket, self._num_held = {}, 0
        for by_window in self._by_window:
            by_window.clear()
        return frames

    def frames(self) -> Iterator[tuple[int, int]]:
        """Every held (instance, frame), once for each hold. For invariants."""
        for held in self._all():
            for instance, runs in held.frames.items():
                yield from (
                    (instance, run.frame + index) for run in runs for index in range(run.num_pages)
                )

    def _all(self) -> Iterable[Held]:
        groups = [held for by_window in self._by_window for held in by_window.values()]
        groups.append(list(self._by_ticket.values()))
        return {id(held): held for group in groups for held in group}.values()

    def _is_released(self, held: Held) -> bool:
        """One report or answer less to wait for; returns whether it was the last."""
        held.num_awaited -= 1
        self._num_held -= held.num_awaited == 0
        return held.num_awaited == 0
