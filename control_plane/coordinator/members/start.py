"""The start of a cluster, until every member is ready."""

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
        """Choices at start-up of each ready member."""
        self._done: Future[None] = Future()
        self.progress: Callable[[str], None] = lambda sentence: None
        """Called for each member that becomes ready."""

    def wait(self) -> dict[Member, tuple[str, ...]]:
        """Wait for every member, from any thread; return each one's choices.

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
        """Return whether the start has succeeded or failed."""
        return self._done.done()

    @property
    def has_succeeded(self) -> bool:
        """Return whether all members have been ready at one time."""
        return self.is_over and self._done.exception() is None

    def ready(self, member: Member, chosen: Sequence[str]) -> None:
        """Record that the member is ready, with its choices."""
        self._ready[member] = chosen
        if not self.is_over:
            self.progress(f"{len(self._ready)} of {len(self._expected)} processes are ready")
            if len(self._ready) == len(self._expected):
                self._done.set_result(None)

    def again(self, members: Collection[Member]) -> None:
        """Wait for these members once more, unless the start is over."""
        if not self.is_over:
            for member in members:
                self._ready.pop(member, None)

    def fail(self, message: str) -> None:
        """Fail the start for this reason."""
        self._done.set_exception(StartError(message))
