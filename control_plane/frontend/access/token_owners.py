"""The instance that generates each token of a request: no other may deliver it.

Its placement reaches the front end before the token.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from nanocp.values.plan import Placement


class TokenOwners:
    """The MoE bindings of one request, each from a token on."""

    def __init__(self, prompt_len: int, steps_per_window: int) -> None:
        self._prompt_len = prompt_len
        self._steps_per_window = steps_per_window
        self._num_known = 0
        """Output tokens when the row last started."""
        self._bindings: list[tuple[int, int, int]] = []
        """(least and most index of its first token, instance), ascending."""

    def placed(self, placement: Placement) -> None:
        """Take the MoE binding of the latest placement.

        `placement.num_tokens` is the row's length after the first window at the new binding, or its
        final length. With drafts there are only bounds: placement.begins.
        """
        if self._bindings and self._bindings[-1][2] == placement.moe_binding:
            return
        if not self._bindings:
            least = most = self._num_known
        elif placement.begins is not None:
            least, most = (number + 1 - self._prompt_len for number in placement.begins)
        else:
            num_new = placement.num_tokens - self._prompt_len - self._num_known
            least = self._num_known + num_new // self._steps_per_window * self._steps_per_window
            most = least
        self._bindings.append((least, most, placement.moe_binding))

    def begin_attempt(self, num_known: int) -> None:
        """Begin another attempt with this many output tokens, not placed yet."""
        self._num_known = num_known
        self._bindings.clear()

    def of(self, index: int) -> int | None:
        """Return the last instance that may generate the token; None if not placed."""
        number = bisect_right(self._bindings, index, key=itemgetter(0))
        return self._bindings[number - 1][2] if number else None

    def may_generate(self, index: int, instance: int) -> bool:
        """Return whether the instance may generate the output token."""
        end = index + 1
        for least, most, binding in reversed(self._bindings):
            if binding == instance and least <= index < end:
                return True
            end = min(end, most)
        return False
