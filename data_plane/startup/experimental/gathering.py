"""What instances tell each other before a backend starts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from data_plane.transport.exchange import ExchangeTimeout, PeerLost, Term
from data_plane.transport.futex import Word
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import OwnedSegment, Segment
from nanocp.config.limits import LimitsConfig

_WORD_BYTES = 8
_TICK_S = 0.05


class Gathering:
    """One text of each instance for all others, in descriptions of segments."""

    def __init__(
        self,
        segments: Segments,
        kind: str,
        instance: int,
        num_instances: int,
        limits: LimitsConfig,
    ) -> None:
        self._segments, self._kind, self._instance = segments, kind, instance
        self._num_instances, self._limits = num_instances, limits
        self._own: OwnedSegment | None = None

    def offer(self, text: str) -> None:
        """Show this instance's text."""
        num_bytes = self._num_instances * _WORD_BYTES
        self._own = self._segments.own(self._kind, self._instance, text, num_bytes)

    def gather(self, peers: Sequence[int]) -> list[str]:
        """Wait for the texts of these instances, and until each has read those of all.

        Waits at most `start_timeout_ms`. Raises ExchangeTimeout, PeerLost or TermOver.
        """
        assert self._own is not None, "offer comes first"
        deadline = time.monotonic() + self._limits.start_timeout_ms / 1000
        writer = _writer(self._instance)
        with ExitStack() as attached:
            segments: list[Segment] = []
            for peer in peers:
                segments.append(
                    self._segments.attach(
                        self._kind, peer, writer, self._limits, _left_ms(deadline)
                    )
                )
                attached.callback(segments[-1].close)
            for segment in segments:
                segment.publish(_word(segment, self._instance), 1)
            for peer, segment in zip(peers, segments, strict=True):
                self._await_reader(peer, segment, deadline)
        return [segment.description for segment in segments]

    def _await_reader(self, peer: int, segment: Segment, deadline: float) -> None:
        assert self._own is not None
        term, limits = self._segments.term, self._limits
        has_read = _word(self._own, peer).wait_at_least(
            1,
            _left_ms(deadline),
            limits.tick_ms,
            lambda: not term.is_over and self._lives(peer, segment),
        )
        if has_read is None:
            term.check()
            if not self._lives(peer, segment):
                raise PeerLost(f"instance {peer} is gone before it has connected", peer)
            raise ExchangeTimeout(
                f"instance {peer} has not met all others in {limits.start_timeout_ms} ms", peer
            )

    def _lives(self, peer: int, segment: Segment) -> bool:
        """True while the peer's word may come; it may have left since, by another connection."""
        assert self._own is not None
        is_attached = self._own.is_attached(_writer(peer))
        return segment.owner_is_alive() if is_attached is None else is_attached

    def leave(self) -> None:
        """Withdraw it. Idempotent."""
        if self._own is not None:
            self._own.close()
            self._own = None


def _writer(instance: int) -> str:
    return f"instance {instance}"


def _word(segment: Segment | OwnedSegment, instance: int) -> Word:
    """An instance's word in a segment: it has read all."""
    return Word(segment.memory, segment.data_offset + instance * _WORD_BYTES)


def _left_ms(deadline: float) -> float:
    return max(0.0, (deadline - time.monotonic()) * 1000)


class Communicator:
    """Three calls of mpi4py's, by which packages meet; all instances make them."""

    def __init__(
        self, segments: Segments, name: str, instance: int, num_instances: int, limits: LimitsConfig
    ) -> None:
        self._segments, self._name, self._instance = segments, name, instance
        self._num_instances, self._limits = num_instances, limits
        self._rounds: list[Gathering] = []

    def Get_rank(self) -> int:
        """This instance."""
        return self._instance

    def Get_size(self) -> int:
        """Number of instances."""
        return self._num_instances

    def allgather(self, value: Any) -> list[Any]:
        """Return every instance's value: None, a number, a text or a bytearray."""
        kind = f"{self._name}{len(self._rounds)}"
        own = Gathering(self._segments, kind, self._instance, self._num_instances, self._limits)
        # All stay until `leave`: a peer may still await others' reading, and looks who lives.
        self._rounds.append(own)
        own.offer(json.dumps(value, default=lambda raw: {"bytes": raw.hex()}))
        peers = [peer for peer in range(self._num_instances) if peer != self._instance]
        values = [json.loads(text, object_hook=_raw) for text in own.gather(peers)]
        values.insert(self._instance, value)
        return values

    def require_same(self, versions: str) -> None:
        """Raise ValueError, naming an instance, unless all have these."""
        for peer, found in enumerate(self.allgather(versions)):
            if found != versions:
                raise ValueError(
                    f"instance {peer} has {found}, and instance {self._instance} {versions}: "
                    "install the same on every node"
                )

    def leave(self) -> None:
        """Withdraw all values. Idempotent."""
        for each in self._rounds:
            each.leave()


def _raw(tree: dict[str, str]) -> bytearray:
    return bytearray.fromhex(tree["bytes"])


def bounded(
    call: Callable[[], Any], name: str, device: torch.device, term: Term, limits: LimitsConfig
) -> Any:
    """Run a call that waits for all instances without a limit; its thread may stay.

    Raises ExchangeTimeout, which says the name, TermOver, or what the call raises.
    """
    outcome: list[Any] = []

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    for _ in range(round(limits.start_timeout_ms / 1000 / _TICK_S) + 1):
        thread.join(_TICK_S)
        if outcome:
            value, error = outcome[0]
            if error is not None:
                raise error
            return value
        term.check()
    raise ExchangeTimeout(f"{name} did not start on all instances in {limits.start_timeout_ms} ms")
