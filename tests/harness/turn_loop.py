"""An event loop of asyncio whose clock only a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class TurnLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, in which threads run at once."""

    now_s = 0.0

    def time(self) -> float:
        """See BaseEventLoop."""
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *arguments: Any) -> Any:
        """See BaseEventLoop."""
        future = self.create_future()
        try:
            future.set_result(func(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def run_what_is_due(self) -> None:
        """Run every call that is due now."""
        while self._ready or (self._scheduled and self._scheduled[0].when() <= self.now_s):
            self.call_soon(self.stop)
            self.run_forever()

    def within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call something that needs a running loop."""
        asyncio._set_running_loop(self)
        try:
            return call(*arguments)
        finally:
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """Cancel every task, as the end of a process does."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run_what_is_due()
        self.close()
