"""The layers of a stage and their KV: where they are, what of it is filled, how they move.

Enters: layer moves, KV that arrives, changes of the page table. Leaves: KV of layers for other
stages, LayersMoved. Does not know: passes in their order, hidden rows, what a layer computes.

Of each frame of each layer it is known how many tokens are filled. Before a layer computes a span,
its KV of every earlier position must be there, and of no later one: a layer that runs twice or not
at all, and KV that is missing or stale, are errors by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_plane.instance.interface import PageMover
from data_plane.transport.exchange import PeerLost
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMoves, LayersMoved, PassDone, Span, layers_of
from nanocp.values.plan import PAGE_SIZE, InstancePlan


class StageLayers(ABC):
    """What a stage has of layers. Subclasses read and write frames."""

    def __init__(self, stage: int, pipeline: PipelineConfig, num_frames: int) -> None:
        self.number, self._pipeline = stage, pipeline
        self._num_frames = num_frames

    def _begin_layers(self, mover: PageMover) -> None:
        """Have the layers of the start, and no KV."""
        self._mover = mover
        self._events: list[PassDone | LayersMoved] = []
        """What happened since the last poll."""
        self._layers = layers_of(self._pipeline.first_split, self.number)
        self._layout = 0
        self._place_of = {layer: place for place, layer in enumerate(self._layers)}
        """layer -> its place in the KV, of own layers and of those that were or will be own."""
        self._filled = np.zeros((self._pipeline.num_places, self._num_frames), np.int64)
        """[place, frame] -> tokens from the frame's first on whose KV is there."""
        self._newest_moves = 0
        self._unreported_moves: int | None = None
        self._to_send: deque[tuple[int, int, int]] = deque()
        """(target, layer, frame) of KV to send, in order."""
        self._coming: dict[tuple[int, int], bool] = {}
        """(layer, frame) that is to come -> whether it still holds the page that was meant."""
        self._num_missing: dict[int, int] = {}
        """Own layer -> frames that must come before it can run."""
        self._source_of: dict[int, int] = {}
        """Layer -> the stage that its KV comes from."""

    # --- frames and weights

    @abstractmethod
    def _read_frame(self, place: int, frame: int) -> Any:
        """The KV of one layer in one frame, as `_write_frame` takes it at another stage."""

    @abstractmethod
    def _write_frame(self, place: int, frame: int, payload: Any) -> None:
        """Put KV that arrived into a layer's frame."""

    def _has_layers(self) -> bool:
        """Whether all layers that have a place are here, but for KV: the mark comes after that."""
        return True

    @abstractmethod
    def _new_layer(self, layer: int, place: int) -> None:
        """The layer has this place from now on. What another layer had there is useless."""

    # --- calls

    def progress(self) -> None:
        """Take KV that arrived, and send what finds a place. Call it when idle; never blocks.

        Raises PeerLost if the connection has ended by which KV was to come.
        """
        sources = set(self._source_of.values()) if self._coming else ()
        lost = [source for source in sources if self._mover.has_lost(source)]
        for pages in self._mover.arrived():
            for page in pages:
                if page.ticket > self._newest_moves:
                    break  # this stage has older passes to run; the page stays in its ring
                self._arrive(page.page, page.num_tokens, page.payload)
        if lost:
            self._require_complete(lost)
        while self._to_send and self._mover.has_place(self._to_send[0][0]):
            target, layer, frame = self._to_send.popleft()
            place = self._place_of[layer]
            self._mover.send(
                target,
                ticket=self._newest_moves,
                page=layer * self._num_frames + frame,
                num_tokens=int(self._filled[place, frame]),
                payload=self._read_frame(place, frame),
            )
        has_all = not self._to_send and not self._coming
        if self._unreported_moves is not None and has_all and self._has_layers():
            self._events.append(LayersMoved(self.number, self._unreported_moves))
            self._unreported_moves = None

    def _require_complete(self, lost: Sequence[int]) -> None:
        """Raise PeerLost if KV is to come from one of these stages."""
        for layer, _ in self._coming:
            source = self._source_of[layer]
            if source in lost:
                raise PeerLost(
                    f"stage {self.number} waits for KV of layer {layer}: its connection from stage "
                    f"{source} has ended",
                    source,
                )

    @property
    def is_moving(self) -> bool:
        """Whether KV of layers is to be sent or to come: `progress` has something to do."""
        return self._unreported_moves is not None

    # --- what is filled

    def _empty_frames(self, table: InstancePlan, spans: Sequence[Span]) -> None:
        """Frames that requests got are empty, but for pages that they share."""
        started = {start.request_id for start in table.starts}
        first_of = {span.request_id: span.first for span in spans if span.request_id in started}
        for request_id, first_page, num_pages, frame in table.changes.pages:
            first_empty = max(first_of.get(request_id, 0) // PAGE_SIZE, first_page)
            frames = range(frame + first_empty - first_page, frame + num_pages)
            self._filled[:, frames.start : frames.stop] = 0
            for key in self._coming:
                if key[1] in frames:
                    self._coming[key] = False

    def _fill(self, layer: int, place: int, spans: Sequence[tuple[Span, Sequence[int]]]) -> None:
        """Check that KV is there up to each span, and count that of the span."""
        filled = self._filled[place]
        for (request_id, first, num_tokens, _), frames in spans:
            page, offset = divmod(first, PAGE_SIZE)
            before = filled[frames[: page + 1]]
            if before[-1] != offset or not (before[:-1] == PAGE_SIZE).all():
                raise RuntimeError(
                    f"stage {self.number}, layer {layer}: request {request_id} goes on at position "
                    f"{first}, and its frames are filled with {before.tolist()} tokens"
                )
            filled[frames[page:-1]] = PAGE_SIZE
            filled[frames[-1]] = first + num_tokens - (len(frames) - 1) * PAGE_SIZE

    def _is_complete(self, layer: int) -> bool:
        """Whether the layer can run: all of its KV is here."""
        return layer not in self._num_missing

    # --- layers that move

    def _begin_moves(self, item: LayerMoves) -> None:
        if self._unreported_moves is not None or item.number != self._newest_moves + 1:
            raise RuntimeError(
                f"layer moves {item.number} came after {self._newest_moves}, of which "
                f"{self._unreported_moves} are under way"
            )
        self._newest_moves = self._unreported_moves = item.number
        for layer, source, target, place, runs in item.moves:
            frames = [frame + index for frame, count in runs for index in range(count)]
            if source == self.number:
                self._to_send.extend((target, layer, frame) for frame in frames)
            if target == self.number:
                self._source_of[layer] = source
                self._take_place(layer, place)
                self._coming.update(dict.fromkeys(((layer, frame) for frame in frames), True))
                if item.split is not None and frames:
                    self._num_missing[layer] = len(frames)
        if item.split is not None:
            self._layers = layers_of(item.split, self.number)
            self._layout = item.number
            if absent := [layer for layer in self._layers if layer not in self._place_of]:
                raise RuntimeError(f"stage {self.number} has no place for layers {absent}")

    def _take_place(self, layer: int, place: int) -> None:
        """Give the layer a place, unless it has it: then the KV that it has there is kept."""
        if self._place_of.get(layer) == place:
            return
        for other, taken in list(self._place_of.items()):
            if taken == place:
                if other in self._layers:
                    raise RuntimeError(f"layer {layer} would take the place of layer {other}")
                del self._place_of[other]
        self._place_of[layer] = place
        self._filled[place] = 0
        self._new_layer(layer, place)

    def _arrive(self, page: int, num_tokens: int, payload: Any) -> None:
        layer, frame = divmod(page, self._num_frames)
        if self._coming.pop((layer, frame)):
            place = self._place_of[layer]
            self._write_frame(place, frame, payload)
            self._filled[place, frame] = num_tokens
        if layer in self._num_missing:
            self._num_missing[layer] -= 1
            if not self._num_missing[layer]:
                del self._num_missing[layer]
