"""The layers of a stage and their KV: where they are, what of it is filled, how they move."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from data_plane.instance.interface import PageMover
from data_plane.transport.exchange import PeerLost
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMoves, LayersMoved, Span, layers_of
from nanocp.values.plan import PAGE_SIZE, InstancePlan


class LayerStore(Protocol):
    """Weights of layers, and their KV by place and frame."""

    def has(self, layer: int) -> bool:
        """Whether the weights of a layer that has a place are here."""

    def new_layer(self, layer: int, place: int) -> None:
        """The layer has this place from now on. What another layer had there is useless."""

    def read_frame(self, place: int, frame: int) -> Any:
        """The KV of one layer in one frame, as `write_frame` takes it at another stage."""

    def write_frame(self, place: int, frame: int, payload: Any) -> None:
        """Put KV that arrived into a layer's frame."""


class StageLayers:
    """What a stage has of layers. Subclasses read and write frames."""

    def __init__(
        self,
        stage: int,
        pipeline: PipelineConfig,
        num_frames: int,
        mover: PageMover,
        store: LayerStore,
    ) -> None:
        self._stage, self._num_frames = stage, num_frames
        self._mover, self._store = mover, store
        self.moved: list[LayersMoved] = []
        """Moves that are over and not reported."""
        self.own = layers_of(pipeline.first_split, stage)
        self.layout = 0
        self.place_of = {layer: place for place, layer in enumerate(self.own)}
        """layer -> its place in the KV, of own layers and of those that were or will be own."""
        self.filled = np.zeros((pipeline.num_places, num_frames), np.int64)
        """[place, frame] -> tokens from the frame's first on whose KV is there."""
        self.newest_moves = 0
        self._unreported_moves: int | None = None
        self.to_send: deque[tuple[int, int, int]] = deque()
        """(target, layer, frame) of KV to send, in order."""
        self.coming: dict[tuple[int, int], bool] = {}
        """(layer, frame) that is to come -> whether it still holds the page that was meant."""
        self.num_missing: dict[int, int] = {}
        """Own layer -> frames that must come before it can run."""
        self.source_of: dict[int, int] = {}
        """Layer -> the stage that its KV comes from."""

    # --- calls

    def progress(self) -> None:
        """Take KV that arrived, send what finds a place; never blocks. May raise PeerLost."""
        sources = set(self.source_of.values()) if self.coming else ()
        lost = [source for source in sources if self._mover.has_lost(source)]
        for pages in self._mover.arrived():
            for page in pages:
                if page.ticket > self.newest_moves:
                    break  # this stage has older passes to run; the page stays in its ring
                self._arrive(page.page, page.num_tokens, page.payload)
        if lost:
            self._require_complete(lost)
        while self.to_send and self._mover.has_place(self.to_send[0][0]):
            target, layer, frame = self.to_send.popleft()
            place = self.place_of[layer]
            self._mover.send(
                target,
                ticket=self.newest_moves,
                page=layer * self._num_frames + frame,
                num_tokens=int(self.filled[place, frame]),
                payload=self._store.read_frame(place, frame),
            )
        has_all = not self.to_send and not self.coming
        if (
            self._unreported_moves is not None
            and has_all
            and all(map(self._store.has, self.place_of))
        ):
            self.moved.append(LayersMoved(self._stage, self._unreported_moves))
            self._unreported_moves = None

    def _require_complete(self, lost: Sequence[int]) -> None:
        for layer, _ in self.coming:
            source = self.source_of[layer]
            if source in lost:
                raise PeerLost(
                    f"stage {self._stage} waits for KV of layer {layer}: its connection from stage "
                    f"{source} has ended",
                    source,
                )

    @property
    def is_moving(self) -> bool:
        """Whether layers are on their way that have not been reported."""
        return self._unreported_moves is not None

    # --- what is filled

    def empty_frames(self, table: InstancePlan, spans: Sequence[Span]) -> None:
        """Frames that requests got are empty, but for pages that they share."""
        started = {start.request_id for start in table.starts}
        first_of = {span.request_id: span.first for span in spans if span.request_id in started}
        for request_id, first_page, num_pages, frame in table.changes.pages:
            first_empty = max(first_of.get(request_id, 0) // PAGE_SIZE, first_page)
            frames = range(frame + first_empty - first_page, frame + num_pages)
            self.filled[:, frames.start : frames.stop] = 0
            for key in self.coming:
                if key[1] in frames:
                    self.coming[key] = False

    def fill(self, layer: int, place: int, spans: Sequence[tuple[Span, Sequence[int]]]) -> None:
        """Check that KV is there up to each span, and count that of the span."""
        filled = self.filled[place]
        for (request_id, first, num_tokens, _), frames in spans:
            page, offset = divmod(first, PAGE_SIZE)
            before = filled[frames[: page + 1]]
            if before[-1] != offset or not (before[:-1] == PAGE_SIZE).all():
                raise RuntimeError(
                    f"stage {self._stage}, layer {layer}: request {request_id} goes on at position "
                    f"{first}, and its frames are filled with {before.tolist()} tokens"
                )
            filled[frames[page:-1]] = PAGE_SIZE
            filled[frames[-1]] = first + num_tokens - (len(frames) - 1) * PAGE_SIZE

    def is_complete(self, layer: int) -> bool:
        """Whether the layer can run: its weights and all of its KV are here."""
        return layer not in self.num_missing and self._store.has(layer)

    # --- layers that move

    def begin_moves(self, item: LayerMoves) -> None:
        """Let layers move; raises RuntimeError if they cannot."""
        if self._unreported_moves is not None or item.number != self.newest_moves + 1:
            raise RuntimeError(
                f"layer moves {item.number} came after {self.newest_moves}, of which "
                f"{self._unreported_moves} are under way"
            )
        self.newest_moves = self._unreported_moves = item.number
        for layer, source, target, place, runs in item.moves:
            frames = [frame + index for frame, count in runs for index in range(count)]
            if source == self._stage:
                self.to_send.extend((target, layer, frame) for frame in frames)
            if target == self._stage:
                self.source_of[layer] = source
                self._take_place(layer, place)
                self.coming.update(dict.fromkeys(((layer, frame) for frame in frames), True))
                if item.split is not None and frames:
                    self.num_missing[layer] = len(frames)
        if item.split is not None:
            self.own = layers_of(item.split, self._stage)
            self.layout = item.number
            if absent := [layer for layer in self.own if layer not in self.place_of]:
                raise RuntimeError(f"stage {self._stage} has no place for layers {absent}")

    def _take_place(self, layer: int, place: int) -> None:
        """Give the layer a place, unless it has it: then the KV that it has there is kept."""
        if self.place_of.get(layer) == place:
            return
        for other, taken in list(self.place_of.items()):
            if taken == place:
                if other in self.own:
                    raise RuntimeError(f"layer {layer} would take the place of layer {other}")
                del self.place_of[other]
        self.place_of[layer] = place
        self.filled[place] = 0
        self._store.new_layer(layer, place)

    def _arrive(self, page: int, num_tokens: int, payload: Any) -> None:
        layer, frame = divmod(page, self._num_frames)
        if self.coming.pop((layer, frame)):
            place = self.place_of[layer]
            self._store.write_frame(place, frame, payload)
            self.filled[place, frame] = num_tokens
        if layer in self.num_missing:
            self.num_missing[layer] -= 1
            if not self.num_missing[layer]:
                del self.num_missing[layer]
