"""The start of a cluster: which members are ready, until every one is.

Enters: members that are ready, reasons why the start fails. Leaves: the end of a wait. Does not
know: streams, processes, terms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from nanocp.values.members import Member


class StartError(RuntimeError):
    """The cluster cannot start; the message says which member and why."""


class Start:
    """Used from the controller's thread, except `wait`."""

    def __init__(self, expected: Sequence[Member], timeout_ms: int) -> None:
        """expected: every member that must be ready. timeout_ms: limits.start_timeout_ms."""
        self._expected = expected
        self._timeout_ms = timeout_ms
        self._ready: dict[Member, Sequence[str]] = {}
        """What each member that is ready has chosen."""
        self._done: Future[None] = Future()
        self.progress: Callable[[str], None] = lambda sentence: None
        """Called for each member that becomes ready."""

    def wait(self) -> dict[Member, tuple[str, ...]]:
        """Wait for every member, from any thread; returns what each chose at start-up.

        Raises StartError naming the members that failed or are late.
        """
        try:
            self._done.result(self._timeout_ms / 1000)
        except TimeoutError:
            absent = ", ".join(str(each) for each in self._expected if each not in self._ready)
            limit = f"start_timeout_ms ({self._timeout_ms} ms)"
            raise StartError(f"not ready after {limit}: {absent}") from None
        return {member: tuple(self._ready[member]) for member in self._expected}

    @property
    def is_over(self) -> bool:
        """Whether every member has been ready at one time, or the start has failed."""
        return self._done.done()

    @property
    def has_succeeded(self) -> bool:
        """Whether every member has been ready at one time."""
        return self.is_over and self._done.exception() is None

    def ready(self, member: Member, chosen: Sequence[str]) -> None:
        """The member is ready, and has chosen this."""
        self._ready[member] = chosen
        if not self.is_over:
            self.progress(f"{len(self._ready)} of {len(self._expected)} processes are ready")
            if len(self._ready) == len(self._expected):
                self._done.set_result(None)

    def again(self, members: Collection[Member]) -> None:
        """These must become ready once more, unless the start is over."""
        if not self.is_over:
            for member in members:
                self._ready.pop(member, None)

    def fail(self, message: str) -> None:
        """The cluster does not start, for this reason."""
        self._done.set_exception(StartError(message))
