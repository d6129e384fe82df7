"""An observer whose calls travel to another process, together and a little later."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from typing import Any

from control_plane.observe.observer import EndedRequest, Observer
from nanocp.values.plan import FinishReason


class Observations(Observer):
    """Keeps calls until they are taken, from any thread."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()

    def take(self) -> bytes:
        """Return the new calls, encoded; empty if there are none."""
        with self._lock:
            calls, self._calls = self._calls, []
        return json.dumps(calls).encode() if calls else b""

    def http_responded(self, endpoint: str, method: str, status: int) -> None:
        self._note("http_responded", endpoint, method, status)

    def on_request(self, num_choices: int) -> None:
        self._note("on_request", num_choices)

    def on_submitted(self, prompt_len: int) -> None:
        self._note("on_submitted", prompt_len)

    def on_first_token(self, ttft_s: float) -> None:
        self._note("on_first_token", ttft_s)

    def on_token(self, interval_s: float, paused_by: str = "") -> None:
        self._note("on_token", interval_s, paused_by)

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        self._note("on_finished", reason.name, asdict(times))

    def on_request_over(self, longest: int) -> None:
        self._note("on_request_over", longest)

    def _note(self, *call: Any) -> None:
        with self._lock:
            self._calls.append(call)


def replay(content: bytes, observer: Observer) -> list[EndedRequest]:
    """Make the calls of `Observations.take`; return the requests that ended."""
    ended = []
    for name, *arguments in json.loads(content) if content else ():
        match name:
            case "on_finished":
                ended.append(EndedRequest(**arguments[1]))
                observer.on_finished(FinishReason[arguments[0]], ended[-1])
            case _:
                getattr(observer, name)(*arguments)
    return ended
