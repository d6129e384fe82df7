"""Buckets: the batch shapes of captured steps. (The paper's section 5.2, Algorithm 2.)"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured shape; a received row is one attention row at any CP degree."""

    num_rows: int
    num_received: int
    width: int = 1
    """Step rows of a row, with the same pages: one, and one for each draft."""
    has_links: bool = True
    """False: no row is sent or received, so attention awaits no peer."""


class BucketTable:
    """The buckets of one instance."""

    def __init__(
        self,
        max_rows: int,
        max_attention_rows: int,
        row_buckets: tuple[int, ...] = (),
        widths: Sequence[int] = (1,),
        num_instances: int = 0,
    ) -> None:
        """row_buckets: numbers of rows, ascending to max_rows; empty: powers of two.

        widths: those with buckets of their own; others run in width 1. num_instances: of the
        cluster, if steps without links are captured apart, else 0. A bucket of no rows is added.
        Raises ValueError if row_buckets does not end at max_rows.
        """
        self.rows = (0, *(row_buckets or powers_of_two(max_rows)))
        """Sizes of the buckets of width 1."""
        if self.rows[-1] != max_rows:
            raise ValueError(
                f"row_buckets ends at {self.rows[-1]}; it must end at max_rows ({max_rows})"
            )
        received = (0, *powers_of_two(max_attention_rows))
        self._num_instances = num_instances
        self._sizes = {
            width: (_whole_rows(self.rows, width), _whole_rows(received, width)) for width in widths
        }

    def all(self) -> list[Bucket]:
        """Return every bucket, largest first: the first capture sizes the shared memory pool."""
        return sorted(
            (
                bucket
                for width, sizes in self._sizes.items()
                for rows, received in product(*sizes)
                for bucket in self._of_shape(rows, received, width)
            ),
            key=lambda bucket: (bucket.width, bucket),
            reverse=True,
        )

    def _of_shape(self, rows: int, received: int, width: int) -> list[Bucket]:
        if not self._num_instances:
            return [Bucket(rows, received, width)]
        # Whoever is alone has no links; without rows nothing is sent.
        has_links = self._num_instances > 1 and (rows or received)
        alone = [] if received else [Bucket(rows, 0, width, has_links=False)]
        return [*([Bucket(rows, received, width)] if has_links else []), *alone]

    def lookup(
        self, num_rows: int, num_received: int, width: int = 1, has_links: bool = True
    ) -> Bucket:
        """Return the smallest bucket that holds the shape, which is within the bounds."""
        width = width if width in self._sizes else 1
        rows, received = self._sizes[width]
        assert num_rows <= rows[-1] and num_received <= received[-1], (num_rows, num_received)
        return Bucket(
            rows[bisect_left(rows, num_rows)],
            received[bisect_left(received, num_received)],
            width,
            has_links or not self._num_instances,
        )


def _whole_rows(sizes: Sequence[int], width: int) -> list[int]:
    return sorted({size // width * width for size in sizes})


def powers_of_two(high: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below `high`, and `high`."""
    return (*(1 << power for power in range((high - 1).bit_length())), high)
