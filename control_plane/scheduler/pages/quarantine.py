"""Freed frames that an instance or a prefill may still write to (protocol.md, quarantine)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from control_plane.scheduler.state.frame_ledger import FrameRun


@dataclass(slots=True, eq=False)
class Held:
    """Frames of one ended request, and the reports and answers they wait for."""

    frames: dict[int, list[FrameRun]]
    num_awaited: int = 0


class Quarantine:
    """Counts down the reports and answers that each ended request waits for."""

    def __init__(self, num_instances: int) -> None:
        self.last_reported = [-1] * num_instances
        """Last window that each instance has reported, -1 before the first."""
        self.seats: Collection[int] = range(num_instances)
        """Instances of the term; others report no window."""
        self._by_window: list[dict[int, list[Held]]] = [{} for _ in range(num_instances)]
        """By instance: window -> entries that wait for its report."""
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
        """Hold frames until bound instances report the window and receivers answer.

        Returns frames that are free at once: all or none.
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
        """Record (instance, window) of windows that are over; return the freed frames."""
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
        """Record a receiver that will write no more; return the freed frames."""
        held = self._by_ticket.pop((ticket, instance), None)
        return [held.frames] if held is not None and self._is_released(held) else []

    def end_term(self, last_window: int) -> list[dict[int, list[FrameRun]]]:
        """End all windows up to the last one and all tickets: every member has left or is lost.

        Returns all that was held.
        """
        self.last_reported = [last_window] * len(self.last_reported)
        return self.give_up()

    def give_up(self) -> list[dict[int, list[FrameRun]]]:
        """Return all that is held, since no answer will come."""
        frames = [held.frames for held in self._all()]
        self._by_ticket, self._num_held = {}, 0
        for by_window in self._by_window:
            by_window.clear()
        return frames

    def frames(self) -> Iterator[tuple[int, int]]:
        """Yield every held (instance, frame), once for each hold. For invariants."""
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
        held.num_awaited -= 1
        self._num_held -= held.num_awaited == 0
        return held.num_awaited == 0
