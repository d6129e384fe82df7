"""Responses that clients may name for a while, in the memory of one front end."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from uuid import uuid4

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.responses_api.protocol import (
    Item,
    ResponsesAnswer,
    ResponsesRequest,
    Status,
)

TTL_S = 3600.0
"""Time without a use after which a response is forgotten."""
MAX_BACKGROUND = 64
"""Most responses that are computed while nobody waits."""


@dataclass(slots=True)
class KeptResponse:
    """A response with its own part of the input; those before it are kept by themselves."""

    owner: str
    """The tenant."""
    status: Status
    before: str | None
    """The previous response."""
    head: bytes
    """The response without its output, as JSON."""
    output: bytes
    """Items of the output, as JSON."""
    input: bytes
    """Items without references, as JSON."""
    used_s: float
    """The latest use, by a monotonic clock."""

    @property
    def answer(self) -> ResponsesAnswer:
        """The response."""
        answer = ResponsesAnswer.model_validate_json(self.head)
        answer.output = json.loads(self.output)
        return answer

    @property
    def items(self) -> list[Item]:
        """The input."""
        found: list[Item] = json.loads(self.input)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes of the store."""
        return len(self.head) + len(self.output) + len(self.input)


class ResponseStore:
    """Keeps the latest used responses within a number of bytes of JSON."""

    def __init__(
        self, max_bytes: int, front_end: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        """max_bytes: 0 keeps none. front_end: its number, which is a part of ids."""
        self._max_bytes, self._front_end, self._now = max_bytes, front_end, now
        self._by_id: OrderedDict[str, KeptResponse] = OrderedDict()
        """The least recently used one is the first."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self.num_bytes = 0
        """Bytes of JSON that are kept."""

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._by_id

    def new_id(self, name: str = "") -> str:
        """Return an id for a response. name: a unique one; empty: it is drawn."""
        return f"resp_{self._front_end}_{name or uuid4().hex}"

    def keeps(self, request: ResponsesRequest) -> bool:
        """Return whether the response will be kept. Raises ApiError if it must be and cannot."""
        is_kept = self._max_bytes > 0 and request.store is not False
        if request.background and (request.stream or not is_kept):
            raise ApiError(
                "background is true; store must be true then, stream false, and the service must "
                "keep responses (service.responses_store_mib), or leave it out",
                "background",
            )
        if request.background and len(self._running) >= MAX_BACKGROUND:
            raise ApiError(
                f"background is true, and {MAX_BACKGROUND} such responses are computed already; "
                "send it again later",
                "background",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        return is_kept

    def keep(self, owner: str, items: Sequence[Item], answer: ResponsesAnswer) -> None:
        """Keep a response, in place of an earlier one of its id, if it is not too large."""
        self._forget(answer.id)
        head = answer.model_copy(update={"output": []}).model_dump_json().encode()
        output, given = json.dumps(answer.output).encode(), json.dumps(items).encode()
        before = answer.previous_response_id
        kept = KeptResponse(owner, answer.status, before, head, output, given, self._now())
        if kept.num_bytes <= self._max_bytes:
            self._by_id[answer.id] = kept
            self.num_bytes += kept.num_bytes
        while self.num_bytes > self._max_bytes:
            self._end(next(iter(self._by_id)))

    def find(self, owner: str, response_id: str) -> KeptResponse:
        """Return a response. Raises ApiError for one that is not kept, or another tenant's."""
        if kept := self._used(owner, response_id):
            return kept
        field = "response_id"
        raise self._absent(f"{field} is {response_id!r:.60}, which", response_id, field)

    def history(self, owner: str, response_id: str | None) -> list[Item]:
        """Return all items up to the end of a response. Raises ApiError."""
        parts, field, last = list[list[Item]](), "previous_response_id", response_id
        while response_id:
            kept = self._used(owner, response_id)
            if kept is None:
                named = (
                    "which"
                    if response_id == last
                    else f"whose earlier response {response_id!r:.60}"
                )
                raise self._absent(f"{field} is {last!r:.60}, {named}", response_id, field)
            if kept.status not in ("completed", "incomplete"):
                sentence = f"{field} is {response_id!r:.60}, which is {kept.status}; it must be"
                raise ApiError(f"{sentence} completed", field)
            # Not of the whole answers, each of which may have thousands of tools.
            parts.append([*kept.items, *json.loads(kept.output)])
            response_id = kept.before
        return [item for part in reversed(parts) for item in part]

    def item(self, owner: str, read: dict[str, dict[str, Item]], item_id: str, field: str) -> Item:
        """Return an item of a response that is kept. Raises ApiError for another one.

        read: items by responses and ids, which one request has read.
        """
        found = re.fullmatch(r"[a-z]+_(.+)_\d+", item_id)
        name = f"resp_{found[1]}" if found else ""
        if name not in read:
            kept = self._used(owner, name)
            read[name] = {one["id"]: one for one in json.loads(kept.output)} if kept else {}
        if item := read[name].get(item_id):
            return item
        sentence = f"{field} is {item_id!r:.60}, which is not kept {self._where(item_id)}"
        raise ApiError(sentence, field, HTTPStatus.NOT_FOUND)

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises ApiError for one not kept."""
        self.find(owner, response_id)
        self._end(response_id)

    def run(self, response_id: str, task: asyncio.Task[None]) -> None:
        """Keep the task that computes a response, until it ends; it ends with the response."""
        self._running[response_id] = task
        task.add_done_callback(lambda ended: self._running.pop(response_id, None))

    def cancel(self, owner: str, response_id: str) -> KeptResponse:
        """End the computation of a response; one that has ended stays as it is.

        Raises ApiError for one that is not kept, or not of the background.
        """
        kept, task = self.find(owner, response_id), self._running.get(response_id)
        answer = kept.answer
        if not answer.background:
            sentence = f"response_id is {response_id!r:.60}, which has no background"
            raise ApiError(f"{sentence}; close its connection instead", "response_id")
        if task and not task.done():
            task.cancel()
            answer.status = "cancelled"
            self.keep(owner, kept.items, answer)
        return self.find(owner, response_id)

    def _used(self, owner: str, response_id: str) -> KeptResponse | None:
        now_s = self._now()
        while self._by_id and next(iter(self._by_id.values())).used_s + TTL_S <= now_s:
            self._end(next(iter(self._by_id)))
        kept = self._by_id.get(response_id)
        if kept is None or kept.owner != owner:
            return None
        kept.used_s = now_s
        self._by_id.move_to_end(response_id)
        return kept

    def _absent(self, sentence: str, name: str, field: str) -> ApiError:
        sentence = f"{sentence} is not kept {self._where(name)}"
        return ApiError(sentence, field, HTTPStatus.NOT_FOUND, "previous_response_not_found")

    def _where(self, name: str) -> str:
        found = re.match(r"[a-z]+_(\d{1,2})_", name)
        if found and int(found[1]) != self._front_end:
            return f"by front end {self._front_end}; ask front end {found[1]}, which made it"
        return f"here, or was not used for {TTL_S:.0f} s; send all items as input"

    def _end(self, response_id: str) -> None:
        if task := self._running.get(response_id):
            task.cancel()
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        if kept := self._by_id.pop(response_id, None):
            self.num_bytes -= kept.num_bytes
