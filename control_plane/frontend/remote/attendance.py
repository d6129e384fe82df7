"""Who attends to each open request: a front end, or nobody since its front end was lost.

Enters: submissions, ends, losses of front ends. Leaves: requests that are to end, because their
clients have resumed them elsewhere or nobody has; the numbers of new requests. Does not know:
streams, threads, time.
"""

from __future__ import annotations

from collections.abc import Mapping

_NUMBERS_OF_A_CONTROLLER = 10_000_000
"""Numbers that each front end has under one controller, before those of the next one begin."""


class Attendance:
    """The open requests of front ends that are processes of their own.

    Request id r belongs to front end (r - 1) % num_front_ends.
    """

    def __init__(self, num_front_ends: int, controller_number: int = 1) -> None:
        """controller_number: counts the controllers of a service.

        A later one does not know all numbers that lost front ends have used, so it begins behind.
        """
        self._num = num_front_ends
        begin = (controller_number - 1) * _NUMBERS_OF_A_CONTROLLER * num_front_ends
        self.first_ids = [begin + 1 + index for index in range(num_front_ends)]
        """By front end: a number that no request of it has had, nor any greater one."""
        self._attended: list[dict[int, str]] = [{} for _ in range(num_front_ends)]
        """By front end: its open requests by number, with the client's id of each."""
        self.unattended: dict[str, list[int]] = {}
        """Open requests of front ends that were lost, by the client's id."""

    @property
    def num_open(self) -> int:
        """Choices that have been submitted, and whose front end is not done with them."""
        return sum(map(len, self._attended))

    def owner(self, request_id: int) -> int:
        """The front end that the number belongs to."""
        return (request_id - 1) % self._num

    def used(self, request_id: int) -> None:
        """The number is, or was, a request's: no other gets it."""
        index = self.owner(request_id)
        self.first_ids[index] = max(self.first_ids[index], request_id + self._num)

    def submitted(self, request_id: int, client_id: str) -> list[int]:
        """Take note of an attempt; returns the requests that it takes the place of."""
        self.used(request_id)
        self._attended[self.owner(request_id)][request_id] = client_id
        if self._attend_again(request_id, client_id):
            return []  # Its front end is back, and so are the client's other choices.
        return self.unattended.pop(client_id, [])

    def ended(self, request_id: int) -> None:
        """The front end has nothing more to do with the request."""
        self._attended[self.owner(request_id)].pop(request_id, None)

    def lost(self, index: int) -> Mapping[int, str]:
        """The front end is lost: returns its open requests, to which nobody attends from now on."""
        requests, self._attended[index] = self._attended[index], {}
        for request_id, client_id in requests.items():
            self.unattended.setdefault(client_id, []).append(request_id)
        return requests

    def released(self, requests: Mapping[int, str]) -> list[int]:
        """Nobody waits for these any longer; returns those that nobody has resumed."""
        return [each for each, client_id in requests.items() if self._attend_again(each, client_id)]

    def _attend_again(self, request_id: int, client_id: str) -> bool:
        """Whether nobody attended to the request; now it is not counted as such."""
        unattended = self.unattended.get(client_id, [])
        if request_id not in unattended:
            return False
        unattended.remove(request_id)
        if not unattended:
            del self.unattended[client_id]
        return True
