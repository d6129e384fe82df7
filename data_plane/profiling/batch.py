"""The batches that a profile measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nanocp.config.cluster import BoundsConfig
from nanocp.values.plan import PAGE_SIZE

_MIN_BATCH_LEN = 128


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of which every measured step decodes one token."""

    length: int
    """Tokens that attention reads, the new one included."""
    kv_binding: tuple[int, ...]
    """The instances with equal runs of its pages; the first, with the last run, is the MoE binding.
    """

    @property
    def moe_binding(self) -> int:
        """The instance with the request's row."""
        return self.kv_binding[0]

    def pages_of(self, instance: int) -> range:
        """Return the pages of the instance; none outside the KV binding."""
        if instance not in self.kv_binding:
            return range(0)
        num_pages, degree = -(-self.length // PAGE_SIZE), len(self.kv_binding)
        place = (self.kv_binding.index(instance) - 1) % degree
        return range(place * num_pages // degree, (place + 1) * num_pages // degree)

    def tokens_of(self, instance: int) -> int:
        """Return the request's tokens in the instance's attention."""
        pages = self.pages_of(instance)
        return min(pages.stop * PAGE_SIZE, self.length) - pages.start * PAGE_SIZE if pages else 0


Batch = Sequence[BatchRequest]


def num_frames(batch: Batch, instance: int) -> int:
    """Return the frames that the batch fills on the instance."""
    return sum(len(request.pages_of(instance)) for request in batch)


def alone(length: int, degree: int) -> Batch:
    """Return one request over `degree` instances: the profile of 4.2.2."""
    return (BatchRequest(length, tuple(range(degree))),)


def local_batches(num_instances: int, max_rows: int, max_tokens: int) -> Iterator[Batch]:
    """Yield batches without links, equal on every instance."""
    for rows in _steps(1, max_rows):
        for length in _steps(_MIN_BATCH_LEN, max_tokens // rows):
            yield [
                BatchRequest(length, (instance,))
                for instance in range(num_instances)
                for _ in range(rows)
            ]


def linked_batches(num_instances: int, bounds: BoundsConfig, max_tokens: int) -> Iterator[Batch]:
    """Yield batches of linked rows: over two instances, then over all."""
    for degree in sorted({2, num_instances}):
        num_peers = degree - 1
        most = min(
            bounds.max_links,
            bounds.max_rows,
            bounds.max_partials // num_peers,
            bounds.max_attention_rows // degree,
            max_tokens // (_MIN_BATCH_LEN * degree),
        )
        for rows in _steps(1, most):
            yield [
                BatchRequest(
                    _MIN_BATCH_LEN * degree,
                    tuple((first + step) % num_instances for step in range(degree)),
                )
                for first in range(num_instances)
                for _ in range(rows)
            ]


def _steps(low: int, high: int) -> list[int]:
    return (
        [low << power for power in range(0, max(high // low, 1).bit_length(), 2)]
        if high >= low
        else []
    )
