"""Buckets: the batch shapes that steps are captured for.

Enters: the bounds. Leaves: the nearest bucket that holds a step's shape. Does not know: tensors,
graphs. (The paper's section 5.2, Algorithm 2.)
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured shape.

    The CP degree of a request never changes it: a received row is one attention row at any degree.
    """

    num_rows: int
    """Rows of this instance, with padding."""
    num_received: int
    """Received attention rows, with padding."""


class BucketTable:
    """The buckets of one instance."""

    def __init__(
        self, max_rows: int, max_attention_rows: int, row_buckets: tuple[int, ...] = ()
    ) -> None:
        """Make the buckets for up to `max_rows` rows and `max_attention_rows` received rows.

        row_buckets: the numbers of rows, ascending to max_rows; empty: powers of two. Raises
        ValueError if it does not end at max_rows. A bucket of no rows is always added, so that an
        instance without rows takes part in a step without computing padding.
        """
        self.rows = (0, *(row_buckets or powers_of_two(max_rows)))
        if self.rows[-1] != max_rows:
            raise ValueError(
                f"row_buckets ends at {self.rows[-1]}; it must end at max_rows ({max_rows})"
            )
        self.received = (0, *powers_of_two(max_attention_rows))

    def all(self) -> list[Bucket]:
        """Every bucket, largest first.

        The first capture sizes the memory pool that the others share.
        """
        return sorted(
            (Bucket(rows, received) for rows in self.rows for received in self.received),
            reverse=True,
        )

    def lookup(self, num_rows: int, num_received: int) -> Bucket:
        """The smallest bucket that holds the shape.

        The scheduler never plans beyond the bounds, so a larger shape fails an assertion.
        """
        assert num_rows <= self.rows[-1] and num_received <= self.received[-1], (
            num_rows,
            num_received,
        )
        return Bucket(
            self.rows[bisect_left(self.rows, num_rows)],
            self.received[bisect_left(self.received, num_received)],
        )


def powers_of_two(high: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `high`, and `high`."""
    return (*(1 << power for power in range((high - 1).bit_length())), high)
