"""Which instance generates which token of a request: no other may deliver it.

Enters: placements, and where a request goes on after a preemption. Leaves: the instance of each
token. Does not know: streams, what a token says.

A placement reaches the front end before its plan leaves the controller, so it is known before any
token that it allows.
"""

from __future__ import annotations

from bisect import bisect_right

from nanocp.values.plan import Placement


class TokenOwners:
    """The MoE bindings of one request, each from a token on."""

    def __init__(self, prompt_len: int, steps_per_window: int) -> None:
        self._prompt_len = prompt_len
        self._steps_per_window = steps_per_window
        self._num_known = 0
        """Output tokens that the request had when its row started, or started again."""
        self._bindings: list[tuple[int, int]] = []
        """(index of its first token, instance), ascending."""

    def placed(self, placement: Placement) -> None:
        """Take the MoE binding of the latest placement.

        A row changes its MoE binding between two windows. `placement.num_tokens` is its length
        after the first window at the new one, or all that it can ever have: what the old one
        generated before are whole windows.
        """
        if self._bindings and self._bindings[-1][1] == placement.moe_binding:
            return
        num_new = placement.num_tokens - self._prompt_len - self._num_known
        first = self._num_known + num_new // self._steps_per_window * self._steps_per_window
        self._bindings.append((first, placement.moe_binding))

    def begin_attempt(self, num_known: int) -> None:
        """The request is submitted again with this many output tokens, and not placed yet."""
        self._num_known = num_known
        self._bindings.clear()

    def of(self, index: int) -> int | None:
        """The instance that generates the output token; None if the request is not placed."""
        number = bisect_right(self._bindings, index, key=_first_token)
        return self._bindings[number - 1][1] if number else None


def _first_token(binding: tuple[int, int]) -> int:
    return binding[0]
