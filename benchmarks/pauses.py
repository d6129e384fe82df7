"""The longest pause of a stream while one large or costly request is answered, and while none is.

Enters: an address of a service of `models/tale`. Leaves: for each kind of request the pauses in
pairs. Does not know: what the requests cost, or why.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

WINDOW_S = 1.5
"""Shortest time in which a pause is looked for."""
_TEXT = "a " * 2_000_000
INPUTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "text prompt of 4 MB": ("/v1/completions", {"prompt": _TEXT, "max_tokens": 3}),
    "chat of 4 MB": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
    "text of 4 MB to tokenize": ("/tokenize", {"prompt": _TEXT}),
    "500,000 token ids to text": ("/detokenize", {"tokens": [66, 1000] * 250_000}),
    "regex of a million characters": (
        "/v1/completions",
        {"prompt": "Q", "max_tokens": 20, "structured_outputs": {"regex": "[xy](a{1000}){1000}"}},
    ),
    "multiples of 999,983": (
        "/v1/completions",
        {
            "prompt": "Q",
            "structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}},
        },
    ),
}
_STREAM = {"prompt": "Once upon a time", "max_tokens": 7000, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class AddedPause:
    """Longest pauses of a stream beside one kind of request, medians over the pairs."""

    request: str
    status: int
    """The answer's; 400 for what cannot be served."""
    answered_s: float
    idle_s: float
    beside_s: float
    added_s: float
    """Median of the pairs' differences."""
    num_pairs: int


class _Stream:
    """One stream in a thread, until it is closed; when its events came."""

    def __init__(self, url: str) -> None:
        self.arrivals_s: list[float] = []
        self._begun, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=_STREAM, timeout=300) as answer:
            for line in answer.iter_lines():
                if line:
                    self.arrivals_s.append(time.perf_counter())
                    if len(self.arrivals_s) > 20:
                        self._begun.set()
                if self._closed.is_set():
                    return
        self._begun.set()

    def __enter__(self) -> _Stream:
        if not self._begun.wait(300):
            raise RuntimeError("the stream does not begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def longest_pause_s(self, work: Callable[[], None]) -> float:
        """The longest time between two events while `work` runs, at least for WINDOW_S."""
        begin_s = time.perf_counter()
        work()
        time.sleep(max(0.2, begin_s + WINDOW_S - time.perf_counter()))
        end_s = time.perf_counter()
        inside = [begin_s, *(each for each in self.arrivals_s if begin_s < each < end_s), end_s]
        if not self._thread.is_alive():
            raise RuntimeError("the stream ended within the measurement")
        return max(after - before for before, after in pairwise(inside))


def measure_pauses(url: str, num_pairs: int) -> list[AddedPause]:
    """Pairs for each of INPUTS: first idle, then beside the request, in one stream."""
    results = []
    for name, (path, body) in INPUTS.items():
        content, answers, pairs = json.dumps(body), [], []

        def post(path: str = path, content: str = content, answers: list[Any] = answers) -> None:
            begin_s = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{url}{path}", content=content, headers=headers, timeout=300)
            answers.append((answer.status_code, time.perf_counter() - begin_s))

        for _ in range(num_pairs):
            with _Stream(url) as stream:
                idle_s = stream.longest_pause_s(lambda: None)
                pairs.append((idle_s, stream.longest_pause_s(post)))
        results.append(
            AddedPause(
                name,
                answers[0][0],
                round(statistics.median(took_s for _, took_s in answers), 3),
                round(statistics.median(idle_s for idle_s, _ in pairs), 3),
                round(statistics.median(beside_s for _, beside_s in pairs), 3),
                round(statistics.median(beside_s - idle_s for idle_s, beside_s in pairs), 3),
                num_pairs,
            )
        )
    return results
