"""The front end of each open request, until a client resumes those of a lost one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

_NUMBERS_OF_A_CONTROLLER = 10_000_000
"""Numbers of each front end under one controller, before those of the next one."""


class Attendance:
    """The open requests of front ends in processes of their own.

    Request id r belongs to front end (r - 1) % num_front_ends.
    """

    def __init__(self, num_front_ends: int, controller_number: int = 1) -> None:
        """controller_number: counts the controllers of a service.

        A later one begins behind all numbers that lost front ends may have used.
        """
        self._num = num_front_ends
        begin = (controller_number - 1) * _NUMBERS_OF_A_CONTROLLER * num_front_ends
        self.first_ids = [begin + 1 + index for index in range(num_front_ends)]
        """By front end: a number above those of all its requests."""
        self._attended: list[dict[int, str]] = [{} for _ in range(num_front_ends)]
        """Number -> the client's id, by front end."""
        self.unattended: dict[str, list[int]] = {}
        """Open requests of lost front ends, by the client's id."""

    @property
    def num_open(self) -> int:
        """The submitted choices that their front ends still have."""
        return sum(map(len, self._attended))

    def owner(self, request_id: int) -> int:
        """Return the front end that the number belongs to."""
        return (request_id - 1) % self._num

    def used(self, request_id: int) -> None:
        """Reserve the number of a present or past request."""
        index = self.owner(request_id)
        self.first_ids[index] = max(self.first_ids[index], request_id + self._num)

    def submitted(self, request_id: int, client_id: str) -> list[int]:
        """Record an attempt; return the requests that it replaces."""
        self.used(request_id)
        self._attended[self.owner(request_id)][request_id] = client_id
        if self._attend_again(request_id, client_id):
            return []  # Its front end is back, and so are the client's other choices.
        return self.unattended.pop(client_id, [])

    def ended(self, request_id: int) -> None:
        """Record that the front end is done with the request."""
        self._attended[self.owner(request_id)].pop(request_id, None)

    def lost(self, index: int) -> Mapping[int, str]:
        """Record the loss of a front end; return its open requests."""
        requests, self._attended[index] = self._attended[index], {}
        for request_id, client_id in requests.items():
            self.unattended.setdefault(client_id, []).append(request_id)
        return requests

    def released(self, requests: Mapping[int, str]) -> list[int]:
        """Stop waiting for these requests; return those that nobody has resumed."""
        return [each for each, client_id in requests.items() if self._attend_again(each, client_id)]

    def _attend_again(self, request_id: int, client_id: str) -> bool:
        unattended = self.unattended.get(client_id, [])
        if request_id not in unattended:
            return False
        unattended.remove(request_id)
        if not unattended:
            del self.unattended[client_id]
        return True
