"""Buckets: the batch shapes that steps are captured for (5.2, Algorithm 2).

Enters: the bounds. Leaves: the nearest bucket that holds a step's shape. Does not know: tensors,
graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured shape. A CP degree never changes it: received rows are attention rows whatever
    their degree."""

    num_rows: int
    """Rows of this instance, padding included."""
    num_received: int
    """Received attention rows, padding included."""


class BucketTable:
    """The buckets of one instance."""

    def __init__(
        self, max_rows: int, max_attention_rows: int, row_buckets: tuple[int, ...] = ()
    ) -> None:
        """`row_buckets` ascends to max_rows; empty: powers of two. Raises ValueError if it does not
        end at max_rows.

        There is always a bucket of no rows: an instance without rows then computes no padding, and
        takes part.
        """
        self.rows = (0, *(row_buckets or powers_of_two(max_rows)))
        if self.rows[-1] != max_rows:
            raise ValueError(
                f"row_buckets ends at {self.rows[-1]}; it must end at max_rows ({max_rows})"
            )
        self.received = (0, *powers_of_two(max_attention_rows))

    def all(self) -> list[Bucket]:
        """Every bucket, largest first: the largest capture sizes the memory pool that the others
        share."""
        return sorted(
            (Bucket(rows, received) for rows in self.rows for received in self.received),
            reverse=True,
        )

    def lookup(self, num_rows: int, num_received: int) -> Bucket:
        """The smallest bucket that holds the shape. The brain never plans beyond the bounds, hence
        the assertion."""
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
